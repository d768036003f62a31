"""Bit-exact bf16, raw: the fastest to read."""

from __future__ import annotations

import torch

from storage.codecs.base import BF16, Codec, Device, Payload, from_raw, raw_bytes
from storage.codecs.registry import register


@register
class Bf16(Codec):
    """Raw little-endian bf16, row-major. float32 input is rounded to nearest even."""

    name = "bf16"
    exact = True

    def encode(self, values: torch.Tensor, *, first: bool = False) -> bytes:
        return raw_bytes(values.to(torch.bfloat16))

    def decode(self, payload: Payload, rows: int, *, device: Device = "cpu", dtype: torch.dtype = BF16) -> torch.Tensor:
        return from_raw(payload, torch.bfloat16, rows, self.width).to(device=device, dtype=dtype)
