"""Many sequences and their blocks, back to back in one batch, without padding.

Shapes: T context tokens of Q sequences, N blocks of G slots, P distinct teacher positions, C feature width (m captured
layers x d hidden), V vocabulary, K tokens kept by a sparse teacher.

A batch costs what it holds: a sequence with few eligible anchors brings few blocks, context after a sequence's last
anchor is left out because no block may see it, and the teacher has one row for each position that a slot learns from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.anchors import block_labels, supervised_mask

_T = TypeVar("_T")


@dataclass(kw_only=True)
class TopOffsets:
    """What is added to the logits of a few tokens of each row: coarse states, corrected where the mass is."""

    token_ids: Tensor  # [P, K] i64, distinct in a row
    values: Tensor  # [P, K]

    def rows(self, index: Tensor | slice) -> TopOffsets:
        return TopOffsets(token_ids=self.token_ids[index], values=self.values[index])


@dataclass(kw_only=True)
class DenseTeacher:
    """The teacher as the target's last states, after the final norm: its logits are `lm_head(states)`, plus `offsets`.

    `log_normalizers`, when they are known from before, are the log sum exp of those logits over the whole vocabulary.
    """

    states: Tensor  # [P, d]
    offsets: TopOffsets | None = None
    log_normalizers: Tensor | None = None  # [P]

    def __len__(self) -> int:
        return len(self.states)

    def rows(self, index: Tensor) -> DenseTeacher:
        known, offsets = self.log_normalizers, self.offsets
        return DenseTeacher(
            states=self.states[index],
            offsets=None if offsets is None else offsets.rows(index),
            log_normalizers=None if known is None else known[index],
        )


@dataclass(kw_only=True)
class SparseTeacher:
    """The teacher as its top K log-probabilities under the full softmax, and the mass that those leave out."""

    token_ids: Tensor  # [P, K] i64, distinct in a row
    log_probs: Tensor  # [P, K]
    tail_mass: Tensor  # [P] probability outside token_ids

    def __len__(self) -> int:
        return len(self.token_ids)

    def rows(self, index: Tensor) -> SparseTeacher:
        return SparseTeacher(
            token_ids=self.token_ids[index], log_probs=self.log_probs[index], tail_mass=self.tail_mass[index]
        )


Teacher = DenseTeacher | SparseTeacher


class SampleLike(Protocol):
    """What `pack` reads of a sample; a row of a target cache fits, and so does `Sample`."""

    @property
    def sample_id(self) -> str: ...
    @property
    def input_ids(self) -> object: ...  # [S] array or tensor
    @property
    def spans(self) -> Sequence[tuple[int, int]]: ...
    @property
    def features(self) -> Tensor: ...  # [S, C]
    @property
    def teacher_positions(self) -> object: ...  # [P] ascending positions with a teacher
    @property
    def last_states(self) -> Tensor | None: ...  # [P, d]; None when there is a sparse teacher


@dataclass(kw_only=True)
class Sample:
    """One sequence with what the target thought of it. `spans` are half-open and supervised."""

    sample_id: str
    input_ids: Tensor  # [S]
    spans: Sequence[tuple[int, int]]
    features: Tensor  # [S, C]
    teacher_positions: Tensor  # [P]
    last_states: Tensor | None = None  # [P, d]
    teacher: Teacher | None = None  # [P rows] instead of `last_states`, for all that these alone don't say


@dataclass(kw_only=True)
class PackedBatch:
    """Blocks are grouped by sequence, and ascend in anchor within one.

    A block sees the context tokens of its own sequence strictly before its anchor:
    indices `sequence_starts[q] .. block_anchor[n]` with q = `block_sequence[n]`.
    """

    sample_ids: list[str]
    input_ids: Tensor  # [T] i64
    positions: Tensor  # [T] i64, position inside the sequence
    sequence_starts: Tensor  # [Q+1] i64
    features: Tensor  # [T, C]
    block_sequence: Tensor  # [N] i64
    block_anchor: Tensor  # [N] i64, index into T of the anchor token
    block_starts: Tensor  # [Q+1] i64
    previous_ids: Tensor  # [N, G] i64, the anchor and then the true tokens
    label_ids: Tensor  # [N, G] i64, 0 where not supervised
    supervised: Tensor  # [N, G] bool, a prefix of each block
    teacher_index: Tensor  # [N, G] i64 into the teacher's rows, 0 where not supervised
    teacher: Teacher

    @property
    def num_blocks(self) -> int:
        return self.previous_ids.shape[0]

    @property
    def block_size(self) -> int:
        return self.previous_ids.shape[1]

    @property
    def num_context_tokens(self) -> int:
        return len(self.input_ids)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedBatch:
        return _map_tensors(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        return _map_tensors(self, lambda tensor: tensor.pin_memory())


def _map_tensors(value: _T, change: object) -> _T:
    fields = {}
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        item = getattr(value, field.name)
        if isinstance(item, Tensor):
            item = change(item)  # type: ignore[operator]
        elif isinstance(item, DenseTeacher | SparseTeacher | TopOffsets):
            item = _map_tensors(item, change)
        fields[field.name] = item
    return dataclasses.replace(value, **fields)  # type: ignore[type-var]


def _as_numpy(values: object) -> NDArray[np.int64]:
    return np.asarray(values.cpu() if isinstance(values, Tensor) else values).astype(np.int64, copy=False)


def _teacher_of(sample: SampleLike) -> Teacher:
    teacher = getattr(sample, "teacher", None)
    if isinstance(teacher, DenseTeacher | SparseTeacher):
        return teacher
    if sample.last_states is None:
        raise ValueError(f"sample {sample.sample_id!r} has neither last states nor another teacher")
    return DenseTeacher(states=sample.last_states)


def _join_teachers(parts: list[Teacher]) -> Teacher:
    dense = [part for part in parts if isinstance(part, DenseTeacher)]
    sparse = [part for part in parts if isinstance(part, SparseTeacher)]
    if dense and sparse:
        raise ValueError("some samples have dense and some sparse teachers; one batch takes one kind")
    if dense:
        known = [part.log_normalizers for part in dense if part.log_normalizers is not None]
        offsets = [part.offsets for part in dense if part.offsets is not None]
        if offsets and len(offsets) < len(dense):
            raise ValueError("some samples have offsets of the teacher's logits and some have none; pack one kind")
        return DenseTeacher(
            states=torch.cat([part.states for part in dense]),
            offsets=_join_offsets(offsets) if offsets else None,
            log_normalizers=torch.cat(known) if len(known) == len(dense) else None,
        )
    return SparseTeacher(
        token_ids=torch.cat([part.token_ids for part in sparse]),
        log_probs=torch.cat([part.log_probs for part in sparse]),
        tail_mass=torch.cat([part.tail_mass for part in sparse]),
    )


def _join_offsets(parts: list[TopOffsets]) -> TopOffsets:
    widths = {part.token_ids.shape[1] for part in parts}
    if len(widths) > 1:
        raise ValueError(f"samples correct {sorted(widths)} tokens of a teacher row; one batch takes one number")
    return TopOffsets(
        token_ids=torch.cat([part.token_ids for part in parts]), values=torch.cat([part.values for part in parts])
    )


def _teacher_rows(
    sample: SampleLike, wanted: NDArray[np.int64], supervised: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the sample's teacher that some slot needs, and for each slot [A, G] its index among those."""
    available = _as_numpy(sample.teacher_positions)
    needed = np.unique(wanted[supervised])
    rows = np.searchsorted(available, needed)
    found = rows < len(available)
    found[found] = available[rows[found]] == needed[found]
    if not found.all():
        missing = needed[~found][:5].tolist()
        raise ValueError(
            f"sample {sample.sample_id!r} has no teacher at positions {missing}, whose next token is supervised; "
            "the cache was built with other spans: rebuild it"
        )
    return rows, np.where(supervised, np.searchsorted(needed, wanted), 0)


