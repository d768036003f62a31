"""Many sequences and their blocks, back to back in one micro-batch, without padding.

Shapes: T context tokens of Q sequences, A blocks of one of them and N of all, G slots, P teacher positions, C width of
the hidden states (m captured layers x d hidden), V vocabulary, K tokens of each teacher position.

A micro-batch costs what it holds: a sequence with few eligible anchors brings few blocks, context after a sequence's
last anchor is left out because no block may see it, and the teacher has one row for each position that a slot learns
from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.errors import DsparkError
from dspark.losses.anchors import MAX_BLOCK_SIZE, loss_mask_of

Integers = NDArray[np.int64]
_T = TypeVar("_T", "Teacher", "MicroBatch")


class RowLike(Protocol):
    """One sequence with what the target thought of it: a row of a target cache. `spans` are half-open, supervised."""

    @property
    def sample_id(self) -> str: ...
    @property
    def input_ids(self) -> Tensor: ...  # [S]
    @property
    def spans(self) -> Sequence[tuple[int, int]]: ...
    @property
    def hidden_states(self) -> Tensor: ...  # [S, C] hidden states, or components of them
    @property
    def teacher_positions(self) -> Tensor: ...  # [P] ascending
    @property
    def teacher(self) -> Any: ...  # fields as those of `Teacher`, or None


@dataclass(kw_only=True)
class Teacher:
    """The teacher's distribution at P positions, in one of two forms.

    Dense: its logits are `lm_head(last_hidden_state)`, and where `top_ids` are there `top_values` are added to the
    logits of those tokens. Sparse, with a `tail_mass`: `top_values` are the log-probabilities of `top_ids` under the
    full softmax, and the tail's mass is what they leave out.
    """

    last_hidden_state: Tensor | None = None  # [P, d] after the final norm
    top_ids: Tensor | None = None  # [P, K] i64, distinct in a row
    top_values: Tensor | None = None  # [P, K]
    tail_mass: Tensor | None = None  # [P]
    log_normalizers: Tensor | None = None  # [P] dense: log sum exp over the whole vocabulary, where it is known

    def __len__(self) -> int:
        return next(len(part) for part in (self.last_hidden_state, self.top_ids) if part is not None)

    @property
    def sparse(self) -> bool:
        return self.tail_mass is not None

    def rows(self, index: Tensor | slice) -> Teacher:
        return _map_tensors(self, lambda tensor: tensor[index])


@dataclass(kw_only=True)
class MicroBatch:
    """One forward pass. Blocks are grouped by sequence, and ascend in anchor within one.

    A block sees the context tokens of its own sequence strictly before its anchor:
    indices `sequence_starts[q] .. block_anchor[n]` with q = `block_sequence[n]`.
    """

    sample_ids: list[str]
    input_ids: Tensor  # [T] i64
    positions: Tensor  # [T] i64, position inside the sequence
    sequence_starts: Tensor  # [Q+1] i64
    hidden_states: Tensor  # [T, C]
    block_sequence: Tensor  # [N] i64
    block_anchor: Tensor  # [N] i64, index into T of the anchor token
    block_starts: Tensor  # [Q+1] i64
    previous_ids: Tensor  # [N, G] i64, the anchor and then the true tokens
    labels: Tensor  # [N, G] i64, 0 where the loss mask is
    loss_mask: Tensor  # [N, G] bool, a prefix of each block
    teacher_index: Tensor  # [N, G] i64 into the teacher's rows, 0 where the loss mask is
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

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> MicroBatch:
        return _map_tensors(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> MicroBatch:
        return _map_tensors(self, Tensor.pin_memory)


def _map_tensors(value: _T, change: Callable[[Tensor], Tensor]) -> _T:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    for name, item in fields.items():
        if isinstance(item, Tensor):
            fields[name] = change(item)
        elif isinstance(item, Teacher):
            fields[name] = _map_tensors(item, change)
    return dataclasses.replace(value, **fields)


@dataclass(frozen=True, kw_only=True)
class BlockLabels:
    """What the blocks of one sequence are fed and trained on.

    Slot k (from 0) of a block at anchor a is fed the token at a+k, and predicts the token at a+k+1; its teacher is the
    target's last hidden state at a+k. Where the loss mask is, label and teacher position are 0.
    """

    previous_ids: Integers  # [A, G]
    labels: Integers  # [A, G]
    loss_mask: NDArray[np.bool_]  # [A, G]
    teacher_positions: Integers  # [A, G]


def block_labels(input_ids: Integers, loss_mask: NDArray[np.bool_], anchors: Integers, block_size: int) -> BlockLabels:
    """Labels of every slot; a block's loss ends before its first label outside the sequence or the loss mask [S]."""
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise DsparkError(f"block_size is {block_size}; allowed: 1 to {MAX_BLOCK_SIZE} (option `drafter.block_size`)")
    input_ids, loss_mask = np.asarray(input_ids, dtype=np.int64), np.asarray(loss_mask, dtype=bool)
    anchors = np.asarray(anchors, dtype=np.int64)
    length = len(input_ids)
    if loss_mask.shape != input_ids.shape:
        raise DsparkError(f"the loss mask has shape {loss_mask.shape}, the token ids {input_ids.shape}")
    if len(anchors) and not 0 <= anchors.min() <= anchors.max() < length:
        raise DsparkError(f"anchors span {anchors.min()}..{anchors.max()}, outside a sequence of {length} tokens")
    slots = anchors[:, None] + np.arange(block_size)  # [A, G] position fed to each slot
    inside = slots + 1 < length
    label_at = np.where(inside, slots + 1, 0)
    mask = np.logical_and.accumulate(inside & loss_mask[label_at], axis=1)
    fed = slots < length
    return BlockLabels(
        previous_ids=np.where(fed, input_ids[np.where(fed, slots, 0)], 0),
        labels=np.where(mask, input_ids[label_at], 0),
        loss_mask=mask,
        teacher_positions=np.where(mask, slots, 0),
    )


