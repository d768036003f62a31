"""What a drafter learns: the loss terms, one class each, and how much each counts (equations 8-12 of the DSpark paper).

A term says what a slot's loss is, in terms of what the fused loss knows of that slot; gradients follow by themselves. A
class with `@loss_terms.register("name")` above it is all there is to a term: the settings (`train.loss.name`), training
and the log take it from here, and a file named under `plugins` may add more. No torch here: settings read this.

M slots with a label, N blocks of G slots.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from dspark.registry import Registry, SettingError

if TYPE_CHECKING:
    from torch import Tensor

TINY = 1e-30
NORMALIZER_EPSILON = 1e-6


class SlotValues(NamedTuple):
    """What is known of each slot [M]; zeros for what no term reads.

    With p the draft's and q the teacher's distribution, over the whole vocabulary where the draft's is reduced:
    """

    ce: Tensor  # -log p(label); 0 for a label outside the draft vocabulary
    l1: Tensor  # sum |p - q|, twice the total variation
    kl: Tensor  # sum q log(q / p), q renormalised on the draft vocabulary
    soft_ce: Tensor  # -sum q log p on the draft vocabulary
    acceptance: Tensor  # sum min(p, q), the acceptance rate
    confidence_logits: Tensor  # of the confidence head


class LossTerm(ABC):
    """One term. `value` is differentiated in what the term `reads`; everything else in `slots` is constant to it."""

    reads: ClassVar[tuple[str, ...]]  # fields of SlotValues
    weight: ClassVar[float] = 0.0  # default of the setting `train.loss.NAME`
    options: ClassVar[Mapping[str, float]] = {}  # further settings `train.loss.…`, with their defaults

    def __init__(self, **options: float) -> None:
        for name, value in {**self.options, **options}.items():
            setattr(self, name, value)

    @abstractmethod
    def value(self, slots: SlotValues) -> Tensor:
        """The loss of each slot [M]."""

    @property
    def of_confidence(self) -> bool:
        """Whether it trains the confidence head alone."""
        return set(self.reads) == {"confidence_logits"}


loss_terms: Registry[type[LossTerm]] = Registry("loss term", option="train.loss")


@loss_terms.register("ce")
class CrossEntropy(LossTerm):
    """Cross-entropy to the text."""

    reads = ("ce",)
    weight = 0.1

    def value(self, slots: SlotValues) -> Tensor:
        return slots.ce


@loss_terms.register("l1")
class L1(LossTerm):
    """The raw L1 distance to the teacher."""

    reads = ("l1",)
    weight = 0.9

    def value(self, slots: SlotValues) -> Tensor:
        return slots.l1


@loss_terms.register("kl")
class KL(LossTerm):
    """KL divergence from teacher to draft."""

    reads = ("kl",)

    def value(self, slots: SlotValues) -> Tensor:
        return slots.kl


@loss_terms.register("soft_ce")
class SoftCrossEntropy(LossTerm):
    """Cross-entropy to the teacher, as EAGLE-3 trains: the same as `kl` up to the teacher's entropy."""

    reads = ("soft_ce",)

    def value(self, slots: SlotValues) -> Tensor:
        return slots.soft_ce


@loss_terms.register("negative_log_acceptance")
class NegativeLogAcceptance(LossTerm):
    """-log of the acceptance rate (arXiv 2602.23881)."""

    reads = ("acceptance",)

    def value(self, slots: SlotValues) -> Tensor:
        return -slots.acceptance.log()


@loss_terms.register("lk_hybrid")
class LKHybrid(LossTerm):
    """A blend of KL and total variation, the more the latter the higher the acceptance rate (arXiv 2602.23881)."""

    reads = ("kl", "l1")
    options: ClassVar[Mapping[str, float]] = {"lk_hybrid_decay": 3.0}
    lk_hybrid_decay: float

    def value(self, slots: SlotValues) -> Tensor:
        share = (-self.lk_hybrid_decay * (1 - slots.l1.detach() / 2)).exp()
        return share * slots.kl + (1 - share) * slots.l1 / 2