def pack(
    samples: Sequence[SampleLike],
    anchors: Sequence[NDArray[np.int64]],
    block_size: int,
    *,
    trim_context: bool = True,
) -> PackedBatch:
    """One batch of all blocks at `anchors[q]` of `samples[q]`. Samples without an anchor are left out.

    `trim_context` drops each sequence's tokens after its last anchor, which no block may see.

    Raises:
        ValueError: no sample has an anchor, a teacher position is missing, or the samples' features differ in width.
    """
    if len(samples) != len(anchors):
        raise ValueError(f"{len(samples)} samples, but anchors for {len(anchors)}")
    kept = [(sample, _as_numpy(chosen)) for sample, chosen in zip(samples, anchors, strict=True) if len(chosen)]
    if not kept:
        raise ValueError("none of the samples has an anchor: nothing to pack")
    widths = sorted({sample.features.shape[1] for sample, _ in kept})
    if len(widths) > 1:
        raise ValueError(f"samples have features of widths {widths}; one batch takes one width")
    ids, positions, features, teachers, labels, teacher_index = [], [], [], [], [], []
    block_sequence, block_anchor = [], []
    sequence_starts, block_starts, teacher_rows = [0], [0], 0
    for q, (sample, chosen) in enumerate(kept):
        chosen = np.sort(chosen)
        tokens = _as_numpy(sample.input_ids)
        if len(sample.features) != len(tokens):
            raise ValueError(
                f"sample {sample.sample_id!r} has {len(tokens)} tokens but features for {len(sample.features)}"
            )
        slots = block_labels(tokens, supervised_mask(sample.spans, len(tokens)), chosen, block_size)
        rows, index = _teacher_rows(sample, slots.teacher_positions, slots.supervised)
        length = int(chosen[-1]) + 1 if trim_context else len(tokens)
        ids.append(tokens[:length])
        positions.append(np.arange(length))
        features.append(sample.features[:length])
        teachers.append(_teacher_of(sample).rows(torch.from_numpy(rows)))
        labels.append(slots)
        teacher_index.append(np.where(slots.supervised, index + teacher_rows, 0))
        block_sequence.append(np.full(len(chosen), q))
        block_anchor.append(chosen + sequence_starts[-1])
        sequence_starts.append(sequence_starts[-1] + length)
        block_starts.append(block_starts[-1] + len(chosen))
        teacher_rows += len(rows)

    def joined(parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts))

    return PackedBatch(
        sample_ids=[sample.sample_id for sample, _ in kept],
        input_ids=joined(ids),
        positions=joined(positions),
        sequence_starts=torch.tensor(sequence_starts),
        features=torch.cat(features),
        block_sequence=joined(block_sequence),
        block_anchor=joined(block_anchor),
        block_starts=torch.tensor(block_starts),
        previous_ids=joined([slots.previous_ids for slots in labels]),
        label_ids=joined([slots.label_ids for slots in labels]),
        supervised=joined([slots.supervised for slots in labels]),
        teacher_index=joined(teacher_index),
        teacher=_join_teachers(teachers),
    )


