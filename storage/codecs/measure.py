"""How far decoded states are from exact ones, measured and not assumed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from storage.codecs.base import Codec, Sample, StoredTeacher, TargetParts, TeacherRow, last_state_sample
from storage.codecs.top_tokens import CHUNK
from storage.errors import StorageError


def snr_db(exact: torch.Tensor, coded: torch.Tensor) -> float:
    """Signal to noise, dB, of [R, W]: each channel's mean removed, channels weighted by 1/variance."""
    signal = (exact - exact.mean(0)).square().mean(0)
    noise = (exact - coded).square().mean(0)
    used = signal > 0
    if not bool(used.any()):
        return math.inf
    ratio = (noise[used] / signal[used]).mean().item()
    return math.inf if ratio == 0 else -10 * math.log10(ratio)


def measure(codec: Codec, sample: Sample, *, layers: int = 1) -> dict[str, Any]:
    """Bytes a token, bits a value, SNR over all components and by layer, largest error; first tokens left out.

    By layer where the codec returns states; codecs that keep components are judged on those.
    """
    exact, coded, size, rows = [], [], 0, 0
    for values, first in sample:
        if len(values) == 0:
            continue
        payload = codec.encode(values, first=first)
        size, rows = size + len(payload), rows + len(values)
        start = 1 if first else 0
        exact.append(codec.components(values)[start:])
        coded.append(codec.decode(payload, len(values), dtype=torch.float32)[start:])
    a, b = torch.cat(exact), torch.cat(coded)
    found: dict[str, Any] = {
        "rows": rows,
        "bytes_per_token": round(size / rows, 2),
        "bits_per_value": round(8 * size / rows / codec.width, 4),
    }
    if len(a) < 2:
        return found
    found["snr_db"] = _finite(snr_db(a, b))
    found["largest_error"] = float(f"{(a - b).abs().max().item():.6g}")
    if codec.projection is None and layers > 1:
        found["snr_db_by_layer"] = [_finite(snr_db(x, y)) for x, y in _by_layer(a, b, layers)]
    return found


def measure_teacher(codec: Codec, rows: Sequence[TeacherRow], *, temperature: float = 1.0) -> dict[str, Any]:
    """What a fitted teacher codec costs and loses on these rows; see `fit_teacher`."""
    found: dict[str, Any] = {}
    if not codec.teacher_only:
        found = measure(codec, last_state_sample(rows))
    exact, stored, size = [], [], 0
    for row in rows:
        payload = codec.encode_teacher(row.hidden_states, row.last_hidden_state, row.positions)
        size += len(payload)
        decoded = codec.decode_teacher(payload, row.positions, dtype=torch.float32)
        exact.append(row.last_hidden_state[torch.from_numpy(row.positions)])
        stored.append(decoded if codec.target is None else recomputed_states(decoded, row.positions, codec.target))
    positions = sum(map(len, exact))
    found |= {"rows": positions, "bytes_per_token": round(size / positions, 2)}
    if codec.target is not None:
        found["acceptance"] = teacher_error(torch.cat(exact), _joined(stored), codec.target, temperature=temperature)
    return found


def recomputed_states(stored: StoredTeacher, positions: np.ndarray, target: TargetParts) -> StoredTeacher:
    """A teacher that is to be recomputed, with its last states; any other as it is."""
    if stored.source is None:
        return stored
    if target.finish is None:
        raise StorageError("this teacher is recomputed by the target's layers above the last captured one: give them")
    return stored.recomputed(target.finish, torch.from_numpy(positions))


def _joined(parts: Sequence[StoredTeacher]) -> StoredTeacher:
    names = [
        name
        for name in ("last_hidden_state", "top_ids", "top_values", "tail_mass")
        if getattr(parts[0], name) is not None
    ]
    return StoredTeacher(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def _by_layer(a: torch.Tensor, b: torch.Tensor, layers: int) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(a.chunk(layers, dim=1), b.chunk(layers, dim=1), strict=True))


def _finite(value: float) -> float | None:
    """JSON has no infinity: None says that nothing was lost."""
    return round(value, 3) if math.isfinite(value) else None


