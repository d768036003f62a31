"""Whether a micro-batch's teacher speaks of the tokens beside it, and what a drafter that reads nothing would reach.

Shapes: M slots, P teacher positions, V vocabulary.

A slot at anchor + k learns from the target's last hidden state there, which predicts the token at anchor + k + 1.
States of another position, another text or another target give other tokens more than that one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark.losses.micro_batch import MicroBatch, Teacher
from dspark.losses.output_head import OutputHead, full_logits

if TYPE_CHECKING:
    from dspark.decoding.target import Target


@dataclass(frozen=True, kw_only=True)
class Lead:
    """How much more log-probability the teacher gives the right token than another one, over M slots."""

    mean: float
    error: float  # standard error of the mean

    @property
    def positive(self) -> bool:
        return self.mean > 3 * self.error

    @property
    def negative(self) -> bool:
        return self.mean < -3 * self.error


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The right token's lead over the token before it, the token after it, and the right token of another slot."""

    over_previous: Lead
    over_next: Lead
    over_other: Lead


def teacher_agreement(batch: MicroBatch, head: OutputHead, *, slots: int = 512) -> Agreement | None:
    """Measured on at most so many slots; None where blocks are too short, or there are fewer than two slots."""
    if batch.block_size < 2:
        return None
    # Slots whose next one is supervised too, so that the token after theirs is known.
    chosen = batch.loss_mask[:, 1:].nonzero()[:slots]  # [M, 2]
    if len(chosen) < 2:
        return None
    block, slot = chosen.unbind(1)
    log_probs = _log_probs(batch, head, batch.teacher_index[block, slot])  # [M, V]

    def at(tokens: Tensor) -> Tensor:
        return log_probs.gather(1, tokens[:, None])[:, 0].double()

    labels = batch.labels[block, slot]
    right = at(labels)
    others = {
        "over_previous": batch.previous_ids[block, slot],
        "over_next": batch.labels[block, slot + 1],
        "over_other": labels.roll(len(labels) // 2),
    }
    return Agreement(**{name: _lead(right - at(tokens)) for name, tokens in others.items()})


@torch.no_grad()
def with_own_teacher(batch: MicroBatch, target: Target) -> MicroBatch:
    """The batch with what the target itself thinks at the anchors, for slot 0 of each block alone."""
    bounds = batch.sequence_starts.tolist()
    ids = batch.input_ids.to(target.device)
    last = torch.cat([target.capture(ids[start:end][None]).last_hidden_state[0] for start, end in pairwise(bounds)])
    blocks = torch.arange(batch.num_blocks, device=batch.input_ids.device)
    loss_mask = batch.loss_mask.clone()
    loss_mask[:, 2:] = False  # slot 1's label is the token after slot 0's
    return replace(
        batch,
        teacher=Teacher(last_hidden_state=last.to(batch.input_ids.device)[batch.block_anchor]),
        teacher_index=blocks[:, None].expand_as(batch.teacher_index),
        loss_mask=loss_mask,
    )


def constant_acceptance(batch: MicroBatch, head: OutputHead, *, slots: int = 512) -> float:
    """Acceptance rate at slot 0 of a frozen head that reads nothing: everywhere the teacher's mean distribution.

    A drafter that has learnt anything of its context is accepted more often. On the drafter's vocabulary.
    """
    chosen = batch.loss_mask[:, 0].nonzero()[:slots, 0]
    probs = _log_probs(batch, head, batch.teacher_index[chosen, 0]).exp()
    if head.draft_token_ids is not None:
        probs = probs[:, head.draft_token_ids]
    mean = probs.mean(0)
    return float(torch.minimum(probs, mean / mean.sum().clamp(min=1e-30)).sum(-1).mean())


def _log_probs(batch: MicroBatch, head: OutputHead, rows: Tensor) -> Tensor:
    """The teacher's log-probabilities [M, V]; a sparse teacher's tail is spread evenly."""
    teacher, size = batch.teacher.rows(rows), len(head.weight)
    if teacher.tail_mass is None:
        return full_logits(teacher, head, slice(None), head.buffer(len(rows), size)).log_softmax(-1)
    assert teacher.top_ids is not None
    assert teacher.top_values is not None
    rest = max(1, size - teacher.top_ids.shape[1])
    result = (teacher.tail_mass.float().clamp(min=1e-30) / rest).log()[:, None].repeat(1, size)
    return result.scatter_(1, teacher.top_ids, teacher.top_values.to(result.dtype))


def _lead(differences: Tensor) -> Lead:
    return Lead(mean=float(differences.mean()), error=float(differences.std()) / math.sqrt(len(differences)) + 1e-9)
