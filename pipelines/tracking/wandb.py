"""Weights & Biases: one run a stage, one group a pipeline run.

The run's id follows from the run directory and the stage's identity, so a stage that is taken up again continues its
own curves. Steps are logged as `STAGE/step`, which is the x-axis: W&B's own counter would drop what a resumed stage
logs again. An offline run is a file of one process: a stage that is taken up again writes its earlier steps into the
new file first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipelines.tracking import Tracker, TrackerPlan, trackers

if TYPE_CHECKING:
    from pipelines.settings.schema import WandbMode


def wandb_mode(setting: WandbMode) -> Literal["offline", "online", "disabled"]:
    """`auto` follows WANDB_MODE where it is set, and is online only with a WANDB_API_KEY."""
    if setting != "auto":
        return setting
    known: dict[str, Literal["offline", "online", "disabled"]] = {
        "offline": "offline",
        "online": "online",
        "disabled": "disabled",
    }
    if (asked := os.environ.get("WANDB_MODE", "")) in known:
        return known[asked]
    return "online" if os.environ.get("WANDB_API_KEY") else "offline"


@trackers.register("wandb")
class WandbTracker(Tracker):
    """A W&B run."""

    @classmethod
    def open(cls, plan: TrackerPlan) -> Tracker | None:
        return None if wandb_mode(plan.settings.wandb) == "disabled" else cls(plan)

    def __init__(self, plan: TrackerPlan) -> None:
        import wandb

        from storage.files.filesystems import Folder

        super().__init__(plan)
        mode, folder = wandb_mode(plan.settings.wandb), Folder(plan.directory)
        self.replays = mode == "offline"
        where = folder.local_path("logs") if folder.is_local else Path.cwd()
        where.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=plan.settings.project,
            entity=plan.settings.entity,
            group=plan.group,
            job_type=plan.stage,
            id=plan.run_id,
            name=f"{plan.stage} {plan.group}",
            resume="allow",
            mode=mode,
            dir=str(where),
            tags=list(plan.settings.tags),
            config=dict(plan.config),
            settings=wandb.Settings(silent=True, console="off", init_timeout=30),
        )
        self._run.define_metric(f"{plan.stage}/step")
        self._run.define_metric("*", step_metric=f"{plan.stage}/step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({f"{self.plan.stage}/step": step, **values})

    def summary(self, values: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(values))

    def html(self, name: str, path: Path) -> None:
        import wandb

        self._run.log({name: wandb.Html(path.read_text(encoding="utf-8"))})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
