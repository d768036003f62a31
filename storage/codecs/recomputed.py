"""The last captured layer's states of the whole context in coarse steps; a reader runs the target's layers above it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch

from storage.codecs.base import BF16, Device, Payload, StoredTeacher, TargetParts, TeacherRow
from storage.codecs.registry import register
from storage.codecs.top_corrected import TopCorrected
from storage.codecs.transform import Transform
from storage.errors import StorageError


@register
class Recomputed(TopCorrected):
    """`step`: in standard deviations of each channel of the last captured layer, decorrelated within the layer.

    The payload holds the context up to the last teacher position, and a reader needs the target's layers above.
    """

    name = "recomputed"
    defaults: ClassVar[Mapping[str, Any]] = {**TopCorrected.defaults, "step": 0.5, "layer": -1}

    @classmethod
    def _coarse_settings(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"step": settings["step"], "decorrelate": "joint", "level": settings["level"]}

    @classmethod
    def fit_rows(cls, rows: Sequence[TeacherRow], target: TargetParts | None, *, width: int, **settings: Any) -> Self:
        layer = settings.get("layer", -1)
        sample = [(layer_of(row.hidden_states, layer, width), True) for row in rows]
        coarse = Transform.fit(
            sample, width=width, **cls._coarse_settings(cls(width=width, settings=settings).settings)
        )
        return cls(width=width, settings=settings, tensors=coarse.tensors)

    def encode_teacher(self, hidden_states: torch.Tensor, last: torch.Tensor, positions: np.ndarray) -> bytes:
        length = int(positions[-1]) + 1
        coarse = self.coarse.encode(layer_of(hidden_states[:length], self.settings["layer"], self.width), first=True)
        if self.target is None or self.target.finish is None:
            raise StorageError(f"codec {self.name!r} needs the target's layers above the last captured one to encode")
        index = torch.from_numpy(positions)
        states = self.target.finish(self.coarse.decode(coarse, length, dtype=torch.float32))
        return self._join(coarse, last[index.to(last.device)], states[index.to(states.device)])

    def decode_teacher(
        self, payload: Payload, positions: np.ndarray, *, device: Device = "cpu", dtype: torch.dtype = BF16
    ) -> StoredTeacher:
        coarse, top = self._split(payload, len(positions), device)
        length = int(positions[-1]) + 1
        # float32 whatever is asked for: what the layers above make of a rounded state was never measured.
        source = self.coarse.decode(coarse, length, device=device, dtype=torch.float32)
        return StoredTeacher(source=source, **top)


def layer_of(hidden_states: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    """[S, d] of one captured layer (by place, from the end if negative) out of [S, m*d]."""
    start = layer * width % hidden_states.shape[1]
    return hidden_states[:, start : start + width]
