"""What `transform` and `projected` share: linear components, uniform steps, entropy coding.

R rows, W captured width, C components. y = P x; codes = round((y - mean) / step); decoded y = codes * step + mean. The
mean is removed inside the quantiser only, so a consumer that merges P or its inverse into its own first linear layer
needs no bias.
"""

from __future__ import annotations

import numpy as np
import torch

from storage.codecs.base import Device, LossyCodec, Sample, common_first_row
from storage.codecs.symbols import NIBBLE, PAIR, WIDE, choose_classes, pack, unpack
from storage.errors import StorageError


class Quantised(LossyCodec):
    """Codes components whose `mean`, `step` [C] and optionally `forward` [C, W] and `inverse` [W, C] are fitted
    (or [k, W/k, W/k], the diagonal blocks of such a matrix)."""

    inline_dtype = torch.float32

    @property
    def _classes(self) -> np.ndarray:
        return self.tensors["classes"].numpy()

    def check(self) -> None:
        forward = self.tensors.get("forward")
        blocks = len(forward) if forward is not None and forward.ndim == 3 else 1
        count = len(forward) if forward is not None and forward.ndim == 2 else self.width
        square = (blocks, self.width // max(blocks, 1), self.width // max(blocks, 1))
        self.require_tensor("forward", (count, self.width), square, needed=False)
        self.require_tensor("inverse", (self.width, count), square, needed=self._restores and forward is not None)
        for name in ("mean", "step", "classes"):
            self.require_tensor(name, (count,))
        if self.tensors["classes"].dtype != torch.uint8 or int(self.tensors["classes"].max()) > PAIR:
            raise StorageError(f"codec {self.name!r}: its tensor 'classes' is not of {WIDE}, {NIBBLE} and {PAIR}")
        super().check()

    @property
    def out_width(self) -> int:
        forward = self.tensors.get("forward")
        return self.width if forward is None or self._restores or forward.ndim == 3 else len(forward)

    @property
    def projection(self) -> torch.Tensor | None:
        return None if self._restores else dense(self.tensors.get("forward"))

    @property
    def unprojection(self) -> torch.Tensor | None:
        return None if self._restores else dense(self.tensors.get("inverse"))

    @property
    def _restores(self) -> bool:
        return self.settings.get("output") == "states"

    def _forward(self, values: torch.Tensor) -> torch.Tensor:
        values = values.float()
        return apply(self.tensor_on("forward", values.device), values) if "forward" in self.tensors else values

    def components(self, values: torch.Tensor) -> torch.Tensor:
        return values.float() if self._restores else self._forward(values)

    def encode_rows(self, components: torch.Tensor) -> bytes:
        values = self._forward(components) if self._restores else components
        mean, step = self.tensor_on("mean", values.device), self.tensor_on("step", values.device)
        codes = ((values - mean) / step).round_().clamp_(-(2**30), 2**30).to(torch.int32)
        return pack(codes.t().cpu().numpy(), self._classes, level=self.settings["level"])

    def decode_rows(self, payload: memoryview, rows: int, device: Device) -> torch.Tensor:
        codes = torch.from_numpy(unpack(payload, self._classes, rows)).to(device)
        mean, step = self.tensor_on("mean", device), self.tensor_on("step", device)
        if not self._restores or "inverse" not in self.tensors:
            return torch.addcmul(mean, codes.t().contiguous().to(torch.float32), step)
        inverse = self.tensor_on("inverse", device)
        if inverse.ndim == 3:
            return apply(inverse, torch.addcmul(mean[:, None], codes.to(torch.float32), step[:, None]).t())
        return torch.addmm(inverse @ mean, codes.to(torch.float32).t(), (inverse * step).t())

    def fit_steps(self, components: torch.Tensor, step: torch.Tensor | float) -> None:
        """Means, steps ([C] or one for all, in units of the components) and packing classes from [R, C]."""
        mean = components.mean(0)
        deviation = (components - mean).square().mean(0).sqrt()
        steps = torch.as_tensor(step, dtype=torch.float32).expand(len(mean)).clamp_min(1e-12).clone()
        self.tensors["mean"], self.tensors["step"] = mean, steps
        self.tensors["classes"] = torch.from_numpy(choose_classes((deviation / steps).numpy()))

    def fit_first_row(self, sample: Sample) -> None:
        firsts = [self.components(values[:1])[0] for values, first in sample if first and len(values)]
        row = common_first_row(firsts)
        if row is not None:
            self.tensors["first_row"] = row


def dense(matrix: torch.Tensor | None) -> torch.Tensor | None:
    """[C, W], of a matrix or its diagonal blocks; float32."""
    if matrix is None:
        return None
    return (torch.block_diag(*matrix) if matrix.ndim == 3 else matrix).float()


def apply(matrix: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """values [R, W] times a matrix [C, W] or diagonal blocks [k, W/k, W/k] of one."""
    if matrix.ndim == 2:
        return values @ matrix.t()
    parts = values.reshape(len(values), len(matrix), matrix.shape[2]).transpose(0, 1)
    return torch.bmm(parts, matrix.transpose(1, 2)).transpose(0, 1).flatten(1)
