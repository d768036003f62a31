"""What `int8` and `fp8` share: one byte a value, a bf16 scale for each token and group of neighbouring channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from storage.codecs.base import Device, LossyCodec, Sample, common_first_row, from_raw, raw_bytes

FLOAT8_AS_BFLOAT16 = (
    torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16).view(torch.int16).numpy()
)


class Scaled(LossyCodec):
    """Body: scales [R, W/group] bf16, then codes [R, W] one byte each. The scale is rounded up, so nothing clips."""

    defaults: ClassVar[dict[str, Any]] = {"group": 64}
    top: ClassVar[float]
    codes: ClassVar[torch.dtype]

    def __init__(self, *, width: int, **fitted: Any) -> None:
        super().__init__(width=width, **fitted)
        group = self.settings["group"]
        if width % group:
            self.settings["group"] = next(size for size in range(min(group, width), 0, -1) if width % size == 0)

    def learn(self, sample: Sample, layers: int, tensors: Mapping[str, torch.Tensor]) -> None:
        row = common_first_row([values[0].float() for values, first in sample if first and len(values)])
        if row is not None:
            self.tensors["first_row"] = row.to(torch.bfloat16)

    def encode_rows(self, components: torch.Tensor) -> bytes:
        group = self.settings["group"]
        groups = components.reshape(len(components), self.width // group, group)
        exact = (groups.abs().amax(-1, keepdim=True) / self.top).clamp_min(1e-30)
        scales = exact.to(torch.bfloat16)
        scales = torch.where(scales.float() < exact, scales * 1.0078125, scales).to(torch.bfloat16)
        codes = groups / scales.float()
        if self.codes is torch.int8:
            codes = codes.round_()
        codes = codes.clamp_(-self.top, self.top)
        return raw_bytes(scales) + raw_bytes(codes.to(self.codes))

    def decode_rows(self, payload: memoryview, rows: int, device: Device) -> torch.Tensor:
        group = self.settings["group"]
        shape = (rows, self.width // group, group)
        size = rows * shape[1] * 2
        scales = from_raw(payload[:size], torch.bfloat16, rows, shape[1], 1).to(device)
        codes = from_raw(payload[size:], torch.int8, *shape)
        if self.codes is not torch.int8:  # by table: converting float8 value by value is ten times slower on a CPU
            codes = torch.from_numpy(FLOAT8_AS_BFLOAT16[codes.numpy().view(np.uint8)]).view(torch.bfloat16)
        codes = codes.to(device)
        return torch.mul(codes, scales).view(rows, self.width)