def make_micro_batch(rows: Sequence[RowLike], anchors: Sequence[Integers], block_size: int) -> MicroBatch:
    """All blocks at `anchors[q]` of `rows[q]`, back to back. Rows without an anchor are left out.

    So are each sequence's tokens after its last anchor, which no block may see.

    Raises:
        DsparkError: no row has an anchor, a teacher (position) is missing, or the rows are of different kinds.
    """
    if len(rows) != len(anchors):
        raise DsparkError(f"{len(rows)} samples, but anchors for {len(anchors)}")
    kept = [
        (row, np.sort(np.asarray(chosen, np.int64))) for row, chosen in zip(rows, anchors, strict=True) if len(chosen)
    ]
    if not kept:
        raise DsparkError("none of the samples has an anchor: nothing to train on")
    widths = sorted({row.hidden_states.shape[1] for row, _ in kept})
    if len(widths) > 1:
        raise DsparkError(f"samples have hidden states of widths {widths}; one micro-batch takes one width")
    columns: dict[str, list[np.ndarray]] = {
        name: [] for name in (*(field.name for field in dataclasses.fields(BlockLabels)), "teacher_index")
    }
    lengths, counts, teachers, teacher_rows = [0], [0], [], 0
    for row, chosen in kept:
        tokens = row.input_ids.numpy()
        if len(row.hidden_states) != len(tokens):
            raise DsparkError(
                f"sample {row.sample_id!r} has {len(tokens)} tokens but hidden states for {len(row.hidden_states)}"
            )
        labels = block_labels(tokens, loss_mask_of(row.spans, len(tokens)), chosen, block_size)
        needed = np.unique(labels.teacher_positions[labels.loss_mask])
        index = np.searchsorted(needed, labels.teacher_positions) + teacher_rows
        for name, part in vars(labels).items():
            columns[name].append(part)
        columns["teacher_index"].append(np.where(labels.loss_mask, index, 0))
        teachers.append(_teacher_at(row, needed))
        lengths.append(int(chosen[-1]) + 1)
        counts.append(len(chosen))
        teacher_rows += len(needed)
    starts = np.cumsum(lengths)
    joined = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in columns.items()}
    return MicroBatch(
        sample_ids=[row.sample_id for row, _ in kept],
        input_ids=torch.cat([row.input_ids[:n] for (row, _), n in zip(kept, lengths[1:], strict=True)]).long(),
        positions=torch.cat([torch.arange(n) for n in lengths[1:]]),
        sequence_starts=torch.from_numpy(starts),
        hidden_states=torch.cat([row.hidden_states[:n] for (row, _), n in zip(kept, lengths[1:], strict=True)]),
        block_sequence=torch.repeat_interleave(torch.arange(len(kept)), torch.tensor(counts[1:])),
        block_anchor=torch.from_numpy(
            np.concatenate([chosen + start for (_, chosen), start in zip(kept, starts[:-1], strict=True)])
        ),
        block_starts=torch.tensor(counts).cumsum(0),
        previous_ids=joined["previous_ids"],
        labels=joined["labels"],
        loss_mask=joined["loss_mask"],
        teacher_index=joined["teacher_index"],
        teacher=_join(teachers),
    )


