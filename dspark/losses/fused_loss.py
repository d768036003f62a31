"""The loss of a micro-batch: distributions, every term and its exact gradient, one chunk of slots at a time.

Shapes: N blocks of G slots, M of them with a label, c of a chunk, P teacher positions, V vocabulary, D draft vocabulary
(D = V unless reduced), K tokens of a sparse teacher, d hidden, r Markov rank.

Slot k of a block weighs exp(-k / position_decay). Each term is the weighted sum over slots divided by a normaliser: the
weights' sum over the batch, or over whatever the caller says. With the sum over the global batch, which is known before
the forward pass (`anchors.anchors_weight`), any split into ranks and micro-batches takes the same step. Where a slot
weighs by its chances (`losses.SlotWeighting`) all values are computed once before, and the normaliser counts blocks.

With a reduced draft vocabulary the drafter's distribution covers its tokens alone, the teacher is normalised over the
whole vocabulary, and l1 counts the teacher's mass outside as lost. A label outside has no cross-entropy: its slot keeps
its weight, and learns from the other terms.

The gradient with respect to a slot's logits has a closed form, so it is computed where the logits are, in the forward
pass, and goes back through the head at once: logits and probabilities live in the buffers of one chunk. With p the
draft's and q the teacher's distribution, and v = p where p < q, else 0, the gradients of what a term may read are

    ce            p - onehot(label)
    l1            2 (p sum(v) - v)                    = -2 times that of the acceptance
    kl            p - q / sum(q)                      teacher renormalised on the draft vocabulary
    soft_ce       p sum(q) - q

and what a term makes of them (`losses.LossTerm`) is a few numbers a slot. A sparse teacher is compared on its K tokens,
and on all others as one bucket: its l1 is a lower bound, off by at most twice the smaller of the two tail masses. Slots
are visited in the order of their teacher positions, so that a position shared by several slots is projected once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dspark.errors import DsparkError
from dspark.losses.losses import NORMALIZER_EPSILON, TINY, LossConfig, SlotValues, SlotWeighting, loss_terms
from dspark.losses.micro_batch import MicroBatch, Teacher
from dspark.losses.output_head import (
    OutputHead,
    TeacherReader,
    TeacherRows,
    accumulate,
    apply_soft_cap_,
    multiply,
)

if TYPE_CHECKING:
    from dspark.models.base import Drafter

CPU_BUFFER_BYTES = 32 * 2**20
GPU_BUFFER_BYTES = 512 * 2**20


class BlockLoss(nn.Module):
    """A drafter with its loss as one forward pass, which is what DeepSpeed wraps."""

    def __init__(self, drafter: Drafter, config: LossConfig) -> None:
        super().__init__()
        self.drafter, self.config = drafter, config
        self._head: OutputHead | None = None

    def take_head(self) -> None:
        """Read the frozen head for good: once the engine has given the parameters their dtype, while they are whole.

        At ZeRO stage 3 this is the copy that spares every micro-batch the gathering of the largest tensor there is.
        """
        head = output_head_of(self.drafter)
        if hasattr(self.drafter.lm_head.weight, "ds_id"):
            weight = head.weight.clone()
            draft = weight if head.draft_token_ids is None else head.draft_weight
            head = replace(head, weight=weight, draft_weight=draft)
        self._head = head

    @property
    def head(self) -> OutputHead:
        """The frozen head, after `take_head`."""
        assert self._head is not None
        return self._head

    def forward(self, batch: MicroBatch, normalizer: float, progress: float = 1.0) -> tuple[Tensor, dict[str, float]]:
        """The loss at this moment of training (`LossConfig.at`), and the sums of `fused_loss`."""
        states, config = self.drafter.block_states(batch), self.config.at(progress)
        result = fused_loss(self.drafter, states, batch, config, normalizer=normalizer, head=self._head)
        return result.loss, result.sums


@dataclass(frozen=True, kw_only=True)
class LossResult:
    """`loss` is differentiable. `sums` add up over batches and ranks; `losses.metrics_of` turns them into means."""

    loss: Tensor
    sums: dict[str, float]


def slot_weights(loss_mask: Tensor, position_decay: float) -> Tensor:
    """exp(-k / position_decay) where a slot has a label, else 0: [N, G] float32."""
    slots = torch.arange(loss_mask.shape[1], device=loss_mask.device, dtype=torch.float32)
    return torch.exp(-slots / position_decay) * loss_mask


def output_head_of(drafter: Drafter) -> OutputHead:
    """The frozen head that drafter and teacher share, cut to the draft vocabulary for the former."""
    return OutputHead.create(
        drafter.lm_head.weight,
        soft_cap=drafter.config.final_logit_softcapping,
        draft_token_ids=drafter.draft_token_ids,
    )


def fused_loss(
    drafter: Drafter,
    states: Tensor,
    batch: MicroBatch,
    config: LossConfig,
    *,
    normalizer: float | None = None,
    head: OutputHead | None = None,
) -> LossResult:
    """Loss of a packed batch from its block states [N, G, d] (`drafter.block_states(batch)`).

    Args:
        drafter: its `lm_head`, `sequential_head` and `confidence_head` are read, and `draft_token_ids` if it has any.
        normalizer: sum of slot weights (or blocks, see above) of the global batch; None: of this one. An engine that
            averages gradients over ranks or micro-batches wants the loss times their number.
        head: from `output_head_of(drafter)`, to save making it at every step.

    Raises:
        DsparkError: a confidence term without a confidence head.
    """
    head = head or output_head_of(drafter)
    sequential = drafter.sequential_head
    chosen = batch.loss_mask.flatten().nonzero()[:, 0]  # [M]
    weights = slot_weights(batch.loss_mask, config.position_decay)

    def at_slots(tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1)[chosen]

    bias_states, bias_weight, bias_row = None, None, None
    if sequential is not None:
        if getattr(sequential, "reads_previous_token_alone", False):
            tokens, bias_row = torch.unique(at_slots(batch.previous_ids), return_inverse=True)
            bias_states = sequential.embed(tokens)
        else:
            bias_states = at_slots(sequential.bias_vectors(states, batch.previous_ids))
        bias_weight = sequential.markov_w2.weight
        if head.draft_token_ids is not None:
            bias_weight = bias_weight[head.draft_token_ids]
    confidence_logits = drafter.confidence_logits(at_slots(states), at_slots(batch.previous_ids))
    if "confidence_logits" in config.reads and confidence_logits is None:
        raise DsparkError(
            "a loss term reads the confidence head, which this drafter lacks: set `train.loss.confidence` to 0"
        )
    evaluate = partial(
        slot_losses,
        head=head,
        config=config,
        labels=at_slots(batch.labels),
        teacher=batch.teacher,
        teacher_row=at_slots(batch.teacher_index),
        bias_states=bias_states,
        bias_weight=bias_weight,
        bias_row=bias_row,
        confidence_logits=confidence_logits,
    )
    used, factor = at_slots(weights), None
    if config.slot_weighting is not None:
        with torch.no_grad():
            _, values = evaluate(at_slots(states), weights=used)
            used, factor = _weights_by_chance(values, batch, chosen, config.slot_weighting, head)
    total, values = evaluate(at_slots(states), weights=used, confidence_factor=factor)
    sums = _sums(batch, weights, chosen, total.detach(), values, config, confidence_logits is not None)
    divisor = (sums["normalizer"] if normalizer is None else normalizer) + NORMALIZER_EPSILON
    return LossResult(loss=total / divisor, sums=sums)


def _weights_by_chance(
    values: SlotValues, batch: MicroBatch, chosen: Tensor, weighting: SlotWeighting, head: OutputHead
) -> tuple[Tensor, Tensor]:
    """Weights [M] of the slots `chosen` [M], and the confidence's in proportion to them."""
    mask, probability = batch.loss_mask, (-values.ce).exp()
    if head.draft_index is not None:
        probability = probability * (head.draft_index[batch.labels.flatten()[chosen]] >= 0)

    def at_blocks(slot_values: Tensor) -> Tensor:
        return slot_values.new_ones(mask.numel()).index_copy_(0, chosen, slot_values).view(mask.shape)

    both = weighting.weights(at_blocks(probability), at_blocks(values.acceptance.clamp(min=0)), mask)
    weights, reached = (part.flatten()[chosen] for part in both)
    return weights, reached / weights


