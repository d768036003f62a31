"""Codecs by name, how they are written beside the cache, and how their error is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load, save

from storage.codecs.base import Codec, Sample, as_tensor
from storage.codecs.exact import Bf16, Bf16Planes
from storage.codecs.measure import measure
from storage.codecs.scaled import Fp8, Int8
from storage.codecs.transform import Projected, Transform

__all__ = ["CODECS", "Codec", "CodecSpec", "Sample", "as_tensor", "dump_codec", "fit_codec", "load_codec", "measure"]

CODECS: dict[str, type[Codec]] = {c.name: c for c in (Bf16, Bf16Planes, Int8, Fp8, Transform, Projected)}


@dataclass(frozen=True, kw_only=True)
class CodecSpec:
    """A codec asked for: its name and settings. Part of the cache's identity; what was fitted is not."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        codec_class(self.name)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "settings": {**codec_class(self.name).defaults, **self.settings}}


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
    extra = given if kind in (Transform, Projected) else {}
    codec = kind.fit(sample, width=width, **spec.settings, **extra)
    if any(len(values) for values, _ in sample):
        codec.measured = measure(codec, sample, layers=layers)
    return codec


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
