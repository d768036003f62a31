"""Make the report: every figure from the recorded rounds.

1. Gather events, stopwatch records, training log, cache figures, conversations and provenance.
2. Derive the figures (`pipelines.reporting`).
3. Write `report.json`, `report.md` and `index.html`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.calibration import slot_calibration
from dspark.decoding.step_costs import StepCosts
from dspark.decoding.target import open_tokenizer
from dspark.models.checkpoint import read_config
from pipelines.drafter_folder import remade
from pipelines.evaluation.round_log import COMPLETIONS, EVENTS, read_completions, read_events
from pipelines.evaluation.serving import serving
from pipelines.records import Timings, read_record
from pipelines.reporting.report import (
    SCHEMA,
    ReportInputs,
    build_report,
    conversation_summary,
    decoder_of,
    write_report,
)
from pipelines.settings import Settings
from pipelines.stages.calibrate import read_calibration
from pipelines.stages.decoding import read_split
from pipelines.stages.evaluate import TIMINGS
from pipelines.stages.regenerate import read_conversations
from pipelines.stages.serving import FOLDER
from pipelines.stages.step_costs import read_step_costs, serving_temperature
from pipelines.target_spec import resolve_target
from pipelines.training.log import training_rows
from storage.cache.target_cache import TargetCache
from storage.files.filesystems import Folder

if TYPE_CHECKING:
    from pipelines.progress import Reporter
    from pipelines.runs.run import Run


def identity(settings: Settings, run: Run) -> dict[str, Any]:
    """A report depends on its inputs alone, and on the layout of the page."""
    return {"schema": SCHEMA}


def execute(settings: Settings, run: Run, reporter: Reporter) -> dict[str, Any]:
    """Make `report/`."""
    spec = resolve_target(settings)
    evaluation, conversations = Folder(run.location("evaluate")), Folder(run.location("regenerate"))
    final = Path(run.location("train"), "final")
    tokenizer = open_tokenizer(spec.path, trust_remote_code=settings.target.trust_remote_code)
    config = read_config(final, needs_manifest=True, cure=remade(final))
    summary = run.summary()
    invocations = summary.get("invocations") or [{}]
    prompts = read_split(Path(run.location("regenerate"), "evaluation.jsonl"), "evaluation")
    calibration = read_calibration(run)
    parts = ("algorithm", "block_size", "markov_head_type", "markov_rank", "target_layer_ids")
    cure = f"remove {evaluation} and run the same command again, which evaluates anew"
    report = build_report(
        ReportInputs(
            title=f"{settings.drafter.algorithm} drafter for {spec.name.split('/')[-1].split(':')[-1]}",
            events=read_events(evaluation.full(EVENTS)),
            completions=read_completions(evaluation.full(COMPLETIONS)),
            target={"name": spec.name, "revision": spec.revision},
            drafter={key: getattr(config, key) for key in parts} | {"num_hidden_layers": config.num_draft_layers},
            contract=spec.contract(settings, with_block=True),
            calibration=calibration,
            training=training_rows(Path(run.location("train"))),
            cache=TargetCache.open(run.location("cache")).info(),
            conversations=conversation_summary(read_conversations(conversations)),
            serving=_serving(settings, evaluation, calibration),
            timings=read_record(evaluation, TIMINGS, Timings, cure).model_dump()["timings"],
            prompts={prompt.prompt_id: prompt.question for prompt in prompts},
            provenance={**invocations[-1], "settings": settings.to_dict()},
            decode=decoder_of(tokenizer),
        )
    )
    write_report(report, run.location("report"))
    if run.tracker is not None and run.directory.is_local:
        run.tracker.html("report", run.directory.path("report/index.html"))
    return {"page": run.directory.location("report/index.html"), "flags": report["flags"]}


def _serving(settings: Settings, evaluation: Folder, calibration: dict[str, Any] | None) -> dict[str, Any] | None:
    """The serving comparison, from recorded rounds and step costs; None when the evaluation has no step costs."""
    section, temperature = settings.evaluate, serving_temperature(settings.evaluate)
    costs = read_step_costs(evaluation).get(temperature) if temperature is not None else None
    if section.serving is None or temperature is None or costs is None:
        return None
    measured = f"{FOLDER}/{EVENTS}"
    return serving(
        read_events(evaluation.full(EVENTS)),
        read_events(evaluation.full(measured)) if evaluation.exists(measured) else None,
        StepCosts.from_dict(costs),
        slot_calibration(calibration, temperature),
        temperature=temperature,
        users=section.serving.users,
        static_length=section.static_length,
        threshold=section.threshold,
    )
