"""The stage graph: what a run is made of, and what each stage reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from pipelines.progress import Reporter
    from pipelines.runs.run import Run
    from pipelines.settings import Settings


class StageModule(Protocol):
    """What a module in `pipelines/stages/` offers."""

    def identity(self, settings: Settings, run: Run) -> dict[str, Any]:
        """JSON-like fields that the output's content depends on, its inputs' identities apart."""

    def execute(self, settings: Settings, run: Run, reporter: Reporter) -> dict[str, Any] | None:
        """Make the output, going on with what is there; returns figures to keep in the stage's record."""

    # A module may also have `check(settings)`, which raises before anything starts what could not work later.


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of the pipeline; `inputs` are the stages whose outputs it reads."""

    name: str
    module: str
    output: str
    inputs: tuple[str, ...] = ()
    on_ray: bool = False
    drafter: str | None = None  # the folder in the run, with a manifest, that holds the drafter which the stage makes

    def load(self) -> StageModule:
        return cast(StageModule, import_module(self.module))


STAGES = {
    stage.name: stage
    for stage in (
        Stage(name="regenerate", module="pipelines.stages.regenerate", output="conversations", on_ray=True),
        Stage(name="cache", module="pipelines.stages.build_cache", output="cache", inputs=("regenerate",), on_ray=True),
        Stage(
            name="train",
            module="pipelines.stages.train",
            output="checkpoints",
            inputs=("cache",),
            on_ray=True,
            drafter="checkpoints/final",
        ),
        Stage(
            name="calibrate",
            module="pipelines.stages.calibrate",
            output="calibration",
            inputs=("train",),
            on_ray=True,
        ),
        Stage(
            name="evaluate",
            module="pipelines.stages.evaluate",
            output="evaluation",
            inputs=("train", "calibrate"),
            on_ray=True,
        ),
        Stage(
            name="report",
            module="pipelines.stages.report",
            output="report",
            inputs=("regenerate", "cache", "train", "calibrate", "evaluate"),
        ),
        Stage(
            name="publish",
            module="pipelines.stages.publish",
            output="published",
            drafter="published",
            inputs=("train", "calibrate", "evaluate", "report"),
        ),
    )
}


PILOT = Stage(name="pilot", module="pipelines.stages.pilot", output="pilot", inputs=("regenerate",), on_ray=True)


def stages_of(settings: Settings) -> dict[str, Stage]:
    """The stages of a run with these settings: with a pilot before the cache where the cache asks for one."""
    if not settings.cache.needs_pilot:
        return STAGES
    cache = STAGES["cache"]
    changed = {"pilot": PILOT, "cache": replace(cache, inputs=(*cache.inputs, "pilot"))}
    return {"regenerate": STAGES["regenerate"], **changed, **{k: v for k, v in STAGES.items() if k not in changed}}
