"""Draft and teacher distributions, every loss term and its exact gradient, one chunk of slots at a time.

Shapes: M supervised slots, P distinct teacher positions, D draft vocabulary (D = V unless reduced), d hidden, r Markov
rank.

The gradient with respect to a slot's logits has a closed form (`slot_terms`), so it is computed where the logits are,
in the forward pass, and goes back through the head at once: logits and probabilities live in the buffers of one chunk.
Slots are visited in the order of their teacher positions, so that a position shared by several slots is projected once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dspark.output_head import OutputHead, TeacherReader, accumulate, apply_soft_cap_, multiply
from dspark.packing import DenseTeacher, SparseTeacher, Teacher
from dspark.slot_terms import TINY, Chunk, SlotValues, TermWeights

CPU_BUFFER_BYTES = 32 * 2**20
GPU_BUFFER_BYTES = 512 * 2**20


@dataclass(kw_only=True)
class _Plan:
    """What the chunks read besides the differentiable inputs; slots ascend in `teacher_row`."""

    head: OutputHead
    terms: TermWeights
    weights: Tensor  # [M]
    labels: Tensor  # [M] column of the draft vocabulary, -1 outside
    teacher: Teacher | None
    teacher_row: Tensor | None  # [M]
    bias_row: Tensor | None  # [M]
    chunk_slots: int

    def chunks(self) -> Iterator[tuple[slice, int, int]]:
        """Slots of each chunk, and the range of teacher rows that they read."""
        total = len(self.labels)
        if total == 0:
            return
        starts = list(range(0, total, self.chunk_slots))
        ends = [min(start + self.chunk_slots, total) for start in starts]
        if self.teacher_row is None:
            first = last = [0] * len(starts)
        else:
            edges = torch.tensor([starts, [end - 1 for end in ends]], device=self.teacher_row.device)
            first, last = self.teacher_row[edges].tolist()
        for start, end, low, high in zip(starts, ends, first, last, strict=True):
            yield slice(start, end), low, high + 1


def default_chunk_slots(draft_size: int, device: torch.device) -> int:
    """Slots whose logits fill one buffer: few enough to be small, many enough for a fast matrix product."""
    budget = CPU_BUFFER_BYTES if device.type == "cpu" else GPU_BUFFER_BYTES
    return max(256, min(4096, budget // (4 * draft_size)))


def slot_losses(
    states: Tensor,
    *,
    head: OutputHead,
    terms: TermWeights,
    weights: Tensor,
    label_ids: Tensor,
    teacher: Teacher | None,
    teacher_row: Tensor | None,
    bias_states: Tensor | None = None,
    bias_weight: Tensor | None = None,
    bias_row: Tensor | None = None,
    confidence_logits: Tensor | None = None,
    chunk_slots: int | None = None,
) -> tuple[Tensor, SlotValues]:
    """Weighted loss of M slots, differentiable in states, both bias factors and the confidence logits.

    Args:
        states: [M, d] block states, what the output head reads.
        weights: [M] factor of each slot; nothing is divided by their sum here.
        label_ids: [M] token ids of the full vocabulary.
        teacher, teacher_row: rows and, per slot, the row to learn from. None only with CE alone.
        bias_states, bias_weight: [M, r] and [D, r]; their product is added to the logits after the soft cap.
        bias_row: [M] when slots share bias states, which then have any number of rows: slot m takes row bias_row[m].
        confidence_logits: [M], trained on the acceptance when `terms.confidence` is not zero.

    Returns:
        The scalar loss, in at least float32, and the values of each slot in the order given.

    Raises:
        ValueError: half of the bias or of the teacher is missing, or a shape contradicts the head.
    """
    if (bias_states is None) != (bias_weight is None) or (teacher is None) != (teacher_row is None):
        raise ValueError("bias_states come with bias_weight, and teacher with teacher_row: give both or neither")
    if bias_weight is not None and len(bias_weight) != head.draft_size:
        raise ValueError(f"bias_weight has {len(bias_weight)} rows, the draft vocabulary {head.draft_size} tokens")
    if teacher is None and terms.needs_teacher:
        raise ValueError("only the CE term works without a teacher: set the other terms to 0, or give one")
    if confidence_logits is None and terms.confidence:
        raise ValueError("the confidence term needs confidence logits: set it to 0 for a drafter without that head")
    labels = label_ids if head.draft_index is None else head.draft_index[label_ids]
    order = torch.arange(len(states), device=states.device)
    if teacher is not None and teacher_row is not None:
        used, teacher_row = torch.unique(teacher_row, return_inverse=True)
        teacher = teacher.rows(used) if len(used) < len(teacher) else teacher
        order = torch.argsort(teacher_row, stable=True)
        teacher_row = teacher_row[order]
    plan = _Plan(
        head=head,
        terms=terms,
        weights=weights.to(head.compute_dtype)[order],
        labels=labels[order],
        teacher=teacher,
        teacher_row=teacher_row,
        bias_row=None if bias_row is None else bias_row[order],
        chunk_slots=chunk_slots or default_chunk_slots(head.draft_size, states.device),
    )
    loss, values = _FusedSlots.apply(
        states[order],
        bias_states if bias_states is None or bias_row is not None else bias_states[order],
        bias_weight,
        None if confidence_logits is None else confidence_logits[order],
        plan,
    )
    return loss, SlotValues(*torch.empty_like(values).index_copy_(1, order, values).unbind(0))


class _FusedSlots(torch.autograd.Function):
    """Inputs are sorted by teacher row. The backward pass only scales what the forward pass has computed."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        bias_states: Tensor | None,
        bias_weight: Tensor | None,
        confidence_logits: Tensor | None,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(states.device.type, enabled=False):
            values, gradients = _run_chunks(states, bias_states, bias_weight, plan, ctx.needs_input_grad[:3])
            total = _weighted_total(values, plan)
            if confidence_logits is None:
                gradients.append(None)
            else:
                logits = confidence_logits.to(plan.head.compute_dtype)
                values.confidence.copy_(torch.nn.functional.softplus(logits) - logits * values.acceptance)
                total = total + plan.terms.confidence * torch.dot(plan.weights.double(), values.confidence.double())
                gradients.append(plan.terms.confidence * plan.weights * (logits.sigmoid() - values.acceptance))
        ctx.save_for_backward(*gradients)
        inputs = (states, bias_states, bias_weight, confidence_logits)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs]
        stacked = torch.stack(values)
        ctx.mark_non_differentiable(stacked)
        return total.to(plan.head.compute_dtype), stacked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _values: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if kept is None else (kept * grad_loss).to(dtype)
            for kept, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*scaled, None)


