"""How far decoded states are from exact ones, measured and not assumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from storage.codecs.base import Codec, Sample


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
    """Bytes a token, bits a value, SNR over all coordinates and by layer, largest error; first tokens left out.

    By layer where the codec returns states; codecs that keep coordinates are judged on those.
    """
    exact, coded, size, rows = [], [], 0, 0
    for values, first in sample:
        if len(values) == 0:
            continue
        payload = codec.encode(values, first=first)
        size, rows = size + len(payload), rows + len(values)
        start = 1 if first else 0
        exact.append(codec.coordinates(values)[start:])
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
    if codec.out_width == codec.width and layers > 1:
        found["snr_db_by_layer"] = [_finite(snr_db(x, y)) for x, y in _by_layer(a, b, layers)]
    return found


def _by_layer(a: torch.Tensor, b: torch.Tensor, layers: int) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(a.chunk(layers, dim=1), b.chunk(layers, dim=1), strict=True))


def _finite(value: float) -> float | None:
    """JSON has no infinity: None says that nothing was lost."""
    return round(value, 3) if math.isfinite(value) else None


def acceptance_error(
    head: torch.Tensor, exact: torch.Tensor, coded: torch.Tensor, *, temperature: float = 1.0, chunk: int = 256
) -> dict[str, float]:
    """Total variation between the exact and the coded teacher's next-token distributions.

    head [V, d], exact and coded [P, d]. The acceptance rate of any drafter, sum(min(p_draft, p_teacher)), moves by at
    most this much, so mean and 99th percentile bound its error at that temperature.
    """
    if temperature <= 0:
        raise ValueError(f"temperature = {temperature}: the acceptance error is defined for temperatures above 0")
    found = []
    for start in range(0, len(exact), chunk):
        p = torch.softmax(exact[start : start + chunk].float() @ head.float().t() / temperature, dim=-1)
        q = torch.softmax(coded[start : start + chunk].float() @ head.float().t() / temperature, dim=-1)
        found.append(0.5 * (p - q).abs().sum(-1))
    distance = torch.cat(found)
    return {"mean": distance.mean().item(), "p99": distance.quantile(0.99).item(), "temperature": temperature}
