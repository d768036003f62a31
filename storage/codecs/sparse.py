"""The log-probabilities of each position's likeliest tokens, and the mass of all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
import zstandard

from storage.codecs.base import BF16, BOUNDS, Device, Payload, StoredTeacher, TeacherCodec
from storage.codecs.registry import register
from storage.codecs.symbols import decompressed, leb128, read_leb128
from storage.codecs.top_tokens import LARGEST, chunks, pack_top, unpack_top
from storage.errors import StorageError


@register
class Sparse(TeacherCodec):
    """`top` tokens of each position, log-probabilities in steps of 1/16 nat, and the mass of the rest."""

    name = "sparse"
    defaults: ClassVar[Mapping[str, Any]] = {"top": 64, "level": 1}
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {**BOUNDS, "top": (1, 65536)}
    resolution: ClassVar[int] = 16

    def encode(self, values: torch.Tensor, *, first: bool = False) -> bytes:
        if self.target is None:
            raise StorageError(f"codec {self.name!r} needs the target's head to encode: set codec.target first")
        ids, codes, tails = [], [], []
        for part in chunks(values):
            log_p = self.target.logits(part).log_softmax(-1)
            top = log_p.topk(min(self.settings["top"], log_p.shape[1]), dim=-1).indices.sort(dim=-1).values
            outside = log_p.scatter(1, top, -torch.inf).logsumexp(-1, keepdim=True)
            ids.append(top)
            codes.append(self._codes(log_p.gather(1, top)))
            tails.append(self._codes(outside))
        vocabulary = len(self.target.head)
        head = pack_top(torch.cat(ids), torch.cat(codes), vocabulary, level=self.settings["level"])
        tail = torch.cat(tails).cpu().to(torch.int8).numpy().tobytes()
        return leb128(len(head)) + head + zstandard.ZstdCompressor(level=self.settings["level"]).compress(tail)

    def _codes(self, log_p: torch.Tensor) -> torch.Tensor:
        return (LARGEST + log_p * self.resolution).round().clamp(-LARGEST, LARGEST)

    def _log_p(self, codes: torch.Tensor) -> torch.Tensor:
        return (codes.to(torch.float32) - LARGEST) / self.resolution

    def decode(self, payload: Payload, rows: int, *, device: Device = "cpu", dtype: torch.dtype = BF16) -> torch.Tensor:
        raise StorageError("codec 'sparse' keeps no states: read the row's `teacher`")

    def decode_teacher(
        self, payload: Payload, positions: np.ndarray, *, device: Device = "cpu", dtype: torch.dtype = BF16
    ) -> StoredTeacher:
        size, view = read_leb128(memoryview(payload).cast("B"))
        ids, codes = unpack_top(view[:size], len(positions), self.settings["top"])
        stored = np.frombuffer(decompressed(view[size:], len(positions)), np.int8)
        if len(stored) != len(positions):
            raise StorageError(f"{len(stored)} tails found, {len(positions)} positions were expected")
        tail = self._log_p(torch.from_numpy(stored.copy()))
        # Rounded log-probabilities do not quite add up to 1; all of them, tail included, are brought there.
        log_p = torch.cat([self._log_p(codes), tail[:, None]], dim=1).log_softmax(-1).to(device)
        return StoredTeacher(top_ids=ids.to(device), top_values=log_p[:, :-1], tail_mass=log_p[:, -1].exp())