def _weighted_total(values: SlotValues, plan: _Plan) -> Tensor:
    """Sum over slots of weight times the terms but for the confidence's, in float64."""
    terms = plan.terms
    ce, l1, kl, soft_ce, _, acceptance = (value.double() for value in values)
    total = terms.ce * ce + terms.l1 * l1 + terms.kl * kl + terms.soft_ce * soft_ce
    if terms.negative_log_acceptance:
        total -= terms.negative_log_acceptance * acceptance.clamp(min=TINY).log()
    if terms.lk_hybrid:
        share = torch.exp(-terms.lk_hybrid_decay * acceptance)
        total += terms.lk_hybrid * (share * kl + (1 - share) * l1 / 2)
    return torch.dot(plan.weights.double(), total)


def _run_chunks(
    states: Tensor, bias_states: Tensor | None, bias_weight: Tensor | None, plan: _Plan, needs_grad: tuple[bool, ...]
) -> tuple[SlotValues, list[Tensor | None]]:
    """Values of every slot (the confidence's still zero), and gradients of the three inputs in the compute dtype."""
    head, terms = plan.head, plan.terms
    rows = min(plan.chunk_slots, len(states))
    logits_buffer, scratch = head.buffer(rows, head.draft_size), head.buffer(rows, head.draft_size)
    reader = None
    if isinstance(plan.teacher, DenseTeacher):
        reader = TeacherReader(plan.teacher, head, max_rows=min(rows, len(plan.teacher)), entropy=terms.needs_entropy)
    dtype = head.compute_dtype
    values = SlotValues(*torch.zeros(len(SlotValues._fields), len(states), dtype=dtype, device=states.device))
    grad_states = torch.empty_like(states, dtype=dtype) if needs_grad[0] else None
    bias = None
    if bias_states is not None and bias_weight is not None:
        bias = _SequentialBias(bias_states, bias_weight, plan, needs_grad[1:])

    for at, low, high in plan.chunks():
        logits = multiply(states[at], head.draft_weight.T, logits_buffer[: at.stop - at.start])
        squashed = None if head.soft_cap is None else apply_soft_cap_(logits, head.soft_cap)
        if bias is not None:
            bias.add_to(logits, at, scratch[: len(logits)])
        chunk = Chunk(logits, scratch[: len(logits)], terms=terms, weights=plan.weights[at], labels=plan.labels[at])
        if plan.teacher is None or plan.teacher_row is None:
            chunk.against_label_alone()
        elif reader is not None:
            chunk.against_dense(reader.read(low, high), plan.teacher_row[at] - low)
        else:
            assert isinstance(plan.teacher, SparseTeacher)
            chunk.against_sparse(plan.teacher.rows(plan.teacher_row[at]), head.draft_index)
        for value, part in zip(values, chunk.values, strict=True):
            value[at] = part
        if not any(needs_grad):
            continue
        gradient = chunk.gradient_()
        if bias is not None:
            bias.take_gradient(gradient, at)
        if grad_states is not None:
            if squashed is not None:
                gradient.mul_(squashed.square_().neg_().add_(1))
            multiply(gradient, head.draft_weight, grad_states[at])
    return values, [grad_states, *((None, None) if bias is None else (bias.grad_states, bias.grad_weight))]


