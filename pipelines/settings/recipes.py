"""What a drafter's algorithm sets where a settings file leaves it open; all other defaults are the settings' own.

dspark: the defaults of the settings. dflash: cross-entropy alone. eagle3: one layer, and the cross-entropy to the
target's distribution with each unrolled step weighing 0.8 of the one before. A drafter without a confidence head has no
confidence loss.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.settings.schema import DrafterSettings, LossSettings

EAGLE3_STEP_DECAY = 0.8  # weight of an unrolled step, relative to the one before


def eagle3_position_decay(step_decay: float) -> float:
    """The position decay g with exp(-k/g) = step_decay^k."""
    return -1 / math.log(step_decay)


def eagle3_step_decay(position_decay: float) -> float:
    """Weight of an unrolled step relative to the one before, as an EAGLE-3 checkpoint says it."""
    return round(math.exp(-1 / position_decay), 9)


def with_recipe(values: dict[str, Any]) -> dict[str, Any]:
    """Settings as read, with the algorithm's own values laid under them. What is malformed is left to the check."""
    drafter, train = values.get("drafter") or {}, values.get("train") or {}
    if not isinstance(drafter, dict) or not isinstance(train, dict):
        return values
    loss = train.get("loss") or {}
    if not isinstance(loss, dict):
        return values
    algorithm = drafter.get("algorithm", "dspark")
    parts: dict[str, Any] = {}
    terms: dict[str, Any] = {}
    if algorithm != "dspark" or drafter.get("enable_confidence_head") is False:
        terms["confidence"] = 0.0
    if algorithm == "dflash":
        terms |= {"ce": 1.0, "l1": 0.0}
    if algorithm == "eagle3":
        parts["num_draft_layers"] = 1
        terms |= {"ce": 0.0, "l1": 0.0, "soft_ce": 1.0}
        terms["position_decay"] = eagle3_position_decay(EAGLE3_STEP_DECAY)
    if not parts and not terms:
        return values
    return {**values, "drafter": {**parts, **drafter}, "train": {**train, "loss": {**terms, **loss}}}


def require_fitting_loss(drafter: DrafterSettings, loss: LossSettings) -> None:
    """Raises ValueError for a confidence loss without that head."""
    if loss.confidence and not drafter.has_confidence_head:
        raise ValueError(
            f"train.loss.confidence is {loss.confidence:g}, but the drafter (drafter.algorithm={drafter.algorithm}, "
            f"drafter.enable_confidence_head={str(drafter.enable_confidence_head).lower()}) has no confidence head: "
            "leave it out, or set it to 0"
        )
