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
    parts = published_parts(folder)
    words = [f"{name}={json.dumps(value)}" for name, value in parts.items()]
    words += [
        f"drafter.initial_weights={json.dumps(str(folder))}",
        f"evaluate.baselines={json.dumps({'baseline': str(folder)})}",
    ]
    settings = load_settings(config, [*words, *overrides])
    _require_same_target(settings, folder)
    return settings


def published_parts(folder: Path) -> dict[str, Any]:
    """The settings, by dotted name, that a published folder's drafter was made with."""
    from dspark.config import DrafterConfig

    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} is not a published drafter: there is no config.json in it")
    found = DrafterConfig.from_checkpoint(json.loads(path.read_text()))
    parts = {name: getattr(found, name) for name in DrafterSettings.model_fields if hasattr(found, name)}
    if parts["markov_head_type"] is None:  # of a drafter without that head
        del parts["markov_head_type"]
    values = {f"drafter.{name}": value for name, value in parts.items()}
    if found.position_decay is not None:
        values["train.loss.position_decay"] = found.position_decay
    return values


def _require_same_target(settings: Settings, folder: Path) -> None:
    """The stages compare the whole contract; this catches the common mistake before any work."""
    from pipelines.target_facts import examine_target

    path = folder / "contract.json"
    if not path.is_file():
        return
    theirs = json.loads(path.read_text())
    if theirs["target_name"] == settings.target.model:
        return
    if theirs.get("weights_sha256") != examine_target(settings).hashes["weights_sha256"]:
        raise UserError(
            f"the drafter in {folder} is for the target {theirs['target_name']!r}, and target.model "
            f"{settings.target.model!r} has other weights; a drafter can only be refitted for its own target"
        )
