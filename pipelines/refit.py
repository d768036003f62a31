"""`dspark refit CONFIG --from FOLDER`: a published drafter fitted to other prompts or another thinking mode.

1. The drafter's parts are taken from the published folder, so that its weights fit; a setting given explicitly wins.
2. Training starts from its weights, calibration is done anew.
3. The old drafter is decoded beside the new one, on the same prompts, as `baseline`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark.config import DrafterConfig
from pipelines.drafter_folder import published_config
from pipelines.errors import UserError
from pipelines.settings import Settings, load_settings
from pipelines.settings.schema import DrafterSettings


def refit_settings(config: str, overrides: Sequence[str], published: str | None) -> Settings:
    """The settings of a refit. Raises UserError when there is no published drafter, or it is for another target."""
    asked = load_settings(config, overrides)
    start = published or asked.drafter.initial_weights
    if start in ("random", "target"):
        raise UserError(
            "a refit starts from a published drafter: add --from FOLDER, or set drafter.initial_weights to it"
        )
    folder = Path(start).expanduser()
    parts = published_parts(published_config(folder, asked, "--from" if published else "drafter.initial_weights"))
    words = [f"{name}={json.dumps(value)}" for name, value in parts.items()]
    words += [
        f"drafter.initial_weights={json.dumps(str(folder))}",
        f"evaluate.baselines={json.dumps({'baseline': str(folder)})}",
    ]
    return load_settings(config, [*words, *overrides])


def published_parts(found: DrafterConfig) -> dict[str, Any]:
    """The settings, by dotted name, that a published drafter was made with."""
    parts = {name: getattr(found, name) for name in DrafterSettings.model_fields if hasattr(found, name)}
    if parts["markov_head_type"] is None:  # of a drafter without that head
        del parts["markov_head_type"]
    values = {f"drafter.{name}": value for name, value in parts.items()}
    if found.position_decay is not None:
        values["train.loss.position_decay"] = found.position_decay
    return values
