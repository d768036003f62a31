"""A run directory seen through its settings: what is done already, and what has to be done.

A stage's identity is a hash over everything that its output depends on, the identities of its inputs included. It is
recorded in `stages/NAME.json`, beside the output. For each stage, in order:

1. compute the identity that the settings ask for (no work is done for that);
2. the output has it and is complete: skip; it has it and is not complete: go on with it;
3. the output has another identity: refuse, with the difference field by field, unless `redo` was asked for, which moves
   the old output to `replaced/` (and takes a matching one back from there). Nothing is overwritten or deleted.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from dspark.manifest import MANIFEST, CheckpointError, require_intact
from pipelines.drafter_folder import remade
from pipelines.errors import UserError
from pipelines.records import RunRecord, StageRecord
from pipelines.runs.directory import RunDirectory
from pipelines.runs.graph import Stage, stages_of
from pipelines.settings import check_settings, load_settings
from pipelines.settings.errors import refuse_older_run
from pipelines.settings.yaml import Document, apply_overrides
from storage.identity import differences, identity_of, plain

if TYPE_CHECKING:
    from pipelines.settings import Settings
    from pipelines.tracking.curves import Curves


class Run:
    """A run directory seen through its settings: where outputs are, and which identity each should have."""

    def __init__(self, settings: Settings, *, stages: dict[str, Stage] | None = None) -> None:
        self.directory = RunDirectory(settings.run.directory)
        self.settings = settings = self._with_render_time(settings)
        self.stages = stages_of(settings) if stages is None else stages
        self._fields: dict[str, dict[str, Any]] = {}
        self.tracker: Curves | None = None  # of the stage that is being done

    def _with_render_time(self, settings: Settings) -> Settings:
        """The settings with one time for all prompts: theirs, or when the run first began."""
        if settings.data.render_time is not None:
            return settings
        before = (self.summary().get("settings") or {}).get("data") or {}
        try:
            time = datetime.fromisoformat(before.get("render_time") or datetime.now().isoformat(timespec="seconds"))
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{self.directory.location('run.json')}: data.render_time is no time ({error})") from None
        data = settings.data.model_copy(update={"render_time": time})
        return settings.model_copy(update={"data": data})

    def summary(self) -> dict[str, Any]:
        """What `run.json` says; nothing where there is none yet."""
        return self.directory.read_json("run.json", RunRecord) or {}

    def location(self, stage: str) -> str:
        """Path or URL of a stage's output folder."""
        return self.directory.location(self.stages[stage].output)

    def fields(self, stage: str) -> dict[str, Any]:
        """Everything the stage's output depends on under these settings, as JSON values."""
        if stage not in self._fields:
            description = self.stages[stage]
            inputs = {name: self.identity(name) for name in description.inputs}
            own = description.load().identity(self.settings, self)
            self._fields[stage] = cast(dict[str, Any], plain({"stage": stage, "inputs": inputs, **own}))
        return self._fields[stage]

    def identity(self, stage: str) -> str:
        return identity_of(self.fields(stage))

    def record(self, stage: str) -> dict[str, Any] | None:
        """What is known of a stage's output; None where there is no output."""
        record = self.directory.read_json(_record_name(stage), StageRecord)
        if record is None or self.directory.is_empty(self.stages[stage].output):
            return None
        drafter = self.stages[stage].drafter
        there = drafter is None or self.directory.exists(f"{drafter}/{MANIFEST}")
        return {**record, "complete": record["complete"] and there}

    def is_complete(self, stage: str) -> bool:
        """Whether the output is there, whole, and made with these settings."""
        record = self.record(stage)
        return record is not None and record["complete"] and record["identity"] == self.identity(stage)

    def result(self, stage: str) -> dict[str, Any]:
        """The figures that a complete stage left. Raises UserError if it is not complete."""
        self.require(stage)
        record = self.record(stage)
        assert record is not None
        return cast(dict[str, Any], record["result"])

    def require(self, stage: str, needed_by: str = "this") -> None:
        """Raises UserError unless the stage's output is complete with these settings' identity."""
        record = self.record(stage)
        if record is None or not record["complete"]:
            state = "is not there yet" if record is None else "is not complete"
            raise UserError(f"{needed_by} needs {self.location(stage)}, which {state}; run `dspark {stage}` first")
        if record["identity"] != self.identity(stage):
            raise UserError(self._mismatch(stage, record))

    def _mismatch(self, stage: str, record: dict[str, Any]) -> str:
        return "\n".join(
            [
                f"{self.location(stage)} was made with other settings:",
                *describe_differences(self.fields(stage), record["fields"], self.stages),
                "Go back to those settings, set another run.directory, or add --redo: it moves the old output to "
                f"{self.directory.location('replaced')} and makes it anew, with all that depends on it.",
            ]
        )

    def refuse_other_identities(self, stages: Sequence[str]) -> None:
        """Raises UserError for the first of these whose output is there and was made with other settings."""
        summary = self.summary()
        refuse_older_run(summary.get("settings", {}), self.directory.location("run.json"))
        for stage in stages:
            record = self.record(stage)
            if record is not None and record["identity"] != self.identity(stage):
                raise UserError(self._mismatch(stage, record))

    def refuse_foreign_files(self, stages: Sequence[str]) -> None:
        """Raises UserError for the first of these whose place holds files of unknown origin."""
        for stage in stages:
            if self.record(stage) is None and not self.directory.is_empty(self.stages[stage].output):
                raise UserError(
                    f"{self.location(stage)} holds files, but no {_record_name(stage)} says what they are; move them "
                    "away or set another run.directory"
                )

    def refuse_damaged(self, stages: Sequence[str]) -> None:
        """Raises UserError for the first of these whose drafter is complete and has a file that was changed since."""
        for stage in stages:
            drafter, record = self.stages[stage].drafter, self.record(stage)
            if drafter is None or record is None or not record["complete"]:
                continue
            folder = self.directory.path(drafter)
            try:
                require_intact(folder, cure=remade(folder))
            except CheckpointError as error:
                raise UserError(str(error)) from error

    def prepare(self, stage: str, *, redo: bool) -> bool:
        """Make the output's place ready; True if the stage still has work to do. Raises UserError on a mismatch."""
        if not redo:
            self.refuse_other_identities([stage])
        self.refuse_foreign_files([stage])
        record = self.record(stage)
        if record is not None and record["identity"] != self.identity(stage):
            self._set_aside(stage, record)
            record = None
        if record is None and redo:
            self._bring_back(stage)
            record = self.record(stage)
        if record is None:
            self.reopen(stage)
        return record is None or not record["complete"]

    # A stop between the steps of these two loses nothing: an output never stands under another one's record, and an
    # output that is complete but recorded as incomplete is only checked by its stage once more.

    def _set_aside(self, stage: str, record: dict[str, Any]) -> None:
        kept = _kept_name(stage, record["identity"])
        if self.directory.exists(kept):
            kept += time.strftime("-%Y%m%d-%H%M%S")
        self.directory.move(self.stages[stage].output, f"{kept}/output")
        self.directory.move(_record_name(stage), f"{kept}/stage.json")

    def _bring_back(self, stage: str) -> None:
        kept = _kept_name(stage, self.identity(stage))
        record = self.directory.read_json(f"{kept}/stage.json", StageRecord)
        if record is None or record["identity"] != self.identity(stage) or self.directory.is_empty(f"{kept}/output"):
            return
        self.directory.write_json(_record_name(stage), {**record, "complete": False})
        self.directory.move(f"{kept}/output", self.stages[stage].output)
        self.directory.move(f"{kept}/stage.json", _record_name(stage))

    def finish(self, stage: str, *, seconds: float, result: dict[str, Any]) -> None:
        """Mark the output as complete."""
        self._write_record(stage, complete=True, seconds=seconds, result=result)

    def reopen(self, stage: str) -> None:
        """Mark the output as incomplete: the stage goes on with it when it is next asked for."""
        self._write_record(stage, complete=False, seconds=0.0, result={})

    def _write_record(self, stage: str, *, complete: bool, seconds: float, result: dict[str, Any]) -> None:
        self.directory.write_json(
            _record_name(stage),
            {
                "stage": stage,
                "identity": self.identity(stage),
                "complete": complete,
                "seconds": round(seconds, 3),
                "result": result,
                "fields": self.fields(stage),
            },
        )

    def uid(self) -> str:
        """Eight hex digits that tell this run directory from any other; drawn once and kept in `run.json`."""
        if not self.summary():
            self.write_summary()
        return str(self.summary()["uid"])

    def write_summary(self, provenance: dict[str, Any] | None = None) -> None:
        """Write `run.json`: settings as resolved, provenance of each invocation, and the state of every stage."""
        before = self.summary()
        invocations = before.get("invocations", [])
        if provenance is not None:
            invocations = [*invocations, provenance][-20:]
        states = {}
        for name in self.stages:
            record = self.record(name)
            if record is not None:
                states[name] = {key: record[key] for key in ("identity", "complete", "seconds", "result")}
        self.directory.write_json(
            "run.json",
            {
                "uid": before.get("uid") or secrets.token_hex(4),
                "settings": self.settings.to_dict(),
                "stages": states,
                "invocations": invocations,
            },
        )


