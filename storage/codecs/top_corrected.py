"""What `corrected` and `recomputed` share: coarse states, and corrections of the logits that they lead to.

P positions, K top tokens, V vocabulary.

With z the coarse logits, l the exact ones and T the tokens outside the top, the offset of token i is
    l_i - z_i - (log sum_T exp l - log sum_T exp z),
so that the softmax of z with the offsets has the exact probabilities of the top and the exact mass of the rest, shared
out as the coarse logits say. A reader adds them and normalises; nothing else. For the sums over T the 3 K tokens after
the top stand: a full sum would need the head a second time, and it is their mass that the rest consists of.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch

from storage.codecs.base import BF16, Device, Payload, TargetParts, TeacherCodec
from storage.codecs.symbols import leb128, read_leb128
from storage.codecs.top_tokens import LARGEST, chunks, pack_top, unpack_top
from storage.codecs.transform import Transform
from storage.errors import StorageError

REST = 3  # times K tokens after the top that stand for all others


class TopCorrected(TeacherCodec):
    """Coarse states, which a subclass chooses, and corrections of the logits that they lead to."""

    defaults: ClassVar[Mapping[str, Any]] = {"step": 0.045, "top": 16, "resolution": 32, "level": 1}

    @cached_property
    def coarse(self) -> Transform:
        return Transform(width=self.width, settings=self._coarse_settings(self.settings), tensors=self.tensors)

    @classmethod
    @abstractmethod
    def _coarse_settings(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of the Transform that keeps the coarse states."""

    def check(self) -> None:
        self.coarse.check()

    def encode(self, values: torch.Tensor, *, first: bool = False) -> bytes:
        """The coarse states alone, [R, d]."""
        return self.coarse.encode(values, first=first)

    def decode(self, payload: Payload, rows: int, *, device: Device = "cpu", dtype: torch.dtype = BF16) -> torch.Tensor:
        return self.coarse.decode(payload, rows, device=device, dtype=dtype)

    def _join(self, coarse: bytes, exact: torch.Tensor, states: torch.Tensor) -> bytes:
        """Coarse payload and the corrections of `states` [P, d], as a reader has them, towards `exact` [P, d]."""
        if self.settings["top"] == 0:
            return leb128(len(coarse)) + coarse
        if self.target is None:
            raise StorageError(f"codec {self.name!r} needs the target's head to encode: set codec.target first")
        ids, codes = corrections(
            exact, states, self.target, top=self.settings["top"], resolution=self.settings["resolution"]
        )
        top = pack_top(ids, codes, len(self.target.head), level=self.settings["level"])
        return leb128(len(coarse)) + coarse + top

    def _split(self, payload: Payload, positions: int, device: Device) -> tuple[memoryview, dict[str, torch.Tensor]]:
        """The coarse payload, and what of the corrections a StoredTeacher takes."""
        size, view = read_leb128(memoryview(payload).cast("B"))
        if self.settings["top"] == 0:
            return view[:size], {}
        ids, codes = unpack_top(view[size:], positions, self.settings["top"])
        values = codes.to(torch.float32) / self.settings["resolution"]
        return view[:size], {"top_ids": ids.to(device), "top_values": values.to(device)}


def corrections(
    exact: torch.Tensor, coarse: torch.Tensor, target: TargetParts, *, top: int, resolution: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [P, K], ascending, of the exact teacher's likeliest tokens, and their offsets in steps [P, K] (see above)."""
    ids, codes = [], []
    for part, states in zip(chunks(exact), chunks(coarse), strict=True):
        logits = target.logits(part)
        # Sorted: the top first, then those that stand for the rest.
        right, candidates = logits.topk(min((1 + REST) * top, logits.shape[1]), dim=-1)
        wrong = target.logits_of(states, candidates)
        shift = (right[:, top:].logsumexp(-1) - wrong[:, top:].logsumexp(-1)).nan_to_num(0.0)
        offsets = right[:, :top] - wrong[:, :top] - shift[:, None]
        chosen, order = candidates[:, :top].sort(dim=-1)
        ids.append(chosen)
        codes.append((offsets.gather(1, order) * resolution).round().clamp(-LARGEST, LARGEST))
    return torch.cat(ids), torch.cat(codes)
