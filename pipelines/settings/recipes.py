"""What a drafter's algorithm sets where a settings file leaves it open; all other defaults are the settings' own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspark.config import DrafterConfig
from dspark.registry import algorithms

if TYPE_CHECKING:
    from pipelines.settings.schema import DrafterSettings, LossSettings


def with_recipe(values: dict[str, Any]) -> dict[str, Any]:
    """Settings as read, with the algorithm's own values laid under them; no confidence loss without that head.

    What is malformed is left to the check.
    """
    drafter, train = values.get("drafter") or {}, values.get("train") or {}
    loss = (train.get("loss") or {}) if isinstance(train, dict) else None
    if not isinstance(drafter, dict) or not isinstance(loss, dict):
        return values
    name = drafter.get("algorithm", DrafterConfig.algorithm)
    if name not in algorithms:
        return values
    algorithm = algorithms[name]
    terms = dict(algorithm.loss)
    if algorithm.fixed.get("enable_confidence_head", drafter.get("enable_confidence_head")) is False:
        terms.setdefault("confidence", 0.0)
    if not algorithm.settings and not terms:
        return values
    return {**values, "drafter": {**algorithm.settings, **drafter}, "train": {**train, "loss": {**terms, **loss}}}


def require_fitting_loss(drafter: DrafterSettings, loss: LossSettings) -> None:
    """Raises ValueError for a loss term that reads a confidence head which the drafter has not."""
    config = loss.config
    for name, term in config.terms.items():
        if "confidence_logits" in term.reads and not drafter.has_confidence_head:
            raise ValueError(
                f"train.loss.{name} is {config.weights[name]:g}, but the drafter (drafter.algorithm="
                f"{drafter.algorithm}, drafter.enable_confidence_head={str(drafter.enable_confidence_head).lower()}) "
                "has no confidence head: leave it out, or set it to 0"
            )
