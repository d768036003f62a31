"""Bit-exact bf16 split into byte planes, of which zstd shrinks the upper one."""

from __future__ import annotations

import struct
from typing import Any, ClassVar

import torch
import zstandard

from storage.codecs.base import BF16, Codec, Device, Payload, from_raw, raw_bytes
from storage.codecs.registry import register
from storage.codecs.symbols import decompressed
from storage.errors import StorageError


@register
class Bf16Planes(Codec):
    """The upper bytes (sign and exponent) channel-major under zstd, the lower ones (mantissa) row-major as they are.

    Payload: u32 compressed size of the upper plane, that plane [W, R], the lower plane [R, W].
    """

    name = "bf16-planes"
    exact = True
    defaults: ClassVar[dict[str, Any]] = {"level": 1}

    def encode(self, values: torch.Tensor, *, first: bool = False) -> bytes:
        pairs = values.to(torch.bfloat16).cpu().contiguous().view(torch.uint8).view(-1, self.width, 2)
        upper = zstandard.ZstdCompressor(level=self.settings["level"]).compress(raw_bytes(pairs[..., 1].t()))
        return struct.pack("<I", len(upper)) + upper + raw_bytes(pairs[..., 0])

    def decode(self, payload: Payload, rows: int, *, device: Device = "cpu", dtype: torch.dtype = BF16) -> torch.Tensor:
        view = memoryview(payload).cast("B")
        (size,) = struct.unpack("<I", view[:4])
        count = rows * self.width
        if len(view) - 4 - size != count:
            raise StorageError(f"the lower plane holds {len(view) - 4 - size} bytes, {rows} rows have {count}")
        upper = decompressed(view[4 : 4 + size], count)
        if len(upper) != count:
            raise StorageError(f"the upper plane holds {len(upper)} bytes, {rows} rows have {count}")
        bits = torch.empty(rows, self.width, 2, dtype=torch.uint8)
        bits[..., 1] = torch.frombuffer(bytearray(upper), dtype=torch.uint8).view(self.width, rows).t()
        bits[..., 0] = from_raw(view[4 + size :], torch.uint8, rows, self.width)
        return bits.view(torch.bfloat16).view(rows, self.width).to(device=device, dtype=dtype)
