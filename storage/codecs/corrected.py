"""Last states in coarse steps, decorrelated in the output head's metric, and the likeliest tokens put right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch

from storage.codecs.base import BF16, Device, Payload, StoredTeacher, TargetParts, TeacherRow, last_state_sample
from storage.codecs.registry import register
from storage.codecs.top_corrected import TopCorrected
from storage.codecs.transform import Transform, head_metric
from storage.errors import StorageError

METRIC_STATES = 2048  # states that the head's metric is averaged over


@register
class Corrected(TopCorrected):
    """`step`: of all components alike, in the metric in which the squared error is the variance of the logit error
    under the teacher, raised by `ridge` (see Transform). `top` tokens are corrected (0: none), in steps of
    1/`resolution` nat."""

    name = "corrected"
    defaults: ClassVar[Mapping[str, Any]] = {**TopCorrected.defaults, "ridge": 0.1}

    @classmethod
    def _coarse_settings(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        shared = {name: settings[name] for name in ("step", "ridge", "level")}
        return {**shared, "decorrelate": "joint", "metric": "given"}

    @classmethod
    def fit_rows(cls, rows: Sequence[TeacherRow], target: TargetParts | None, *, width: int, **settings: Any) -> Self:
        if target is None:
            raise StorageError(f"codec {cls.name!r} is fitted in the metric of the target's head: give the target")
        chosen = cls(width=width, settings=settings).settings
        sample = last_state_sample(rows)
        states = torch.cat([values[1:] if first else values for values, first in sample])
        states = states[:: -(-len(states) // METRIC_STATES)]
        metric = head_metric(target.head, states, soft_cap=target.soft_cap)
        coarse = Transform.fit(sample, width=width, tensors={"metric": metric}, **cls._coarse_settings(chosen))
        return cls(width=width, settings=settings, tensors=coarse.tensors)

    def encode_teacher(self, hidden_states: torch.Tensor, last: torch.Tensor, positions: np.ndarray) -> bytes:
        exact = last[torch.from_numpy(positions).to(last.device)]
        coarse = self.coarse.encode(exact, first=bool(positions[0] == 0))
        states = self.coarse.decode(coarse, len(exact), dtype=torch.float32)
        return self._join(coarse, exact, states)

    def decode_teacher(
        self, payload: Payload, positions: np.ndarray, *, device: Device = "cpu", dtype: torch.dtype = BF16
    ) -> StoredTeacher:
        coarse, top = self._split(payload, len(positions), device)
        return StoredTeacher(
            last_hidden_state=self.coarse.decode(coarse, len(positions), device=device, dtype=dtype), **top
        )