def work_of(context_tokens: int, blocks: int, block_size: int) -> int:
    """Tokens that a drafter computes: the context's projections and the blocks' slots."""
    return context_tokens + blocks * block_size


def plan_packs(
    context_tokens: Sequence[int],
    anchor_counts: Sequence[int],
    *,
    block_size: int,
    budget: int,
    ranks: int = 1,
) -> list[list[int]]:
    """Group samples into packs of at most `budget` work, evenly filled, their number a multiple of `ranks`.

    Samples without anchors appear in no pack; one sample above the budget has a pack of its own. When there are fewer
    samples than packs some packs are empty: their rank takes the step with a loss of zero. Deterministic.
    """
    if budget < 1 or ranks < 1:
        raise ValueError(f"budget is {budget} and ranks is {ranks}; both must be at least 1")
    if len(context_tokens) != len(anchor_counts):
        raise ValueError(f"{len(context_tokens)} lengths, but anchor counts for {len(anchor_counts)}")
    work = [
        work_of(tokens, blocks, block_size) if blocks else 0
        for tokens, blocks in zip(context_tokens, anchor_counts, strict=True)
    ]
    order = sorted((i for i in range(len(work)) if anchor_counts[i]), key=lambda i: (-work[i], i))
    if not order:
        return []
    count = -(-sum(work) // budget)
    while True:
        count = -(-count // ranks) * ranks
        packs: list[list[int]] = [[] for _ in range(count)]
        loads = np.zeros(count, dtype=np.int64)
        for i in order:
            lightest = int(loads.argmin())
            packs[lightest].append(i)
            loads[lightest] += work[i]
        crowded = any(load > budget and len(pack) > 1 for load, pack in zip(loads, packs, strict=True))
        if not crowded:
            return [sorted(pack) for pack in packs]
        count += 1
