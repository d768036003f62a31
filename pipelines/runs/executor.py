"""Doing the stages of a run that are not done yet, one after the other."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.progress import flatten
from pipelines.runs.graph import Stage
from pipelines.runs.preflight import check_start, require_room, stages_left
from pipelines.runs.run import Run
from pipelines.tracking.curves import Curves, plan_tracking
from pipelines.workers import session

if TYPE_CHECKING:
    from pipelines.progress import Reporter
    from pipelines.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one stage: `done`, or `skipped` because it was complete."""

    stage: str
    state: str
    identity: str
    seconds: float
    output: str
    result: dict[str, Any]


def run_stages(
    settings: Settings,
    reporter: Reporter,
    *,
    only: Sequence[str] | None = None,
    redo: bool = False,
    stages: dict[str, Stage] | None = None,
    provenance: dict[str, Any] | None = None,
) -> list[Outcome]:
    """Do the stages (all of them, or `only` these, whose inputs must then be complete) that are not done yet.

    Raises UserError when another process holds the run, or an output was made with other settings and `redo` is off.
    """
    run = Run(settings, stages=stages)
    names = [name for name in run.stages if only is None or name in only]
    outcomes = []
    known = run.directory.exists("run.lock")
    if not known:
        check_start(run, names, redo=redo)  # before the lock: what is refused here leaves no folder behind
    with run.directory.lock(), ExitStack() as shared:
        if known:
            check_start(run, names, redo=redo)
        run.write_summary(provenance)
        for name in names:
            for needed in run.stages[name].inputs:
                run.require(needed, needed_by=name)
            left = stages_left(run, names[names.index(name) :])
            outcomes.append(_do(run, name, left, reporter, shared, redo=redo))
            run.write_summary()
        run.directory.remove_leftovers()
    return outcomes


def _do(run: Run, name: str, left: Sequence[str], reporter: Reporter, shared: ExitStack, *, redo: bool) -> Outcome:
    started = time.monotonic()
    has_work = run.prepare(name, redo=redo)
    if has_work:
        if run.stages[name].on_ray:
            # One Ray session for all the stages that are left: each stage's own then joins it.
            shared.enter_context(session(run.settings, run.directory.location()))
            require_room(run.settings, left)
        with reporter.stage(name), Curves(plan_tracking(run.settings, run, name), reporter.say) as run.tracker:
            result = run.stages[name].load().execute(run.settings, run, reporter) or {}
            assert run.tracker is not None
            run.tracker.summary(_numbers(result))
        run.tracker = None
        run.finish(name, seconds=time.monotonic() - started, result=result)
    else:
        reporter.say(f"{name}: done already, in {run.location(name)}")
    return Outcome(
        stage=name,
        state="done" if has_work else "skipped",
        identity=run.identity(name),
        seconds=round(time.monotonic() - started, 3) if has_work else 0.0,
        output=run.location(name),
        result=run.result(name),
    )


def _numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a stage's result, nested names joined."""
    leaves = flatten(result, "/")
    return {name: value for name, value in leaves if isinstance(value, int | float) and not isinstance(value, bool)}
