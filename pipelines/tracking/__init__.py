"""Numbers by step, kept beside a run and sent to trackers: what a tracker is, and the one list of them.

A stage uses `curves`, which keeps the local log and hands every number on. A tracker is a subclass of `Tracker` in one
file, with `@trackers.register("name")` above it; the settings take it by that name (`tracking.trackers`), and `plugins`
names the file where it is not one of these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.registry import Registry

if TYPE_CHECKING:
    from pipelines.settings.schema import TrackingSettings


@dataclass(frozen=True, kw_only=True)
class TrackerPlan:
    """Where a stage's curves go."""

    stage: str
    directory: str  # the run's
    log_name: str  # of the local log, below the run's directory
    run_id: str  # the same when the stage is taken up again
    group: str  # the same for all stages of a run
    settings: TrackingSettings
    config: Mapping[str, Any]  # all settings of the run


class Tracker(ABC):
    """Curves of one stage in one place. Whatever it raises is said once and ends it, never the stage."""

    replays = False  # whether a stage that is taken up again sends the steps before that too

    @classmethod
    def open(cls, plan: TrackerPlan) -> Tracker | None:
        """A tracker of the stage; None where the settings switch it off."""
        return cls(plan)

    def __init__(self, plan: TrackerPlan) -> None:
        self.plan = plan

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Numbers at a step; names such as `train/loss`."""

    def summary(self, values: Mapping[str, Any]) -> None:  # noqa: B027 - not every tracker has a place for them
        """Final figures."""

    def html(self, name: str, path: Path) -> None:  # noqa: B027
        """A self-contained page."""

    def close(self, *, failed: bool) -> None:  # noqa: B027
        """The stage has ended."""


trackers: Registry[type[Tracker]] = Registry(
    "tracker", option="tracking.trackers", modules=["pipelines.tracking.wandb"]
)