def _sums(
    batch: MicroBatch,
    weights: Tensor,
    chosen: Tensor,
    total: Tensor,
    values: SlotValues,
    config: LossConfig,
    has_confidence: bool,
) -> dict[str, float]:
    """Weighted sums of the terms, and counts, over the batch. One transfer from the device."""
    mask = batch.loss_mask
    weights = weights.double()

    def at_blocks(slot_values: Tensor) -> Tensor:
        """[M] to [N, G], zeros elsewhere."""
        full = torch.zeros(mask.numel(), dtype=torch.float64, device=mask.device)
        return full.index_copy_(0, chosen, slot_values.double()).view(mask.shape)

    acceptance = at_blocks(values.acceptance)
    survival = acceptance.cumprod(-1)
    block_used = mask.any(-1)
    shown = {"ce", "l1", *config.terms, *(("confidence",) if has_confidence else ())}
    terms = {name: config.terms.get(name) or loss_terms[name]() for name in loss_terms if name in shown}
    clamped = in_domain(values, torch.float64)
    parts = {
        "weight": weights.sum(),
        "slots": mask.sum(),
        "blocks": block_used.sum(),
        "normalizer": weights.sum() if config.slot_weighting is None else block_used.sum(),
        "loss": total,
        **{name: (weights * at_blocks(term.value(clamped))).sum() for name, term in terms.items()},
        "tau_probabilistic": ((1 + survival.sum(-1)) * block_used).sum(),
    }
    for slot in range(mask.shape[1]):
        parts[f"acceptance@{slot}"] = acceptance[:, slot].sum()
        parts[f"slots@{slot}"] = mask[:, slot].sum()
    if has_confidence:
        confidence = at_blocks(values.confidence_logits.double().sigmoid())
        error = confidence - acceptance
        parts["confidence_abs_error"] = (weights * error.abs()).sum()
        parts["confidence_bias"] = (weights * error).sum()
        parts["confidence_cumprod_bias"] = (weights * (confidence.cumprod(-1) - survival)).sum()
    numbers = torch.stack([part.double() for part in parts.values()]).tolist()
    return dict(zip(parts, numbers, strict=True))


