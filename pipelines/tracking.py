"""Curves of a stage: a local log that is complete whatever the network does, and a Weights & Biases run beside it.

One W&B run a stage, one group a pipeline run. The run's id follows from the run directory and the stage's identity, so
a stage that is taken up again continues its own curves. Steps are logged as `STAGE/step`, which is the x-axis: W&B's
own counter would drop what a resumed stage logs again. An offline W&B run is a file of one process: a stage that is
taken up again writes its earlier steps into the new file first. Whatever W&B does, the stage goes on: a failure is said
once, and the local log keeps everything.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from storage.files.filesystems import Folder

if TYPE_CHECKING:
    from pipelines.runs.run import Run
    from pipelines.settings import Settings

WandbMode = Literal["offline", "online", "disabled"]
REMOTE_SECONDS = 30.0  # between two uploads of a log that lies on an object store
FINISH_SECONDS = 60.0  # that a run's end waits for W&B


@dataclass(frozen=True, kw_only=True)
class TrackerPlan:
    """Where a stage's curves go. Picklable: a worker may open it."""

    stage: str
    directory: str  # the run's
    log_name: str  # below the run's directory
    run_id: str
    group: str
    mode: WandbMode
    project: str
    entity: str | None
    tags: tuple[str, ...]
    config: Mapping[str, Any] = field(default_factory=dict)


def plan_tracking(settings: Settings, run: Run, stage: str) -> TrackerPlan:
    """The plan of one stage of a run."""
    wanted, identity, uid = settings.tracking, run.identity(stage)[:8], run.uid()
    name = settings.run.directory.rstrip("/").rpartition("/")[2]
    return TrackerPlan(
        stage=stage,
        directory=run.directory.location(),
        log_name=f"logs/{stage}-{identity}.jsonl",
        run_id=f"{stage}-{uid}-{identity}",
        group=f"{name}-{uid}",
        mode=wandb_mode(wanted.wandb),
        project=wanted.project,
        entity=wanted.entity,
        tags=wanted.tags,
        config=settings.to_dict(),
    )


def wandb_mode(setting: Literal["auto", "offline", "online", "disabled"]) -> WandbMode:
    """`auto` follows WANDB_MODE where it is set, and is online only with a WANDB_API_KEY."""
    if setting != "auto":
        return setting
    known: dict[str, WandbMode] = {"offline": "offline", "online": "online", "disabled": "disabled"}
    asked = os.environ.get("WANDB_MODE", "")
    if asked in known:
        return known[asked]
    return "online" if os.environ.get("WANDB_API_KEY") else "offline"


class Tracker:
    """Logs numbers by step. Use as a context manager; `say` receives the one message about a W&B failure."""

    def __init__(self, plan: TrackerPlan, say: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self._say = say or (lambda text: None)
        self._log = _LocalLog(Folder(plan.directory), plan.log_name)
        self._wandb: Any = None
        if plan.mode != "disabled":
            self._guarded("start", self._start)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Numbers at a step; names such as `train/loss`."""
        self._log.append({"step": step, "time": round(time.time(), 3), **values})
        self._send(step, values)

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
        for row in rows if self.plan.mode == "offline" else missing:
            if row["step"] is not None:
                numbers = {name: value for name, value in row.items() if name not in ("step", "time")}
                self._send(row["step"], numbers)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Final figures."""
        self._log.append({"step": None, "time": round(time.time(), 3), "summary": dict(values)})
        self._guarded("summary", lambda wandb: wandb.summary.update(dict(values)))

    def artifact(self, path: str | Path, kind: str) -> None:
        """A file or folder, kept as a W&B artifact of this kind (`model`, `dataset`, `report`)."""

        def send(run: Any) -> None:
            import wandb

            artifact = wandb.Artifact(f"{self.plan.group}-{self.plan.stage}", type=kind)
            (artifact.add_dir if Path(path).is_dir() else artifact.add_file)(str(path))
            run.log_artifact(artifact)

        self._guarded("artifact", send)

    def html(self, name: str, path: str | Path) -> None:
        """A self-contained page, shown in the run."""

        def send(run: Any) -> None:
            import wandb

            run.log({name: wandb.Html(Path(path).read_text(encoding="utf-8"))})

        self._guarded("report", send)

    def close(self, *, failed: bool = False) -> None:
        self._log.close()
        self._guarded("finish", lambda run: _within(FINISH_SECONDS, lambda: run.finish(exit_code=int(failed))))
        self._wandb = None

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        self._guarded("log", lambda run: run.log({f"{self.plan.stage}/step": step, **values}))

    def _start(self, _: Any) -> None:
        import wandb

        plan, folder = self.plan, Folder(self.plan.directory)
        where = folder.local_path("logs") if folder.is_local else Path.cwd()
        where.mkdir(parents=True, exist_ok=True)
        self._wandb = wandb.init(
            project=plan.project,
            entity=plan.entity,
            group=plan.group,
            job_type=plan.stage,
            id=plan.run_id,
            name=f"{plan.stage} {plan.group}",
            resume="allow",
            mode=plan.mode,
            dir=str(where),
            tags=list(plan.tags),
            config=dict(plan.config),
            settings=wandb.Settings(silent=True, console="off", init_timeout=30),
        )
        self._wandb.define_metric(f"{plan.stage}/step")
        self._wandb.define_metric("*", step_metric=f"{plan.stage}/step")

    def _guarded(self, what: str, action: Callable[[Any], None]) -> None:
        """Tracking must never end a run, whatever its client raises; so this catches everything, and says it once."""
        if self._wandb is None and what != "start":
            return
        try:
            action(self._wandb)
        except Exception as error:
            self._wandb = None
            self._say(
                f"W&B stopped working ({what}: {type(error).__name__}: {error}); the local log "
                f"{self.plan.directory}/{self.plan.log_name} goes on"
            )


def read_log(directory: str, log_name: str) -> list[dict[str, Any]]:
    """The rows of a local log, in order."""
    folder = Folder(directory)
    return parse_rows(folder.read(log_name)) if folder.exists(log_name) else []


def parse_rows(data: bytes) -> list[dict[str, Any]]:
    """The rows of JSON lines, each with a `step` that is a whole number or null; damaged lines are left out."""
    rows = []
    for line in data.decode(errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and (row.setdefault("step", None) is None or type(row["step"]) is int):
            rows.append(row)
    return rows


class _LocalLog:
    """Rows of JSON, one a line; appended on a local disk, rewritten now and then on an object store."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder, self._name = folder, name
        self.rewrite(parse_rows(folder.read(name)) if folder.exists(name) else [])

    def append(self, row: Mapping[str, Any]) -> None:
        plain = {key: _plain(value) for key, value in row.items()}
        if self._folder.is_local:
            with open(self._folder.local_path(self._name), "a", encoding="utf-8") as file:
                file.write(json.dumps(plain) + "\n")
            return
        self._rows.append(plain)
        if time.monotonic() - self._written > REMOTE_SECONDS:
            self.rewrite(self._rows)

    def rows(self) -> list[dict[str, Any]]:
        return parse_rows(self._folder.read(self._name)) if self._folder.is_local else self._rows

    def rewrite(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self._folder.write(self._name, "".join(json.dumps(row) + "\n" for row in rows).encode())
        self._written = time.monotonic()

    def close(self) -> None:
        if not self._folder.is_local:
            self.rewrite(self._rows)


def _plain(value: Any) -> Any:
    """JSON has no NaN: a number that is not finite becomes its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


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
