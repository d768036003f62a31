"""Curves of a stage: a local log that is always complete, and the trackers of the settings beside it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.tracking import Tracker, TrackerPlan, trackers
from pipelines.tracking.local_log import LocalLog
from storage.files.filesystems import Folder
from storage.files.masking import mask

if TYPE_CHECKING:
    from pipelines.runs.run import Run
    from pipelines.settings import Settings

FINISH_SECONDS = 60.0  # that a stage's end waits for a tracker


def plan_tracking(settings: Settings, run: Run, stage: str) -> TrackerPlan:
    """The plan of one stage of a run."""
    identity, uid = run.identity(stage)[:8], run.uid()
    name = settings.run.directory.rstrip("/").rpartition("/")[2]
    return TrackerPlan(
        stage=stage,
        directory=run.directory.location(),
        log_name=f"logs/{stage}-{identity}.jsonl",
        run_id=f"{stage}-{uid}-{identity}",
        group=f"{name}-{uid}",
        settings=settings.tracking,
        config=settings.to_dict(),
    )


class Curves:
    """Logs numbers by step. Use as a context manager; `say` receives one message about each tracker that fails."""

    def __init__(self, plan: TrackerPlan, say: Callable[[str], None] = lambda text: None) -> None:
        self.plan = plan
        self._say = say
        self._log = LocalLog(Folder(plan.directory), plan.log_name)
        self._open: dict[str, Tracker] = {}
        for name in plan.settings.trackers:
            self._guarded(name, "start", partial(self._start, name))

    def __enter__(self) -> Curves:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._log.close()
        self._each("finish", lambda tracker: _within(FINISH_SECONDS, lambda: tracker.close(failed=kind is not None)))

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Numbers at a step; names such as `train/loss`."""
        self._log.append({"step": step, "time": round(time.time(), 3), **values})
        self._each("log", lambda tracker: tracker.log(values, step))

    def resume_after(self, step: int, done: Iterable[tuple[int, Mapping[str, float]]] = ()) -> None:
        """Work goes on after `step`. `done` holds the numbers of the steps up to there, as `log` would take them.

        What a stopped process logged beyond `step` is dropped, as it will be logged again; what of `done` never reached
        the curves is added.
        """
        kept = [row for row in self._log.rows() if row["step"] is None or row["step"] <= step]
        known = {(row["step"], name) for row in kept for name in row}
        missing: list[dict[str, Any]] = [
            {"step": at, "time": round(time.time(), 3), **values}
            for at, values in done
            if at <= step and any((at, name) not in known for name in values)
        ]
        rows = sorted(kept + missing, key=lambda row: math.inf if row["step"] is None else row["step"])
        self._log.rewrite(rows)

        def send(tracker: Tracker) -> None:
            for row in rows if tracker.replays else missing:
                if row["step"] is not None:
                    numbers = {name: value for name, value in row.items() if name not in ("step", "time")}
                    tracker.log(numbers, row["step"])

        self._each("log", send)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Final figures."""
        self._log.append({"step": None, "time": round(time.time(), 3), "summary": dict(values)})
        self._each("summary", lambda tracker: tracker.summary(values))

    def html(self, name: str, path: str | Path) -> None:
        """A self-contained page, shown with the curves."""
        self._each("report", lambda tracker: tracker.html(name, Path(path)))

    def _start(self, name: str) -> None:
        if (tracker := trackers[name].open(self.plan)) is not None:
            self._open[name] = tracker

    def _each(self, what: str, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            self._guarded(name, what, partial(action, tracker))

    def _guarded(self, name: str, what: str, action: Callable[[], None]) -> None:
        """Tracking must never end a run, whatever its client raises; so this catches everything, and says it once."""
        try:
            action()
        except Exception as error:
            self._open.pop(name, None)
            self._say(
                mask(f"{name} stopped working ({what}: {type(error).__name__}: {error}); the local log ")
                + f"{self.plan.directory}/{self.plan.log_name} goes on"
            )


def _within(seconds: float, action: Callable[[], None]) -> None:
    """Run `action`, but wait no longer than this; raises TimeoutError or what it raised."""
    raised: list[BaseException] = []

    def body() -> None:
        try:
            action()
        except BaseException as error:  # handed on below, in the thread that asked
            raised.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:.0f} s; `wandb sync` can send the rest later")
    if raised:
        raise raised[0]