@dataclass(kw_only=True)
class _Plan:
    """What the chunks read besides the differentiable inputs; slots ascend in `teacher_row`."""

    head: OutputHead
    config: LossConfig
    weights: Tensor  # [M]
    labels: Tensor  # [M] column of the draft vocabulary, -1 outside
    teacher: Teacher | None
    teacher_row: Tensor | None  # [M]
    bias_row: Tensor | None  # [M]
    confidence_logits: Tensor | None  # [M]
    confidence_factor: Tensor | None  # [M]
    chunk_slots: int
    differentiate: bool  # autograd asks for gradients of inputs that have them, without grad mode too

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
    config: LossConfig,
    weights: Tensor,
    labels: Tensor,
    teacher: Teacher | None,
    teacher_row: Tensor | None,
    bias_states: Tensor | None = None,
    bias_weight: Tensor | None = None,
    bias_row: Tensor | None = None,
    confidence_logits: Tensor | None = None,
    confidence_factor: Tensor | None = None,
) -> tuple[Tensor, SlotValues]:
    """Weighted loss of M slots, differentiable in states, both bias factors and the confidence logits.

    Args:
        states: [M, d] block states, what the output head reads.
        weights: [M] factor of each slot; nothing is divided by their sum here.
        labels: [M] token ids of the full vocabulary.
        teacher, teacher_row: rows and, per slot, the row to learn from. None only where no term reads the teacher.
        bias_states, bias_weight: [M, r] and [D, r]; their product is added to the logits after the soft cap.
        bias_row: [M] when slots share bias states, which then have any number of rows: slot m takes row bias_row[m].
        confidence_logits: [M], for the terms that read them.
        confidence_factor: [M] what the terms of the confidence alone weigh beside `weights`; None: as much.

    Returns:
        The scalar loss, in at least float32, and the values of each slot in the order given.

    Raises:
        DsparkError: half of the bias or of the teacher is missing, or a shape contradicts the head.
    """
    if (bias_states is None) != (bias_weight is None) or (teacher is None) != (teacher_row is None):
        raise DsparkError("bias_states come with bias_weight, and teacher with teacher_row: give both or neither")
    if bias_weight is not None and len(bias_weight) != head.draft_size:
        raise DsparkError(f"bias_weight has {len(bias_weight)} rows, the draft vocabulary {head.draft_size} tokens")
    if teacher is None and config.needs_teacher:
        raise DsparkError("only the CE term works without a teacher: set the other terms to 0, or give one")
    if confidence_logits is None and "confidence_logits" in config.reads:
        raise DsparkError("the confidence term needs confidence logits: set it to 0 for a drafter without that head")
    if head.draft_index is not None:
        labels = head.draft_index[labels]
    order = torch.arange(len(states), device=states.device)
    if teacher is not None and teacher_row is not None:
        used, teacher_row = torch.unique(teacher_row, return_inverse=True)
        teacher = teacher.rows(used) if len(used) < len(teacher) else teacher
        order = torch.argsort(teacher_row, stable=True)
        teacher_row = teacher_row[order]
    plan = _Plan(
        head=head,
        config=config,
        weights=weights.to(head.compute_dtype)[order],
        labels=labels[order],
        teacher=teacher,
        teacher_row=teacher_row,
        bias_row=None if bias_row is None else bias_row[order],
        confidence_logits=None if confidence_logits is None else confidence_logits.detach()[order],
        confidence_factor=None if confidence_factor is None else confidence_factor.to(head.compute_dtype)[order],
        chunk_slots=config.chunk_slots or default_chunk_slots(head.draft_size, states.device),
        differentiate=torch.is_grad_enabled(),
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
            needs_grad = tuple(plan.differentiate and needed for needed in ctx.needs_input_grad[:4])
            values, gradients = _run_chunks(states, bias_states, bias_weight, plan, needs_grad)
            total = torch.dot(
                plan.weights.double(), plan.config.total(in_domain(values, torch.float64), plan.confidence_factor)
            )
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


def in_domain(values: SlotValues, dtype: torch.dtype) -> SlotValues:
    """As the terms take them: an acceptance rate has a logarithm."""
    return SlotValues(*(value.to(dtype) for value in values))._replace(
        acceptance=values.acceptance.to(dtype).clamp(min=TINY)
    )


def _run_chunks(
    states: Tensor, bias_states: Tensor | None, bias_weight: Tensor | None, plan: _Plan, needs_grad: tuple[bool, ...]
) -> tuple[SlotValues, list[Tensor | None]]:
    """Values of every slot, and gradients of the four inputs in the compute dtype."""
    head, config = plan.head, plan.config
    rows = min(plan.chunk_slots, len(states))
    logits_buffer, scratch = head.buffer(rows, head.draft_size), head.buffer(rows, head.draft_size)
    reader = None
    if plan.teacher is not None and not plan.teacher.sparse:
        reader = TeacherReader(plan.teacher, head, max_rows=min(rows, len(plan.teacher)), entropy="kl" in config.reads)
    dtype = head.compute_dtype
    values = SlotValues(*torch.zeros(len(SlotValues._fields), len(states), dtype=dtype, device=states.device))
    grad_states = torch.empty_like(states, dtype=dtype) if needs_grad[0] else None
    bias = None
    if bias_states is not None and bias_weight is not None:
        bias = _SequentialBias(bias_states, bias_weight, plan, needs_grad[1:3])
    grad_confidence = None
    if plan.confidence_logits is not None:
        values.confidence_logits.copy_(plan.confidence_logits)
        grad_confidence = torch.zeros_like(values.confidence_logits) if needs_grad[3] else None

    for at, low, high in plan.chunks():
        logits = multiply(states[at], head.draft_weight.T, logits_buffer[: at.stop - at.start])
        squashed = None if head.soft_cap is None else apply_soft_cap_(logits, head.soft_cap)
        if bias is not None:
            bias.add_to(logits, at, scratch[: len(logits)])
        chunk = _Chunk(logits, scratch[: len(logits)], plan, at, values.confidence_logits[at])
        if plan.teacher is None or plan.teacher_row is None:
            chunk.against_label_alone()
        elif reader is not None:
            chunk.against_dense(reader.read(low, high), plan.teacher_row[at] - low)
        else:
            chunk.against_sparse(plan.teacher.rows(plan.teacher_row[at]), head.draft_index)
        for value, part in zip(values, chunk.values, strict=True):
            value[at] = part
        if not any(needs_grad):
            continue
        gradient, slope = chunk.gradient_()
        if grad_confidence is not None:
            grad_confidence[at] = slope
        if bias is not None:
            bias.take_gradient(gradient, at)
        if grad_states is not None:
            if squashed is not None:
                gradient.mul_(squashed.square_().neg_().add_(1))
            multiply(gradient, head.draft_weight, grad_states[at])
    of_bias = (None, None) if bias is None else (bias.grad_states, bias.grad_weight)
    return values, [grad_states, *of_bias, grad_confidence]


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


class _Chunk:
    """One chunk on its way from logits to the logits' gradient, all in the memory of `logits` and `scratch`.

    Call one of the `against_…` methods, read `values`, then call `gradient_` once if it is needed.
    """

    def __init__(self, logits: Tensor, scratch: Tensor, plan: _Plan, at: slice, confidence_logits: Tensor) -> None:
        """`logits` and `scratch` [c, D] are overwritten."""
        self._work = logits.sub_(logits.amax(-1, keepdim=True))
        self._scratch, self._config, self._weights = scratch, plan.config, plan.weights[at]
        self._confidence_factor = None if plan.confidence_factor is None else plan.confidence_factor[at]
        labels = plan.labels[at]
        self._label_known = (labels >= 0).to(logits.dtype)
        self._label_column = labels.clamp(min=0)[:, None]
        self._label_logit = self._work.gather(1, self._label_column)[:, 0]
        self._divergence = bool({"kl", "soft_ce"} & plan.config.reads)
        zeros = torch.zeros_like(self._label_logit)
        self.values = SlotValues(zeros, zeros, zeros, zeros, zeros, confidence_logits)

    def against_label_alone(self) -> None:
        self._exponentiate()
        self._finish(l1=None, overlap=None, cross=None, negative_entropy=None, mass=None)

    def against_dense(self, rows: TeacherRows, row_of_slot: Tensor) -> None:
        """`row_of_slot` [c] indexes `rows`, whose probabilities must last until `gradient_`."""
        q = torch.index_select(rows.probs, 0, row_of_slot, out=self._scratch)
        cross = torch.linalg.vecdot(q, self._work) if self._divergence else None
        self._exponentiate()
        scale = self._inverse_sum[:, None]
        overlap = None
        if "acceptance" in self._config.reads:
            overlap = torch.minimum(self._work * scale, q).sum(-1)
        # Both distributions sum to 1, so what p lacks of q (outside the draft vocabulary too) is half of their l1.
        q.addcmul_(self._work, scale, value=-1).clamp_(min=0)
        lacking = q.sum(-1)
        mass = None
        if rows.mass is not None:
            mass = rows.mass[row_of_slot]
            lacking += (1 - mass).clamp_(min=0)
        self._below = _keep_where_positive_(self._work, q)  # v times the sum that p lacks
        self._below_sum = self._below.sum(-1).mul_(self._inverse_sum)
        self._dense_rows = (rows.probs, row_of_slot)
        negative_entropy = None if rows.negative_entropy is None else rows.negative_entropy[row_of_slot]
        self._finish(l1=2 * lacking, overlap=overlap, cross=cross, negative_entropy=negative_entropy, mass=mass)

    def against_sparse(self, teacher: Teacher, draft_index: Tensor | None) -> None:
        """`teacher` has a row for each slot; `draft_index` [V] maps token ids to columns."""
        ids, log_probs, tail = teacher.top_ids, teacher.top_values, teacher.tail_mass
        assert ids is not None and log_probs is not None and tail is not None  # noqa: PT018
        columns = ids if draft_index is None else draft_index[ids]
        inside = (columns >= 0).to(self._work.dtype)
        columns = columns.clamp(min=0)
        q, tail = log_probs.to(self._work.dtype).exp(), tail.to(self._work.dtype)
        logits = self._work.gather(1, columns)
        self._work.exp_()
        top = self._work.gather(1, columns) * inside
        # Taken out of the row, so that what remains is the bucket of all other tokens, without cancellation.
        self._work.scatter_add_(1, columns, -top)
        rest = self._work.sum(-1).clamp_(min=0)
        self._normalise_by(rest + top.sum(-1))
        p, rest = top * self._inverse_sum[:, None], rest * self._inverse_sum
        l1 = (p - q).abs().sum(-1) + (rest - tail).abs()
        overlap = torch.minimum(p, q).sum(-1) + torch.minimum(rest, tail)
        q = q * inside
        mass = q.sum(-1) + tail
        log_rest = rest.clamp(min=TINY).log()
        cross = (q * logits).sum(-1) + tail * (log_rest + self._log_sum)
        negative_entropy = torch.xlogy(q, q).sum(-1) + torch.xlogy(tail, tail)
        self._sparse_columns = (columns, p, q, inside, rest, tail)
        self._finish(l1=l1, overlap=overlap, cross=cross, negative_entropy=negative_entropy, mass=mass)

    def gradient_(self) -> tuple[Tensor, Tensor]:
        """Weighted gradient of all terms with respect to the logits [c, D], which it overwrites, and the confidence
        logits [c].
        """
        slope, work, scale = self._slopes(), self._work, self._weights * self._inverse_sum
        label = slope.ce * self._label_known
        l1 = slope.l1 - slope.acceptance / 2
        pull = slope.kl / self._mass + slope.soft_ce  # towards q
        common = label + slope.kl + slope.soft_ce * self._mass
        if hasattr(self, "_dense_rows"):
            work.mul_(((common + 2 * l1 * self._below_sum) * scale)[:, None])
            work.addcmul_(self._below, (-2 * l1 * scale)[:, None])
            if self._divergence:
                probs, row_of_slot = self._dense_rows
                q = torch.index_select(probs, 0, row_of_slot, out=self._scratch)
                work.addcmul_(q, (pull * self._weights)[:, None], value=-1)
        elif hasattr(self, "_sparse_columns"):
            columns, p, q, inside, rest, tail = self._sparse_columns
            sign, rest_sign = (p - q).sign(), (rest - tail).sign()
            common = common - l1 * ((p * sign).sum(-1) + rest * rest_sign)
            rest_factor = common + l1 * rest_sign - pull * tail / rest.clamp(min=TINY)
            work.mul_((rest_factor * scale)[:, None])
            top = p * (common[:, None] + l1[:, None] * sign) - pull[:, None] * q
            work.scatter_add_(1, columns, top * inside * self._weights[:, None])
        else:
            work.mul_((label * scale)[:, None])
        work.scatter_add_(1, self._label_column, -(label * self._weights)[:, None])
        return work, slope.confidence_logits * self._weights

    def _slopes(self) -> SlotValues:
        """How the sum of the terms changes with each value [c] of a slot."""
        known = in_domain(self.values, self.values.ce.dtype)
        leaves = [v.detach().requires_grad_(name in self._config.reads) for name, v in known._asdict().items()]
        with torch.enable_grad():
            total = self._config.total(SlotValues(*leaves), self._confidence_factor).sum()
        slopes = torch.autograd.grad(total, [leaf for leaf in leaves if leaf.requires_grad], allow_unused=True)
        found = iter(slopes)
        each = [next(found) if leaf.requires_grad else None for leaf in leaves]
        return SlotValues(*(torch.zeros_like(known.ce) if slope is None else slope for slope in each))

    def _exponentiate(self) -> None:
        self._work.exp_()
        self._normalise_by(self._work.sum(-1))

    def _normalise_by(self, total: Tensor) -> None:
        self._inverse_sum, self._log_sum = total.reciprocal(), total.log()

    def _finish(
        self,
        *,
        l1: Tensor | None,
        overlap: Tensor | None,
        cross: Tensor | None,
        negative_entropy: Tensor | None,
        mass: Tensor | None,
    ) -> None:
        """`cross`: sum of q times (shifted logit). `overlap`: the acceptance where 1 - l1/2 would lose digits."""
        zeros = torch.zeros_like(self._label_logit)
        self._mass = torch.ones_like(zeros) if mass is None else mass.clamp(min=TINY)
        ce = (self._log_sum - self._label_logit) * self._label_known
        l1 = zeros if l1 is None else l1
        acceptance = 1 - l1 / 2 if overlap is None else overlap
        soft_ce = zeros if cross is None else self._mass * self._log_sum - cross
        kl = zeros if negative_entropy is None else (soft_ce + negative_entropy) / self._mass - self._mass.log()
        self.values = SlotValues(ce, l1, kl, soft_ce, acceptance, self.values.confidence_logits)


def _keep_where_positive_(values: Tensor, gate: Tensor) -> Tensor:
    """`values` where `gate` > 0, else 0, in the memory of `gate`: one pass, no mask in between."""
    torch.ops.aten.threshold_backward.grad_input(values, gate, 0, grad_input=gate)
    return gate
