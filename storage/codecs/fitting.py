"""Codecs fitted on a sample and measured on it, and fitted ones written beside the cache and read again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from storage.codecs.base import Codec, Sample, TargetParts, TeacherRow
from storage.codecs.measure import measure, measure_teacher
from storage.codecs.registry import CodecSpec, codec_class
from storage.errors import StorageError

MEASURED_POSITIONS = 4096  # of the teacher, on which its codecs are measured


def fit_codec(
    spec: CodecSpec, sample: Sample, *, width: int, layers: int = 1, tensors: Mapping[str, torch.Tensor] | None = None
) -> Codec:
    """Fit on the sample and measure on it. W = `width` values a token, made of `layers` captured layers.

    `tensors`: what a codec needs beside the sample: `projection` [C, W] for "projected", `metric` [W, W] for
    "transform" with `metric: "given"`.
    """
    kind = codec_class(spec.name)
    if kind.teacher_only:
        raise StorageError(f"codec {spec.name!r} codes the teacher and is fitted with `fit_teacher`")
    codec = kind.fit(sample, width=width, layers=layers, tensors=tensors, **spec.settings)
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
    fitting, measuring = (rows[::2], rows[1::2]) if len(rows) > 1 else (rows, rows)
    codec = codec_class(spec.name).fit_rows(fitting, target, width=width, **spec.settings)
    codec.target = target
    with_teacher = [row for row in measuring if len(row.positions)] or [row for row in fitting if len(row.positions)]
    if with_teacher and (target is not None or not codec.teacher_only):
        codec.measured = measure_teacher(codec, _up_to(with_teacher, MEASURED_POSITIONS), temperature=temperature)
    return codec


class SampleCodecs:
    """Codecs fitted on every other row of a sample and measured on the others: what each costs and what it loses.

    `target`: what a codec of that name asks of the target. `components`: `projection` and `shares` of a pilot, for
    projected ones. `temperature`: of the errors of the acceptance rate. A sample of one row serves for both.
    """

    def __init__(
        self,
        rows: Sequence[TeacherRow],
        *,
        layers: int,
        hidden_size: int,
        target: Callable[[str], TargetParts],
        components: Mapping[str, torch.Tensor] | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.rows, self.layers, self.hidden_size = rows, layers, hidden_size
        self.target, self.components, self.temperature = target, components, temperature
        self.fitting, self.measuring = rows[::2], rows[1::2] or rows

    def fit(self, part: str, spec: CodecSpec) -> Codec:
        """A codec of the part `features` or `teacher`."""
        if part == "teacher":
            parts = self.target(spec.name)
            return fit_teacher(spec, self.rows, width=self.hidden_size, target=parts, temperature=self.temperature)
        sample = [(row.hidden_states, True) for row in self.fitting]
        width = self.layers * self.hidden_size
        return fit_codec(spec, sample, width=width, layers=self.layers, tensors=self.components)

    def measure(self, part: str, codec: Codec) -> dict[str, Any]:
        """What a codec that was fitted here costs and loses on the rows that it was not fitted on."""
        if part == "teacher":
            return codec.measured  # on those rows
        return measure(codec, [(row.hidden_states, True) for row in self.measuring], layers=self.layers)


def _up_to(rows: Sequence[TeacherRow], positions: int) -> list[TeacherRow]:
    """Rows spread evenly, with about so many teacher positions in all, one row at least."""
    total = sum(len(row.positions) for row in rows)
    return list(rows[:: -(-total // positions)]) if total > positions else list(rows)


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
    """The codec that `dump_codec` described. StorageError for a file or description that is not one of it."""
    try:
        stored = load(tensors)
    except SafetensorError as error:
        raise StorageError(f"not a safetensors file: {error}") from error
    codec = codec_class(description["name"])(
        width=description["width"], settings=description["settings"], tensors=stored
    )
    codec.check()
    codec.measured = dict(description["measured"])
    return codec
