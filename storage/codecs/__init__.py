"""Codecs by name, how they are written beside the cache, and how their error is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from storage.codecs.base import Codec, Sample, StoredTeacher, TargetParts, as_tensor
from storage.codecs.exact import Bf16, Bf16Planes
from storage.codecs.measure import measure, teacher_error
from storage.codecs.scaled import Fp8, Int8
from storage.codecs.teacher import Corrected, Recomputed, Sparse, TeacherRow, last_state_sample
from storage.codecs.transform import Projected, Transform

__all__ = [
    "CODECS",
    "Codec",
    "CodecSpec",
    "Sample",
    "StoredTeacher",
    "TargetParts",
    "TeacherRow",
    "as_tensor",
    "codec_class",
    "dump_codec",
    "finished",
    "fit_codec",
    "fit_teacher",
    "load_codec",
    "measure",
]

CODECS: dict[str, type[Codec]] = {
    c.name: c for c in (Bf16, Bf16Planes, Int8, Fp8, Transform, Projected, Corrected, Recomputed, Sparse)
}


JUDGED_POSITIONS = 4096  # of the teacher, on which its codecs are measured


@dataclass(frozen=True, kw_only=True)
class CodecSpec:
    """A codec asked for: its name and settings. Part of the cache's identity; what was fitted is not.

    ValueError for a name that there is not, and a setting or value that the codec does not have.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        codec_class(self.name).complete(self.settings)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "settings": codec_class(self.name).complete(self.settings)}


def codec_class(name: str) -> type[Codec]:
    """The codec of that name; ValueError lists the known ones."""
    if name not in CODECS:
        raise ValueError(f"no codec is named {name!r}; choose one of {', '.join(CODECS)}")
    return CODECS[name]


def fit_codec(
    spec: CodecSpec, sample: Sample, *, width: int, layers: int = 1, tensors: Mapping[str, torch.Tensor] | None = None
) -> Codec:
    """Fit on the sample and measure on it. W = `width` values a token, made of `layers` captured layers.

    `tensors`: what a codec needs beside the sample: `projection` [C, W] for "projected", `metric` [W, W] for
    "transform" with `metric: "given"`.
    """
    given = {"layers": layers, **({"tensors": tensors} if tensors else {})}
    kind = codec_class(spec.name)
    if kind.teacher_only:
        raise ValueError(f"codec {spec.name!r} codes the teacher and is fitted with `fit_teacher`")
    extra = given if kind in (Transform, Projected) else {}
    codec = kind.fit(sample, width=width, **spec.settings, **extra)
    if any(len(values) for values, _ in sample):
        codec.measured = measure(codec, sample, layers=layers)
    return codec


def fit_teacher(
    spec: CodecSpec,
    rows: Sequence[TeacherRow],
    *,
    width: int,
    target: TargetParts | None = None,
    temperature: float = 1.0,
) -> Codec:
    """Fit a codec of the teacher on every other row and measure it on the rest (on the one row if there is but one).

    W = `width` is the hidden size. With the `target`, which codecs that know it need, the error of the acceptance rate
    at `temperature` is measured too (`teacher_error`). The codec keeps the target, ready to encode.
    """
    fitting, judged = (rows[::2], rows[1::2]) if len(rows) > 1 else (rows, rows)
    kind = codec_class(spec.name)
    if issubclass(kind, Corrected | Recomputed | Sparse):
        codec: Codec = kind.fit_rows(fitting, target, width=width, **spec.settings)
    else:
        codec = fit_codec(spec, last_state_sample(fitting), width=width)
    codec.target = target
    judged = _up_to([row for row in judged if len(row.positions)], JUDGED_POSITIONS)
    if judged and (target is not None or not codec.teacher_only):
        codec.measured = measure_teacher(codec, judged, temperature=temperature)
    return codec


def _up_to(rows: Sequence[TeacherRow], positions: int) -> list[TeacherRow]:
    """Rows spread evenly, with about so many teacher positions in all, one row at least."""
    total = sum(len(row.positions) for row in rows)
    return list(rows[:: -(-total // positions)]) if total > positions else list(rows)


def measure_teacher(codec: Codec, rows: Sequence[TeacherRow], *, temperature: float = 1.0) -> dict[str, Any]:
    """What a fitted teacher codec costs and loses on these rows; see `fit_teacher`."""
    found: dict[str, Any] = {}
    if not codec.teacher_only:
        found = measure(codec, last_state_sample(rows))
    exact, stored, size = [], [], 0
    for row in rows:
        payload = codec.encode_teacher(row.features, row.last, row.positions)
        size += len(payload)
        decoded = codec.decode_teacher(payload, row.positions, dtype=torch.float32)
        exact.append(row.last[torch.from_numpy(row.positions)])
        stored.append(decoded if codec.target is None else finished(decoded, row.positions, codec.target))
    positions = sum(map(len, exact))
    found |= {"rows": positions, "bytes_per_token": round(size / positions, 2)}
    if codec.target is not None:
        found["acceptance"] = teacher_error(torch.cat(exact), _joined(stored), codec.target, temperature=temperature)
    return found


def finished(stored: StoredTeacher, positions: np.ndarray, target: TargetParts) -> StoredTeacher:
    """A teacher that is to be recomputed, with its last states; any other as it is."""
    if stored.source is None:
        return stored
    if target.finish is None:
        raise ValueError("this teacher is recomputed by the target's layers above the last captured one: give them")
    states = target.finish(stored.source)
    return replace(stored, source=None, states=states[torch.from_numpy(positions).to(states.device)])


def _joined(parts: Sequence[StoredTeacher]) -> StoredTeacher:
    names = [name for name in ("states", "top_ids", "top_values", "tail_mass") if getattr(parts[0], name) is not None]
    return StoredTeacher(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def dump_codec(codec: Codec) -> tuple[dict[str, Any], bytes]:
    """(JSON description, safetensors bytes)."""
    description = {
        "name": codec.name,
        "width": codec.width,
        "out_width": codec.out_width,
        "settings": codec.settings,
        "measured": codec.measured,
    }
    return description, save({name: tensor.contiguous() for name, tensor in sorted(codec.tensors.items())})


def load_codec(description: Mapping[str, Any], tensors: bytes) -> Codec:
    """The codec that `dump_codec` described."""
    codec = codec_class(description["name"])(
        width=description["width"], settings=description["settings"], tensors=load(tensors)
    )
    codec.measured = dict(description["measured"])
    return codec
