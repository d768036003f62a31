"""Teacher codecs that know the target. P positions, K top tokens, V vocabulary.

- "corrected": last states in coarse steps, decorrelated in the output head's metric, and for the K likeliest tokens of
  each position an offset that puts their probabilities right.
- "recomputed": the last captured layer's states of the whole context in coarse steps; a reader runs the target's layers
  above it. The same corrections.
- "sparse": the log-probabilities of the K likeliest tokens, and the mass of all others.

With z the coarse logits, l the exact ones and T the tokens outside the top, the offset of token i is
    l_i - z_i - (log sum_T exp l - log sum_T exp z),
so that the softmax of z with the offsets has the exact probabilities of the top and the exact mass of the rest, shared
out as the coarse logits say. A reader adds them and normalises; nothing else. For the sums over T the 3 K tokens after
the top stand: a full sum would need the head a second time, and it is their mass that the rest consists of.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
import zstandard

from storage.codecs.base import BOUNDS, Codec, Sample, StoredTeacher, TargetParts
from storage.codecs.symbols import leb128, read_leb128
from storage.codecs.top_tokens import LARGEST, pack_top, unpack_top
from storage.codecs.transform import Transform, head_metric

CHUNK = 128  # positions whose logits exist at once
METRIC_STATES = 2048  # states that the head's metric is averaged over
REST = 3  # times K tokens after the top that stand for all others


@dataclass(frozen=True, kw_only=True)
class TeacherRow:
    """A sequence to fit teacher codecs on: captured states [S, m*d], last states [S, d], positions [P]."""

    features: torch.Tensor
    last: torch.Tensor
    positions: np.ndarray


def last_state_sample(rows: Sequence[TeacherRow]) -> Sample:
    """What a codec of last states is fitted on: the states at the teacher positions."""
    used = [row for row in rows if len(row.positions)]
    return [(row.last[torch.from_numpy(row.positions)], bool(row.positions[0] == 0)) for row in used]


class _TopCorrected(Codec):
    """Coarse states, which a subclass chooses, and corrections of the logits that they lead to."""

    teacher_only = True
    defaults: ClassVar[Mapping[str, Any]] = {"step": 0.045, "top": 16, "resolution": 32, "level": 1}

    def __init__(
        self,
        *,
        width: int,
        settings: Mapping[str, Any] | None = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(width=width, settings=settings, tensors=tensors)
        self.coarse = Transform(width=width, settings=self._coarse_settings(self.settings), tensors=self.tensors)

    @classmethod
    @abstractmethod
    def _coarse_settings(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of the Transform that keeps the coarse states."""

    def encode(self, values: torch.Tensor, *, first: bool = False) -> bytes:
        """The coarse states alone, [R, d]."""
        return self.coarse.encode(values, first=first)

    def decode(
        self,
        payload: bytes | memoryview,
        rows: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        return self.coarse.decode(payload, rows, device=device, dtype=dtype)

    def _join(self, coarse: bytes, exact: torch.Tensor, states: torch.Tensor) -> bytes:
        """Coarse payload and the corrections of `states` [P, d], as a reader has them, towards `exact` [P, d]."""
        if self.settings["top"] == 0:
            return leb128(len(coarse)) + coarse
        if self.target is None:
            raise ValueError(f"codec {self.name!r} needs the target's head to encode: set codec.target first")
        ids, codes = corrections(
            exact, states, self.target, top=self.settings["top"], resolution=self.settings["resolution"]
        )
        top = pack_top(ids, codes, len(self.target.head), level=self.settings["level"])
        return leb128(len(coarse)) + coarse + top

    def _split(
        self, payload: bytes | memoryview, positions: int, device: torch.device | str
    ) -> tuple[memoryview, dict[str, torch.Tensor]]:
        """The coarse payload, and what of the corrections a StoredTeacher takes."""
        size, view = read_leb128(memoryview(payload).cast("B"))
        if self.settings["top"] == 0:
            return view[:size], {}
        ids, codes = unpack_top(view[size:], positions)
        values = codes.to(torch.float32) / self.settings["resolution"]
        return view[:size], {"top_ids": ids.to(device), "top_values": values.to(device)}


class Corrected(_TopCorrected):
    """`step`: of all coordinates alike, in the metric in which the squared error is the variance of the logit error
    under the teacher, lifted by `ridge` (see Transform). `top` tokens are corrected (0: none), in steps of
    1/`resolution` nat."""

    name = "corrected"
    defaults: ClassVar[Mapping[str, Any]] = {**_TopCorrected.defaults, "ridge": 0.1}

    @classmethod
    def _coarse_settings(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        shared = {name: settings[name] for name in ("step", "ridge", "level")}
        return {**shared, "decorrelate": "joint", "metric": "given"}

    @classmethod
    def fit_rows(cls, rows: Sequence[TeacherRow], target: TargetParts | None, *, width: int, **settings: Any) -> Self:
        if target is None:
            raise ValueError(f"codec {cls.name!r} is fitted in the metric of the target's head: give the target")
        chosen = cls(width=width, settings=settings).settings
        sample = last_state_sample(rows)
        states = torch.cat([values[1:] if first else values for values, first in sample])
        states = states[:: -(-len(states) // METRIC_STATES)]
        metric = head_metric(target.head, states, soft_cap=target.soft_cap)
        coarse = Transform.fit(sample, width=width, tensors={"metric": metric}, **cls._coarse_settings(chosen))
        return cls(width=width, settings=settings, tensors=coarse.tensors)

    def encode_teacher(self, features: torch.Tensor, last: torch.Tensor, positions: np.ndarray) -> bytes:
        exact = last[torch.from_numpy(positions).to(last.device)]
        coarse = self.coarse.encode(exact, first=bool(positions[0] == 0))
        states = self.coarse.decode(coarse, len(exact), dtype=torch.float32)
        return self._join(coarse, exact, states)

    def decode_teacher(
        self,
        payload: bytes | memoryview,
        positions: np.ndarray,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> StoredTeacher:
        coarse, top = self._split(payload, len(positions), device)
        return StoredTeacher(states=self.coarse.decode(coarse, len(positions), device=device, dtype=dtype), **top)


class Recomputed(_TopCorrected):
    """`step`: in standard deviations of each channel of the last captured layer, decorrelated within the layer.

    The payload holds the context up to the last teacher position, and a reader needs the target's layers above.
    """

    name = "recomputed"
    defaults: ClassVar[Mapping[str, Any]] = {**_TopCorrected.defaults, "step": 0.5, "layer": -1}

    @classmethod
    def _coarse_settings(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"step": settings["step"], "decorrelate": "joint", "level": settings["level"]}

    @classmethod
    def fit_rows(cls, rows: Sequence[TeacherRow], target: TargetParts | None, *, width: int, **settings: Any) -> Self:
        layer = settings.get("layer", -1)
        sample = [(layer_of(row.features, layer, width), True) for row in rows]
        coarse = Transform.fit(
            sample, width=width, **cls._coarse_settings(cls(width=width, settings=settings).settings)
        )
        return cls(width=width, settings=settings, tensors=coarse.tensors)

    def encode_teacher(self, features: torch.Tensor, last: torch.Tensor, positions: np.ndarray) -> bytes:
        length = int(positions[-1]) + 1
        coarse = self.coarse.encode(layer_of(features[:length], self.settings["layer"], self.width), first=True)
        if self.target is None or self.target.finish is None:
            raise ValueError(f"codec {self.name!r} needs the target's layers above the last captured one to encode")
        index = torch.from_numpy(positions)
        states = self.target.finish(self.coarse.decode(coarse, length, dtype=torch.float32))
        return self._join(coarse, last[index.to(last.device)], states[index.to(states.device)])

    def decode_teacher(
        self,
        payload: bytes | memoryview,
        positions: np.ndarray,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> StoredTeacher:
        coarse, top = self._split(payload, len(positions), device)
        length = int(positions[-1]) + 1
        # float32 whatever is asked for: what the layers above make of a rounded state was never measured.
        source = self.coarse.decode(coarse, length, device=device, dtype=torch.float32)
        return StoredTeacher(source=source, **top)


class Sparse(Codec):
    """`top` tokens of each position, log-probabilities in steps of 1/16 nat, and the mass of the rest."""

    name = "sparse"
    teacher_only = True
    defaults: ClassVar[Mapping[str, Any]] = {"top": 64, "level": 1}
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {**BOUNDS, "top": (1, 65536)}
    resolution: ClassVar[int] = 16

    @classmethod
    def fit_rows(cls, rows: Sequence[TeacherRow], target: TargetParts | None, *, width: int, **settings: Any) -> Self:
        return cls(width=width, settings=settings)

    def encode(self, values: torch.Tensor, *, first: bool = False) -> bytes:
        if self.target is None:
            raise ValueError(f"codec {self.name!r} needs the target's head to encode: set codec.target first")
        ids, codes, tails = [], [], []
        for part in _chunks(values):
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

    def decode(
        self,
        payload: bytes | memoryview,
        rows: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        raise ValueError("codec 'sparse' keeps no states: read the row's `teacher`")

    def decode_teacher(
        self,
        payload: bytes | memoryview,
        positions: np.ndarray,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> StoredTeacher:
        size, view = read_leb128(memoryview(payload).cast("B"))
        ids, codes = unpack_top(view[:size], len(positions))
        stored = zstandard.ZstdDecompressor().decompress(view[size:], max_output_size=len(positions))
        tail = self._log_p(torch.from_numpy(np.frombuffer(stored, np.int8).copy()))
        # Rounded log-probabilities do not quite add up to 1; all of them, tail included, are brought there.
        log_p = torch.cat([self._log_p(codes), tail[:, None]], dim=1).log_softmax(-1).to(device)
        return StoredTeacher(top_ids=ids.to(device), top_values=log_p[:, :-1], tail_mass=log_p[:, -1].exp())


def layer_of(features: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    """[S, d] of one captured layer (by place, from the end if negative) out of [S, m*d]."""
    start = layer * width % features.shape[1]
    return features[:, start : start + width]


def corrections(
    exact: torch.Tensor, coarse: torch.Tensor, target: TargetParts, *, top: int, resolution: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [P, K], ascending, of the exact teacher's likeliest tokens, and their offsets in steps [P, K] (see above)."""
    ids, codes = [], []
    for part, states in zip(_chunks(exact), _chunks(coarse), strict=True):
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


def _chunks(states: torch.Tensor) -> Iterator[torch.Tensor]:
    return iter(states.split(CHUNK))
