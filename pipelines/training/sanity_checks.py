"""Signs that a training cannot work, before it has cost anything.

1. Nothing, or hardly anything, is supervised.
2. The cache's teacher and its tokens do not belong together.
3. After the first steps the drafter is accepted less often at slot 0 than a frozen head that reads nothing.

(A cache captured for other layers or another target is refused where the contracts are compared.) What must fail raises
ValueError; what may be meant is said once, as a warning in the log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dspark.losses.anchors import eligible_anchors, loss_mask_of
from dspark.losses.teacher_check import Agreement, constant_acceptance, teacher_agreement
from pipelines.errors import UserError

if TYPE_CHECKING:
    from dspark.losses.micro_batch import MicroBatch
    from dspark.losses.output_head import OutputHead
    from pipelines.training.loader import StepPlan

FEWEST_USABLE = 0.5  # share of conversations with an anchor below which something is wrong with the masks
FIRST_STEPS = 50  # after which a drafter has learnt more than a constant


def check_masks(plan: StepPlan) -> list[str]:
    """Warnings. ValueError if no block can start anywhere."""
    rows = plan.rows
    usable = sum(
        len(eligible_anchors(loss_mask_of(spans, length), rule=plan.anchor_rule, first=plan.first_anchor)) > 0
        for spans, length in zip(rows.spans, rows.lengths, strict=True)
    )
    if not usable:
        raise UserError(
            f"none of the {len(rows)} conversations has a position where a block may start: nothing is supervised. "
            "Look at their masks with `dspark cache sample`; a chat template without generation marks, or "
            "cache.max_length shorter than the prompts, leaves all answers out"
        )
    if usable < FEWEST_USABLE * len(rows):
        return [
            f"only {usable} of {len(rows)} conversations have a position where a block may start; the others are "
            "never trained on: look at their masks with `dspark cache sample`"
        ]
    return []


def check_teacher(
    batch: MicroBatch, head: OutputHead, targets_own: Callable[[MicroBatch], MicroBatch] | None = None
) -> list[str]:
    """Warnings. ValueError if the teacher speaks of other tokens than those it stands beside.

    `targets_own` gives the batch with what the target itself thinks at the anchors (`teacher_check.with_own_teacher`).
    It is asked only where something looks wrong: an untrained target, say, repeats what it has read.
    """
    found = teacher_agreement(batch, head)
    if found is None:
        return []
    if (fault := _fault(found)) is not None:
        own = None if targets_own is None else teacher_agreement(targets_own(batch), head)
        its_fault = None if own is None else _fault(own)
        if its_fault is None or its_fault[0] != fault[0]:
            raise UserError(fault[1])
        return []
    if not found.over_other.positive:
        return [
            "the cache's teacher gives the text's own tokens no more probability than others of it (by "
            f"{found.over_other.mean:.3f} +- {found.over_other.error:.3f} nats): was it built for this text and target?"
        ]
    return []


def _fault(found: Agreement) -> tuple[str, str] | None:
    """What is wrong with a teacher that agrees so with its text, and its message; None if nothing is."""
    for place, lead in (("before", found.over_previous), ("after", found.over_next)):
        if lead.negative and -lead.mean > found.over_other.mean:
            return place, (
                f"the cache's teacher gives the token {place} the one that it should predict {-lead.mean:.2f} nats "
                "more than that one: states and tokens are out of step by a position; build the cache again"
            )
    if found.over_other.negative:
        return "other", (
            f"the cache's teacher gives the text's tokens {-found.over_other.mean:.2f} nats less than tokens taken "
            "from elsewhere in it: its states are of another text or another target; build the cache again"
        )
    return None


class SanityChecks:
    """Looks for all of them, from one rank, before step `first` and at the lines of the log, `first_line` the first."""

    def __init__(
        self,
        plan: StepPlan,
        batch: MicroBatch,
        head: OutputHead,
        targets_own: Callable[[MicroBatch], MicroBatch] | None = None,
        *,
        warmup_steps: int,
        first: int,
        first_line: int,
    ) -> None:
        found = [*check_masks(plan), *check_teacher(batch, head, targets_own)]
        self._found = found if first < first_line else []
        self.baseline = constant_acceptance(batch, head)
        self._due = max(FIRST_STEPS, 2 * warmup_steps)
        self._compared = first >= self._due

    def at(self, step: int, acceptance: float | None) -> list[str]:
        """Warnings for the line of the log after so many steps, with the acceptance rate at slot 0 that it tells."""
        found, self._found = self._found, []
        return found + self._compare(step, acceptance)

    def _compare(self, step: int, acceptance: float | None) -> list[str]:
        if self._compared or step < self._due or acceptance is None:
            return []
        self._compared = True
        if acceptance >= self.baseline:
            return []
        return [
            f"after {step} steps slot 0 is accepted at a rate of {acceptance:.3f}; the same draft distribution "
            f"everywhere would reach {self.baseline:.3f}. Training that works is above that by now: check "
            "train.learning_rate, the captured layers, and that the drafter's embedding and head are the target's"
        ]