class _SequentialBias:
    """Bias of a chunk's logits and its gradients; a bias state that slots share is projected once in a chunk."""

    def __init__(self, states: Tensor, weight: Tensor, plan: _Plan, needs_grad: tuple[bool, ...]) -> None:
        dtype = plan.head.compute_dtype
        self._states, self._weight, self._row = states, weight, plan.bias_row
        self._new_buffer = plan.head.buffer
        self._buffer = plan.head.buffer(0, 0)
        self.grad_states = torch.zeros_like(states, dtype=dtype) if needs_grad[0] else None
        self.grad_weight = torch.zeros_like(weight, dtype=dtype) if needs_grad[1] else None

    def add_to(self, logits: Tensor, at: slice, scratch: Tensor) -> None:
        if self._row is None:
            accumulate(logits, self._states[at], self._weight.T)
            return
        self._used, self._local = torch.unique(self._row[at], return_inverse=True)
        if len(self._used) > len(self._buffer):
            self._buffer = self._new_buffer(len(self._used), len(self._weight))
        shared = multiply(self._states[self._used], self._weight.T, self._buffer[: len(self._used)])
        logits.add_(torch.index_select(shared, 0, self._local, out=scratch))

    def take_gradient(self, gradient: Tensor, at: slice) -> None:
        """`gradient` [c, D] of the logits of the chunk that `add_to` saw last."""
        if self._row is None:
            if self.grad_states is not None:
                multiply(gradient, self._weight, self.grad_states[at])
            if self.grad_weight is not None:
                accumulate(self.grad_weight, gradient.T, self._states[at])
            return
        shared = self._buffer[: len(self._used)].zero_().index_add_(0, self._local, gradient)
        if self.grad_states is not None:
            part = multiply(shared, self._weight, self._new_buffer(len(shared), self._weight.shape[1]))
            self.grad_states.index_add_(0, self._used, part)
        if self.grad_weight is not None:
            accumulate(self.grad_weight, shared.T, self._states[self._used])