@loss_terms.register("confidence")
class Confidence(LossTerm):
    """Binary cross-entropy of the confidence head to the acceptance rate."""

    reads = ("confidence_logits",)
    weight = 1.0

    def value(self, slots: SlotValues) -> Tensor:
        logits = slots.confidence_logits
        softplus = logits.clamp(min=0) + (-logits.abs()).exp().log1p()
        return softplus - logits * slots.acceptance


class SlotWeighting(ABC):
    """What a slot weighs, by how likely a draft is to be accepted there; no gradient goes through it.

    With c_i the chance of slot i and c~ = (1 - s) c + s, slot j weighs the sum over ends m >= j of the products of
    c~_1 to c~_m: the expected accepted length that the slot takes part in. The loss is divided by the blocks that have
    a label, never by these weights, which would take the credit away again. Terms that read the confidence alone weigh
    the chance that the slot is reached at all, the product of the acceptance rates before it.
    """

    smoothing: ClassVar[float] = 0.5  # s

    @abstractmethod
    def chance(self, label_probability: Tensor, acceptance: Tensor) -> Tensor:
        """c [N, G], from the draft's probability of the label (0 for one that it cannot draft) and the acceptance
        rate, both [N, G].
        """

    def weights(self, label_probability: Tensor, acceptance: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [N, G] of the terms and of the confidence's; 0 outside the loss mask [N, G], a prefix of each row."""
        smoothed = (1 - self.smoothing) * self.chance(label_probability, acceptance) + self.smoothing
        ends = smoothed.cumprod(-1) * loss_mask
        reached = acceptance.cumprod(-1).roll(1, dims=-1)
        reached[:, 0] = 1
        return ends.flip(-1).cumsum(-1).flip(-1), reached * loss_mask


slot_weightings: Registry[type[SlotWeighting]] = Registry("slot weighting", option="train.loss.slot_weighting")


@slot_weightings.register("d-pace")
class DPace(SlotWeighting):
    """D-PACE (arXiv 2605.18810): the chance is the draft's probability of the label."""

    def chance(self, label_probability: Tensor, acceptance: Tensor) -> Tensor:
        return label_probability


@slot_weightings.register("acceptance")
class ExactAcceptance(SlotWeighting):
    """D-PACE's recurrence on the exact acceptance rate, 1 - TV, as speculators' D-PARD weighs its slots."""

    def chance(self, label_probability: Tensor, acceptance: Tensor) -> Tensor:
        return acceptance


class LossConfig:
    """The terms' weights and options by name, the terms' own defaults where they are left out.

    `position_decay`: slot k (from 0) of a block weighs exp(-k / position_decay), unless a `slot_weighting` is named.
    `soft_ce_warmup_ratio`: the share of training in which soft cross-entropy gives way to the other terms (`at`).
    `chunk_slots`: slots whose logits exist at once; None chooses by vocabulary and device. Raises SettingError for a
    value that cannot work.
    """

    def __init__(
        self,
        *,
        position_decay: float = 4.0,
        slot_weighting: str | None = None,
        soft_ce_warmup_ratio: float = 0.0,
        chunk_slots: int | None = None,
        **settings: float,
    ) -> None:
        values = {**loss_settings(), **settings}
        for name in settings.keys() - loss_settings().keys():
            loss_terms[name]  # raises, and names the nearest
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise _bad(name, value, "finite numbers from 0")
        if not position_decay > 0:
            raise _bad("position_decay", position_decay, "above 0")
        if chunk_slots is not None and not chunk_slots > 0:
            raise _bad("chunk_slots", chunk_slots, "above 0")
        self.position_decay, self.chunk_slots = position_decay, chunk_slots
        self.slot_weighting = None if slot_weighting is None else slot_weightings[slot_weighting]()
        self.soft_ce_warmup_ratio = soft_ce_warmup_ratio
        self.weights = {name: values[name] for name in loss_terms if values[name]}  # of the terms that count
        self.terms = {
            name: loss_terms[name](**{key: values[key] for key in loss_terms[name].options}) for name in self.weights
        }
        for name, term in self.terms.items():
            if unknown := [field for field in term.reads if field not in SlotValues._fields]:
                raise SettingError(
                    f"the loss term {name!r} reads {', '.join(unknown)}, which no slot has; a term is a function of "
                    f"{', '.join(SlotValues._fields)} (option `train.loss.{name}`)"
                )
        self.reads = {name for term in self.terms.values() for name in term.reads}  # in which one is differentiated
        if not self.reads - {"confidence_logits"}:
            raise SettingError(
                "every loss term but the confidence's is 0: the drafter would learn nothing (option `train.loss`)"
            )

    @property
    def needs_teacher(self) -> bool:
        return self.reads != {"ce"} or self.slot_weighting is not None

    def at(self, progress: float) -> LossConfig:
        """The loss at a moment of training, from 0 (its first step) to 1.

        During the first `soft_ce_warmup_ratio` of it the terms' weights rise linearly from 0, and that of soft
        cross-entropy falls to its own from 1 more. Terms that read the confidence alone count from the start.
        """
        left = 1 - progress / self.soft_ce_warmup_ratio if self.soft_ce_warmup_ratio else 0.0
        if left <= 0:
            return self
        terms = {"soft_ce": SoftCrossEntropy(), **self.terms}
        weights = {
            name: self.weights.get(name, 0.0) * (1.0 if term.of_confidence else 1 - left) + left * (name == "soft_ce")
            for name, term in terms.items()
        }
        now = copy(self)
        now.weights = {name: weight for name, weight in weights.items() if weight}
        now.terms = {name: terms[name] for name in now.weights}
        now.reads = {name for term in now.terms.values() for name in term.reads}
        return now

    def total(self, slots: SlotValues, confidence_factor: Tensor | None = None) -> Tensor:
        """Sum of the weighted terms of each slot [M]; those of the confidence times `confidence_factor` [M]."""
        constant = SlotValues(*(value.detach() for value in slots))
        parts = []
        for name, term in self.terms.items():
            read = {field: getattr(slots, field) for field in term.reads}
            value = self.weights[name] * term.value(constant._replace(**read))
            parts.append(value * confidence_factor if term.of_confidence and confidence_factor is not None else value)
        return sum(parts[1:], start=parts[0])


def loss_settings() -> dict[str, float]:
    """The settings of all terms with their defaults: a weight each, and options."""
    found: dict[str, float] = {}
    for name in loss_terms:
        found |= {name: loss_terms[name].weight, **loss_terms[name].options}
    return found


def _bad(name: str, value: Any, allowed: str) -> SettingError:
    return SettingError(f"loss.{name} is {value!r}; allowed: {allowed} (option `train.loss.{name}`)")


def add_sums(total: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    """Key by key; a key missing on one side counts as 0."""
    return {key: total.get(key, 0.0) + more.get(key, 0.0) for key in {**total, **more}}


def metrics_of(sums: dict[str, float]) -> dict[str, float]:
    """Means, by the reference's definitions, of what `fused_loss` sums up.

    The loss is divided by what training divides it by. Its terms and confidence errors are means by the weights of the
    slots' places, `acceptance@k` a mean over the slots that count, and `tau_probabilistic` (expected accepted length,
    with the target's own token) a mean over blocks.
    """
    weight = sums["weight"] + NORMALIZER_EPSILON
    weighted = (*loss_terms, "confidence_abs_error", "confidence_bias", "confidence_cumprod_bias")
    metrics = {key: sums[key] / weight for key in weighted if key in sums}
    if "loss" in sums:
        metrics = {"loss": sums["loss"] / (sums.get("normalizer", sums["weight"]) + NORMALIZER_EPSILON), **metrics}
    metrics["tau_probabilistic"] = sums["tau_probabilistic"] / max(sums["blocks"], 1.0)
    for key, count in sums.items():
        if key.startswith("slots@") and count:
            slot = key.removeprefix("slots@")
            metrics[f"acceptance@{slot}"] = sums[f"acceptance@{slot}"] / count
    return metrics
