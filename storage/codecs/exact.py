"""Bit-exact bf16: raw (fastest to read), or split into byte planes of which zstd shrinks the upper one."""

from __future__ import annotations

import struct
from typing import Any, ClassVar

import numpy as np
import torch
import zstandard

from storage.codecs.base import Codec, from_raw, raw_bytes


class Bf16(Codec):
    """Raw little-endian bf16, row-major. float32 input is rounded to nearest even."""

    name = "bf16"
    exact = True

    def encode(self, values: torch.Tensor, *, first: bool = False) -> bytes:
        return raw_bytes(values.to(torch.bfloat16))

    def decode(
        self,
        payload: bytes | memoryview,
        rows: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        return from_raw(payload, torch.bfloat16).view(rows, self.width).to(device=device, dtype=dtype)


class Bf16Planes(Codec):
    """The upper bytes (sign and exponent) channel-major under zstd, the lower ones (mantissa) as they are.

    Payload: u32 compressed size of the upper plane, that plane [W, R], the lower plane [W, R].
    """

    name = "bf16-planes"
    exact = True
    defaults: ClassVar[dict[str, Any]] = {"level": 1}

    def encode(self, values: torch.Tensor, *, first: bool = False) -> bytes:
        bits = values.to(torch.bfloat16).cpu().view(torch.int16).t().contiguous().numpy().view(np.uint8)
        pairs = bits.reshape(-1, 2)
        upper = zstandard.ZstdCompressor(level=self.settings["level"]).compress(
            np.ascontiguousarray(pairs[:, 1]).tobytes()
        )
        return struct.pack("<I", len(upper)) + upper + np.ascontiguousarray(pairs[:, 0]).tobytes()

    def decode(
        self,
        payload: bytes | memoryview,
        rows: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        view = memoryview(payload).cast("B")
        (size,) = struct.unpack("<I", view[:4])
        count = rows * self.width
        upper = zstandard.ZstdDecompressor().decompress(view[4 : 4 + size], max_output_size=count)
        pairs = np.empty((count, 2), np.uint8)
        pairs[:, 1] = np.frombuffer(upper, np.uint8)
        pairs[:, 0] = np.frombuffer(view[4 + size :], np.uint8)
        channels = torch.from_numpy(pairs.view(np.int16).reshape(self.width, rows)).view(torch.bfloat16)
        return channels.t().to(device=device, dtype=dtype).contiguous()
