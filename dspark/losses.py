"""The training loss of a packed batch (equations 8-12 of the DSpark paper), and the sums behind its metrics.

Shapes: N blocks of G slots, M of them supervised, V vocabulary, D draft vocabulary, d hidden, r Markov rank.

Slot k of a block weighs exp(-k / position_decay). Each term is the weighted sum over supervised slots divided by a
normaliser: the weights' sum over the batch, or over whatever the caller says. With the sum over the global batch, which
is known before the forward pass (`anchors.anchors_weight`), any split into ranks and micro-batches takes the same step.

With a reduced draft vocabulary the drafter's distribution covers its tokens alone, the teacher is normalised over the
whole vocabulary, and l1 counts the teacher's mass outside as lost. A label outside has no cross-entropy: its slot keeps
its weight, and learns from the other terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor, nn

from dspark.config import DrafterConfig
from dspark.fused_loss import slot_losses
from dspark.models.heads import SequentialHead
from dspark.output_head import OutputHead
from dspark.packing import PackedBatch
from dspark.slot_terms import SlotValues, TermWeights

NORMALIZER_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Factors of the terms, by default the paper's.

    `l1` is the raw L1 distance, twice the total variation. `kl` is from teacher to draft; `soft_ce`, the cross-entropy
    to the teacher that EAGLE-3 trains on, is the same up to the teacher's entropy. `negative_log_acceptance` and
    `lk_hybrid` are the two acceptance-likelihood losses: -log a, and a blend of KL and total variation that moves
    to the latter as acceptance a rises, with KL's share exp(-lk_hybrid_decay a).
    """

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    kl: float = 0.0
    soft_ce: float = 0.0
    negative_log_acceptance: float = 0.0
    lk_hybrid: float = 0.0
    lk_hybrid_decay: float = 3.0
    position_decay: float = 4.0
    chunk_slots: int | None = None  # slots whose logits exist at once; None: by vocabulary and device

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("position_decay", "chunk_slots"):
                if value is not None and not value > 0:
                    raise ValueError(
                        f"loss.{field.name} is {value}; allowed: above 0 (option `train.loss.{field.name}`)"
                    )
            elif not (value >= 0 and math.isfinite(value)):
                raise ValueError(
                    f"loss.{field.name} is {value}; allowed: finite numbers from 0 (option `train.loss.{field.name}`)"
                )
        if not any((self.ce, self.l1, self.kl, self.soft_ce, self.negative_log_acceptance, self.lk_hybrid)):
            raise ValueError(
                "every loss term but the confidence's is 0: the drafter would learn nothing (option `train.loss`)"
            )

    @property
    def terms(self) -> TermWeights:
        return TermWeights(
            ce=self.ce,
            l1=self.l1,
            kl=self.kl,
            soft_ce=self.soft_ce,
            negative_log_acceptance=self.negative_log_acceptance,
            lk_hybrid=self.lk_hybrid,
            lk_hybrid_decay=self.lk_hybrid_decay,
            confidence=self.confidence,
        )


class SequentialHeadLike(Protocol):
    """What the loss reads of a sequential head, whose bias is `bias_vectors @ markov_w2.weight.T`."""

    markov_w2: nn.Linear  # [V, r]

    def embed(self, previous_ids: Tensor) -> Tensor: ...  # [..., r]
    def bias_vectors(self, states: Tensor, previous_ids: Tensor) -> Tensor: ...  # [N, G, r]


@dataclass(frozen=True, kw_only=True)
class LossResult:
    """`loss` is differentiable. `sums` add up over batches and ranks; `metrics_of` turns them into means."""

    loss: Tensor
    sums: dict[str, float]


def slot_weights(supervised: Tensor, position_decay: float) -> Tensor:
    """exp(-k / position_decay) where a slot is supervised, else 0: [N, G] float32."""
    slots = torch.arange(supervised.shape[1], device=supervised.device, dtype=torch.float32)
    return torch.exp(-slots / position_decay) * supervised


class DrafterLike(Protocol):
    """What the loss reads of a drafter."""

    lm_head: nn.Linear  # [V, d], frozen
    draft_token_ids: Tensor | None  # [D]

    @property
    def config(self) -> DrafterConfig: ...
    @property
    def sequential_head(self) -> SequentialHeadLike | None: ...
    def confidence_logits(self, states: Tensor, previous_ids: Tensor) -> Tensor | None: ...


def _reads_previous_token_alone(head: SequentialHeadLike) -> bool:
    """The vanilla head, whose bias is one for all slots after the same token."""
    return isinstance(head, SequentialHead) and type(head).bias_vectors is SequentialHead.bias_vectors


def output_head_of(drafter: DrafterLike) -> OutputHead:
    """The frozen head that drafter and teacher share, cut to the draft vocabulary for the former."""
    return OutputHead.create(
        drafter.lm_head.weight,
        soft_cap=drafter.config.final_logit_softcapping,
        draft_token_ids=drafter.draft_token_ids,
    )