def _teacher_at(row: RowLike, needed: Integers) -> Teacher:
    """The row's teacher at positions `needed`, ascending."""
    found = row.teacher
    if found is None or (found.last_hidden_state is None and found.tail_mass is None):
        raise DsparkError(f"sample {row.sample_id!r} has no teacher; build the cache with cache.teacher_codec")
    available = row.teacher_positions.numpy()
    at = np.searchsorted(available, needed)
    there = at < len(available)
    there[there] = available[at[there]] == needed[there]
    if not there.all():
        raise DsparkError(
            f"sample {row.sample_id!r} has no teacher at positions {needed[~there][:5].tolist()}, whose next token is "
            "supervised; the cache was built with other spans: rebuild it"
        )
    names = [field.name for field in dataclasses.fields(Teacher)]
    return Teacher(**{name: getattr(found, name, None) for name in names}).rows(torch.from_numpy(at))


def _join(teachers: Sequence[Teacher]) -> Teacher:
    """Back to back. A normaliser that some do not know is unknown for all."""
    fields = {}
    for field in dataclasses.fields(Teacher):
        parts = [part for teacher in teachers if (part := getattr(teacher, field.name)) is not None]
        whole = len(parts) == len(teachers)
        if parts and not whole and field.name != "log_normalizers":
            raise DsparkError(
                f"some samples have a teacher's {field.name} and some have none; one micro-batch takes one kind"
            )
        if len({part.shape[1:] for part in parts}) > 1:
            raise DsparkError(
                f"samples have a teacher's {field.name} in different widths; one micro-batch takes one width"
            )
        fields[field.name] = torch.cat(parts) if whole else None
    return Teacher(**fields)


def work_of(context_tokens: int, blocks: int, block_size: int) -> int:
    """Tokens that a drafter computes: the context's projections and the blocks' slots."""
    return context_tokens + blocks * block_size


def plan_micro_batches(
    context_tokens: Sequence[int],
    anchor_counts: Sequence[int],
    *,
    block_size: int,
    max_tokens: int,
    ranks: int = 1,
) -> list[list[int]]:
    """Group samples into micro-batches of at most `max_tokens` work, evenly filled, as many for each of `ranks`.

    Samples without anchors appear in none; one sample above the limit has a micro-batch of its own. When there are
    fewer samples than micro-batches some are empty: their rank takes the step with a loss of zero. Deterministic.
    """
    if max_tokens < 1 or ranks < 1:
        raise DsparkError(f"max_tokens is {max_tokens} and ranks is {ranks}; both must be at least 1")
    if len(context_tokens) != len(anchor_counts):
        raise DsparkError(f"{len(context_tokens)} lengths, but anchor counts for {len(anchor_counts)}")
    work = [
        work_of(tokens, blocks, block_size) if blocks else 0
        for tokens, blocks in zip(context_tokens, anchor_counts, strict=True)
    ]
    order = sorted((i for i in range(len(work)) if anchor_counts[i]), key=lambda i: (-work[i], i))
    if not order:
        return []
    count = -(-sum(work) // max_tokens)
    while True:
        count = -(-count // ranks) * ranks
        groups: list[list[int]] = [[] for _ in range(count)]
        loads = np.zeros(count, dtype=np.int64)
        for i in order:
            lightest = int(loads.argmin())
            groups[lightest].append(i)
            loads[lightest] += work[i]
        crowded = any(load > max_tokens and len(group) > 1 for load, group in zip(loads, groups, strict=True))
        if not crowded:
            return [sorted(group) for group in groups]
        count += 1
