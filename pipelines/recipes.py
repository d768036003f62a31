"""What a drafter's algorithm sets where a settings file leaves it open; all other defaults are the settings' own.

dspark: the defaults of the settings. dflash: cross-entropy alone. eagle3: one layer, and the cross-entropy to the
target's distribution with each unrolled step weighing `step_loss_decay` of the one before. A drafter without a
confidence head has no confidence loss.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.drafter_settings import DrafterSettings, LossSettings

STEP_LOSS_DECAY = 0.8


def eagle3_position_decay(step_loss_decay: float) -> float:
    """The position decay g with exp(-k/g) = step_loss_decay^k."""
    return -1 / math.log(step_loss_decay)


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
        decay = drafter.get("step_loss_decay", STEP_LOSS_DECAY)
        if isinstance(decay, float) and 0 < decay < 1:
            terms["position_decay"] = eagle3_position_decay(decay)
    if not parts and not terms:
        return values
    return {**values, "drafter": {**parts, **drafter}, "train": {**train, "loss": {**terms, **loss}}}


def require_fitting_loss(drafter: DrafterSettings, loss: LossSettings) -> None:
    """Raises ValueError for a confidence loss without that head, or a position decay that is not the eagle3 steps'."""
    if loss.confidence and not drafter.has_confidence_head:
        raise ValueError(
            f"train.loss.confidence is {loss.confidence:g}, but the drafter (drafter.algorithm={drafter.algorithm}, "
            f"drafter.enable_confidence_head={str(drafter.enable_confidence_head).lower()}) has no confidence head: "
            "leave it out, or set it to 0"
        )
    steps = eagle3_position_decay(drafter.step_loss_decay)
    if drafter.algorithm == "eagle3" and not math.isclose(loss.position_decay, steps, rel_tol=1e-6):
        raise ValueError(
            f"train.loss.position_decay is {loss.position_decay:g}, but eagle3 weighs its steps by "
            f"drafter.step_loss_decay={drafter.step_loss_decay:g}, which is a position_decay of {steps:.6g}: "
            "leave it out"
        )