def fused_loss(
    drafter: DrafterLike,
    states: Tensor,
    batch: PackedBatch,
    config: LossConfig,
    *,
    normalizer: float | None = None,
    head: OutputHead | None = None,
) -> LossResult:
    """Loss of a packed batch from its block states [N, G, d] (`drafter.block_states(batch)`).

    Args:
        drafter: its `lm_head`, `sequential_head` and `confidence_head` are read, and `draft_token_ids` if it has any.
        normalizer: sum of slot weights over the whole global batch; None: over this batch. A data-parallel engine that
            averages gradients over ranks or micro-batches wants the loss times their number.
        head: from `output_head_of(drafter)`, to save making it at every step.

    Raises:
        ValueError: a confidence term without a confidence head.
    """
    head = head or output_head_of(drafter)
    terms = config.terms
    sequential = drafter.sequential_head
    chosen = batch.supervised.flatten().nonzero()[:, 0]  # [M]
    weights = slot_weights(batch.supervised, config.position_decay)

    def at_slots(tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1)[chosen]

    bias_states, bias_weight, bias_row = None, None, None
    if sequential is not None:
        if _reads_previous_token_alone(sequential):
            tokens, bias_row = torch.unique(at_slots(batch.previous_ids), return_inverse=True)
            bias_states = sequential.embed(tokens)
        else:
            bias_states = at_slots(sequential.bias_vectors(states, batch.previous_ids))
        bias_weight = sequential.markov_w2.weight
        if head.draft_token_ids is not None:
            bias_weight = bias_weight[head.draft_token_ids]
    confidence_logits = drafter.confidence_logits(at_slots(states), at_slots(batch.previous_ids))
    if terms.confidence and confidence_logits is None:
        raise ValueError(
            "loss.confidence is not 0 but the drafter has no confidence head: set `train.loss.confidence` to 0"
        )
    total, values = slot_losses(
        at_slots(states),
        head=head,
        terms=terms,
        weights=at_slots(weights),
        label_ids=at_slots(batch.label_ids),
        teacher=batch.teacher,
        teacher_row=at_slots(batch.teacher_index),
        bias_states=bias_states,
        bias_weight=bias_weight,
        bias_row=bias_row,
        confidence_logits=confidence_logits,
        chunk_slots=config.chunk_slots,
    )
    seen = None if confidence_logits is None else confidence_logits.detach()
    sums = _sums(batch, weights, chosen, total.detach(), values, seen)
    divisor = (sums["weight"] if normalizer is None else normalizer) + NORMALIZER_EPSILON
    return LossResult(loss=total / divisor, sums=sums)


def _sums(
    batch: PackedBatch,
    weights: Tensor,
    chosen: Tensor,
    total: Tensor,
    values: SlotValues,
    confidence_logits: Tensor | None,
) -> dict[str, float]:
    """Weighted sums of the terms, and counts, over the batch. One transfer from the device."""
    supervised = batch.supervised
    weights = weights.double()

    def spread(slot_values: Tensor) -> Tensor:
        """[M] to [N, G], zeros elsewhere."""
        full = torch.zeros(supervised.numel(), dtype=torch.float64, device=supervised.device)
        return full.index_copy_(0, chosen, slot_values.double()).view(supervised.shape)

    acceptance = spread(values.acceptance)
    survival = acceptance.cumprod(-1)
    block_used = supervised.any(-1)
    parts = {
        "weight": weights.sum(),
        "slots": supervised.sum(),
        "blocks": block_used.sum(),
        "loss": total,
        "ce": (weights * spread(values.ce)).sum(),
        "l1": (weights * spread(values.l1)).sum(),
        "tau_probabilistic": ((1 + survival.sum(-1)) * block_used).sum(),
    }
    for slot in range(supervised.shape[1]):
        parts[f"acceptance@{slot}"] = acceptance[:, slot].sum()
        parts[f"slots@{slot}"] = supervised[:, slot].sum()
    if confidence_logits is not None:
        confidence = spread(confidence_logits.double().sigmoid())
        error = confidence - acceptance
        parts["confidence"] = (weights * spread(values.confidence)).sum()
        parts["confidence_abs_error"] = (weights * error.abs()).sum()
        parts["confidence_bias"] = (weights * error).sum()
        parts["confidence_cumprod_bias"] = (weights * (confidence.cumprod(-1) - survival)).sum()
    numbers = torch.stack([part.double() for part in parts.values()]).tolist()
    return dict(zip(parts, numbers, strict=True))


def add_sums(total: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    """Key by key; a key missing on one side counts as 0."""
    return {key: total.get(key, 0.0) + more.get(key, 0.0) for key in {**total, **more}}


def metrics_of(sums: dict[str, float]) -> dict[str, float]:
    """Means by the reference's definitions.

    The loss, its terms and confidence errors are means by slot weight, `acceptance@k` a mean over supervised slots, and
    `tau_probabilistic` (expected accepted length, with the target's own token) a mean over blocks.
    """
    weight = sums["weight"] + NORMALIZER_EPSILON
    weighted = ("loss", "ce", "l1", "confidence", "confidence_abs_error", "confidence_bias", "confidence_cumprod_bias")
    metrics = {key: sums[key] / weight for key in weighted if key in sums}
    metrics["tau_probabilistic"] = sums["tau_probabilistic"] / max(sums["blocks"], 1.0)
    for key, count in sums.items():
        if key.startswith("slots@") and count:
            slot = key.removeprefix("slots@")
            metrics[f"acceptance@{slot}"] = sums[f"acceptance@{slot}"] / count
    return metrics


def global_normalizer(supervised_masks: list[Tensor], position_decay: float) -> float:
    """Sum of slot weights over batches, from their masks [N, G] alone."""
    return sum(float(slot_weights(mask, position_decay).double().sum()) for mask in supervised_masks)