def _record_name(stage: str) -> str:
    return f"stages/{stage}.json"


def _kept_name(stage: str, identity: str) -> str:
    return f"replaced/{stage}-{identity[:8]}"


def open_run(directory: str, overrides: Sequence[str] = ()) -> Run:
    """The run that stands in a directory, with its last settings and `key=value` words over them."""
    there = RunDirectory(directory)
    summary = there.read_json("run.json", RunRecord)
    if summary is None:
        raise UserError(f"{directory} is not a run directory: there is no run.json in it")
    refuse_older_run(summary["settings"], there.location("run.json"))
    values = {**summary["settings"], "run": {**(summary["settings"].get("run") or {}), "directory": directory}}
    document = Document(values, source=there.location("run.json"))
    apply_overrides(document, overrides)
    return Run(check_settings(document))


def settings_of(place: str, overrides: Sequence[str]) -> Settings:
    """Settings out of a file, or those of the run that stands in a directory."""
    if RunDirectory(place).exists("run.json"):
        return open_run(place, overrides).settings
    return load_settings(place, overrides)


def describe_differences(asked: dict[str, Any], stored: dict[str, Any], stages: dict[str, Stage]) -> list[str]:
    """A line a field: what the settings ask for and what the output was made with."""
    lines = []
    for path, ours, theirs in differences(asked, stored):
        if path.startswith("inputs.") and path.removeprefix("inputs.") in stages:
            lines.append(
                f"  {path}: the output of `{path.removeprefix('inputs.')}` that it was made from is another one"
            )
        else:
            lines.append(f"  {path}: these settings say {ours!r}, it was made with {theirs!r}")
    return lines
