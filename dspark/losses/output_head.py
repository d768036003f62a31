"""The target's frozen output head: the drafter's logits and the teacher's probabilities, chunk by chunk.

Shapes: V vocabulary, D draft vocabulary (D = V unless reduced), d hidden, P teacher positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.errors import DsparkError
from dspark.losses.micro_batch import Teacher


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """Build it with `OutputHead.create`; it holds references to the head's weight, and a copy of the draft rows."""

    weight: Tensor  # [V, d]
    soft_cap: float | None
    draft_weight: Tensor  # [D, d] rows of the draft vocabulary, contiguous
    draft_token_ids: Tensor | None  # [D]; None when D = V
    draft_index: Tensor | None  # [V] row of draft_weight, -1 outside

    @classmethod
    def create(
        cls, weight: Tensor, *, soft_cap: float | None = None, draft_token_ids: Tensor | None = None
    ) -> OutputHead:
        """Raises DsparkError when a draft token is not a row of `weight`."""
        weight = weight.detach()
        if draft_token_ids is None:
            return cls(weight=weight, soft_cap=soft_cap, draft_weight=weight, draft_token_ids=None, draft_index=None)
        ids = draft_token_ids.to(weight.device, torch.int64)
        if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= len(weight):
            raise DsparkError(f"draft_token_ids must lie in 0..{len(weight) - 1}, the rows of the target's head")
        index = torch.full((len(weight),), -1, device=weight.device)
        index[ids] = torch.arange(len(ids), device=weight.device)
        return cls(weight=weight, soft_cap=soft_cap, draft_weight=weight[ids], draft_token_ids=ids, draft_index=index)

    @property
    def draft_size(self) -> int:
        return len(self.draft_weight)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of logits and probabilities: at least float32."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    def buffer(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=self.compute_dtype, device=self.weight.device)


def multiply(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """left @ right written to `out`, summed in at least float32."""
    if left.dtype == right.dtype == out.dtype:
        return torch.mm(left, right, out=out)
    left = left.to(right.dtype)
    if left.is_cuda and out.dtype == torch.float32:
        return out.copy_(torch.mm(left, right, out_dtype=torch.float32))
    return out.copy_(torch.mm(left, right))


def accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right."""
    if left.dtype == right.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += multiply(left, right, torch.empty_like(total))


def apply_soft_cap_(logits: Tensor, soft_cap: float) -> Tensor:
    """Soft-cap in place; returns the tanh, which the backward pass needs."""
    squashed = torch.tanh(logits / soft_cap)
    torch.mul(squashed, soft_cap, out=logits)
    return squashed


def log_normalizer_(logits: Tensor) -> Tensor:
    """log sum exp of each row; overwrites the logits."""
    top = logits.amax(-1, keepdim=True)
    return logits.sub_(top).exp_().sum(-1).log_().add_(top[:, 0])


def teacher_logits(states: Tensor, weight: Tensor, soft_cap: float | None, out: Tensor) -> Tensor:
    """weight @ state for every row, soft-capped, in `out`."""
    multiply(states.to(weight.dtype), weight.T, out)
    if soft_cap is not None:
        apply_soft_cap_(out, soft_cap)
    return out


def full_logits(teacher: Teacher, head: OutputHead, at: slice, out: Tensor) -> Tensor:
    """A dense teacher's logits over the whole vocabulary, of its rows `at`, in `out`."""
    assert teacher.last_hidden_state is not None
    states = teacher.last_hidden_state[at]
    logits = teacher_logits(states, head.weight, head.soft_cap, out[: len(states)])
    add_corrections_(logits, teacher, at)
    return logits


def add_corrections_(logits: Tensor, teacher: Teacher, at: slice, draft_index: Tensor | None = None) -> None:
    """Add what a dense teacher's rows `at` correct to their logits [p, V], or [p, D] with `draft_index` [V]."""
    if teacher.top_ids is None or teacher.top_values is None:
        return
    columns, values = teacher.top_ids[at], teacher.top_values[at].to(logits.dtype)
    if draft_index is not None:
        columns = draft_index[columns]
        values = values * (columns >= 0)
        columns = columns.clamp(min=0)
    logits.scatter_add_(1, columns, values)


def log_normalizers(teacher: Teacher, head: OutputHead, *, chunk_rows: int = 256) -> Tensor:
    """log sum exp of a dense teacher's logits over the whole vocabulary [P].

    They depend on the target alone. Kept between epochs (`Teacher.log_normalizers`), they spare a reduced draft
    vocabulary the projection to the full one, which is most of the teacher's work.
    """
    count = len(teacher)
    result = head.buffer(count, 1)[:, 0]
    scratch = head.buffer(min(chunk_rows, count), len(head.weight))
    for start in range(0, count, chunk_rows):
        at = slice(start, min(start + chunk_rows, count))
        result[at] = log_normalizer_(full_logits(teacher, head, at, scratch))
    return result


@dataclass(kw_only=True)
class TeacherRows:
    """Teacher probabilities of one chunk on the draft vocabulary, normalised over the whole vocabulary."""

    probs: Tensor  # [p, D]; overwritten by the next chunk
    mass: Tensor | None  # [p] probability inside the draft vocabulary; None when that is everything
    negative_entropy: Tensor | None  # [p] sum of q log q, when asked for


class TeacherReader:
    """Turns last hidden states into probabilities, at most `max_rows` at a time, in buffers of its own."""

    def __init__(self, teacher: Teacher, head: OutputHead, *, max_rows: int, entropy: bool) -> None:
        self._teacher, self._head, self._entropy = teacher, head, entropy
        self._probs = head.buffer(max_rows, head.draft_size)
        self._needs_full = head.draft_index is not None and teacher.log_normalizers is None
        if self._needs_full:
            full_rows = max(1, min(max_rows, max_rows * head.draft_size * 2 // len(head.weight)))
            self._full = head.buffer(full_rows, len(head.weight))

    def read(self, start: int, end: int) -> TeacherRows:
        head, teacher, at = self._head, self._teacher, slice(start, end)
        probs = self._probs[: end - start]
        if self._needs_full:
            self._read_through_full(start, end, probs)
        else:
            assert teacher.last_hidden_state is not None
            teacher_logits(teacher.last_hidden_state[at], head.draft_weight, head.soft_cap, probs)
            add_corrections_(probs, teacher, at, head.draft_index)
            if head.draft_index is None:
                probs.sub_(probs.amax(-1, keepdim=True)).exp_()
                probs.mul_(probs.sum(-1, keepdim=True).reciprocal_())
            else:
                assert teacher.log_normalizers is not None
                probs.sub_(teacher.log_normalizers[at, None]).exp_()
        mass = probs.sum(-1) if head.draft_index is not None else None
        entropy = -torch.special.entr(probs).sum(-1) if self._entropy else None
        return TeacherRows(probs=probs, mass=mass, negative_entropy=entropy)

    def _read_through_full(self, start: int, end: int, probs: Tensor) -> None:
        head, step = self._head, len(self._full)
        assert head.draft_token_ids is not None
        for first in range(start, end, step):
            at = slice(first, min(first + step, end))
            kept = probs[at.start - start : at.stop - start]
            full = full_logits(self._teacher, head, at, self._full)
            torch.index_select(full, 1, head.draft_token_ids, out=kept)
            kept.sub_(log_normalizer_(full)[:, None]).exp_()