def teacher_error(
    exact: torch.Tensor, stored: StoredTeacher, target: TargetParts, *, temperature: float = 1.0
) -> dict[str, float]:
    """How wrong acceptance rates become when `stored` stands for the exact teacher of last states [P, d].

    `bound`, mean and 99th percentile over positions: total variation between the two next-token distributions, by which
    the acceptance rate sum(min(p_draft, p_teacher)) of *any* drafter moves at most. A sparse teacher does not say which
    tokens share its tail; the tail's mass is part of its bound. `error`: how far the rate moves for a stand-in drafter,
    whose logits are the teacher's with noise that makes its mean acceptance rate 0.75. At temperature 0 distributions
    are the likeliest token alone.
    """
    if temperature < 0:
        raise StorageError(f"temperature = {temperature}: it must be 0 or above")
    noise = _standin_noise(target, exact, temperature)
    generator = torch.Generator().manual_seed(0)
    errors = []
    for logits, p, q, _ in _distributions(exact, stored, target, temperature):
        draft = _distribution(logits + noise * _normal(logits, generator), temperature)
        errors.append((torch.minimum(draft, p) - torch.minimum(draft, q)).sum(-1).abs())
    bound, error = total_variation(exact, stored, target, temperature=temperature), torch.cat(errors).cpu()
    return {
        "temperature": temperature,
        "bound": float(f"{bound.mean().item():.4g}"),
        "bound_p99": float(f"{bound.quantile(0.99).item():.4g}"),
        "error": float(f"{error.mean().item():.4g}"),
        "error_p99": float(f"{error.quantile(0.99).item():.4g}"),
    }


def total_variation(
    exact: torch.Tensor,
    stored: StoredTeacher,
    target: TargetParts,
    *,
    temperature: float = 1.0,
    whole_tail: bool = True,
) -> torch.Tensor:
    """`teacher_error`'s bound at each position [P]; without `whole_tail`, what a sparse one says and no more."""
    parts = _distributions(exact, stored, target, temperature)
    found = [0.5 * (p - q).abs().sum(-1) + (unknown if whole_tail else 0.0) for _, p, q, unknown in parts]
    return torch.cat(found).cpu()


def _distributions(
    exact: torch.Tensor, stored: StoredTeacher, target: TargetParts, temperature: float
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | float]]:
    """Chunk by chunk: exact logits, exact and stored distributions [p, V], mass that the stored one leaves open [p]."""
    for start in range(0, len(exact), CHUNK):
        logits = target.logits(exact[start : start + CHUNK])
        p = _distribution(logits, temperature)
        yield logits, p, *_stored_distribution(stored, slice(start, start + CHUNK), target, p, temperature)


def _distribution(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return torch.softmax(logits / temperature, dim=-1)


def _stored_distribution(
    stored: StoredTeacher, at: slice, target: TargetParts, exact: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """[P, V], and the mass [P] of which the stored teacher does not say where it lies (spread as in `exact`)."""
    if stored.tail_mass is None:
        assert stored.last_hidden_state is not None
        logits = target.logits(stored.last_hidden_state[at])
        if stored.top_ids is not None and stored.top_values is not None:
            logits = logits.scatter_add(1, stored.top_ids[at], stored.top_values[at].to(logits.dtype))
        return _distribution(logits, temperature), 0.0
    assert stored.top_ids is not None
    assert stored.top_values is not None
    ids, log_q, tail = stored.top_ids[at], stored.top_values[at], stored.tail_mass[at, None]
    if temperature == 0:
        q = torch.zeros_like(exact).scatter(1, ids.gather(1, log_q.argmax(-1, keepdim=True)), 1.0)
        return q, (exact.gather(1, ids).sum(-1) < 0.5).to(exact.dtype)
    # Of the tail at another temperature only a bound is known: no token of it is above the least of the top, and it is
    # largest when its tokens are alike.
    power = 1 / temperature
    if power >= 1:
        rest = tail * log_q.amin(-1, keepdim=True).exp() ** (power - 1)
    else:
        rest = (exact.shape[1] - ids.shape[1]) ** (1 - power) * tail**power
    weights = (log_q * power).exp()
    total = weights.sum(-1, keepdim=True) + rest
    outside = exact.scatter(1, ids, 0.0)
    outside_mass = outside.sum(-1, keepdim=True)
    q = outside * (rest / total / outside_mass.clamp_min(1e-30))
    return q.scatter(1, ids, weights / total), torch.minimum(outside_mass, rest / total)[:, 0]


def _normal(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, generator=generator).to(like)


def _standin_noise(target: TargetParts, exact: torch.Tensor, temperature: float, rows: int = 64) -> float:
    """The standard deviation of noise on the logits at which the mean acceptance rate is 0.75; 1 at temperature 0."""
    if temperature == 0:
        return 1.0
    logits = target.logits(exact[:: -(-len(exact) // rows)]) / temperature
    p, normal = logits.softmax(-1), _normal(logits, torch.Generator().manual_seed(1))
    low, high = 0.0, 8.0
    for _ in range(12):
        middle = (low + high) / 2
        overlap = torch.minimum(p, (logits + middle * normal).softmax(-1)).sum(-1).mean()
        low, high = (middle, high) if overlap > 0.75 else (low, middle)
    return low * temperature
