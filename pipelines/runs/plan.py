"""What a run will cost, before it starts: `dspark plan CONFIG`.

1. read the prompts, and take a sample of them, spread evenly;
2. take the answers that were recorded already, or let the target write those of the sample;
3. capture the sample's states;
4. fit every codec on one half of the sample and measure it on the other;
5. write that half as a cache with the configured codecs, which measures what else a row costs;
6. scale up to all prompts, and compare with the reference's raw layout and with the free space.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from itertools import groupby
from statistics import mean, stdev
from typing import Any

from dspark.decoding.target import TargetError
from pipelines.data.answers import supervised_tokens
from pipelines.data.conversations import Prompt, evenly_spaced
from pipelines.errors import UserError
from pipelines.progress import Reporter, byte_size, duration
from pipelines.runs.run import Run
from pipelines.settings import Settings
from pipelines.stages.build_cache import count_components, cut_row
from pipelines.stages.capture import CaptureWorker, Conversation, teacher_row
from pipelines.stages.regenerate import answer, answer_decoder, read_conversations, read_splits, taught_rows
from pipelines.stages.train import count_steps
from pipelines.target_spec import resolve_target
from pipelines.training.model import require_drafter
from storage.cache import target_cache as caches
from storage.cache.target_cache import CacheRow
from storage.codecs.components import leading_components
from storage.codecs.fitting import SampleCodecs
from storage.codecs.registry import HIDDEN_STATES, TEACHER, CodecSpec, codec_names
from storage.files.filesystems import Folder

# What `auto` takes is known after the pilot; these stand for it.
FOR_AUTO = {"features": "projected", "teacher": "corrected"}


def make_plan(settings: Settings, reporter: Reporter, *, rows: int) -> dict[str, Any]:
    """Tokens, bytes a token by codec, storage in all, steps, and times of one worker on this machine; JSON-like."""
    prompts, spec = read_splits(settings)["train"].prompts, resolve_target(settings)
    require_drafter(settings, spec)
    reporter.say(f"opening {spec.name}")
    worker = CaptureWorker(settings, spec, settings.run.directory)
    recorded, answer_seconds = _recorded(settings), None
    if recorded is None:
        started, sample = time.perf_counter(), evenly_spaced(prompts, rows)
        answers = _answers(worker, sample, reporter)
        answer_seconds = (time.perf_counter() - started) / len(sample) * len(prompts)
        lengths = [len(answer.input_ids) for answer in answers]
        kept = round(len(answers) / len(sample) * len(prompts))
        total_tokens = round(sum(lengths) / len(sample) * len(prompts))
    else:
        lengths = [len(answer.input_ids) for answer in recorded]
        kept, total_tokens, answers = len(recorded), sum(lengths), evenly_spaced(recorded, rows)
    if len(answers) < 2:
        raise UserError("a plan is measured on two answers at least; give data.train more prompts")
    reporter.say(f"capturing the states of {len(answers)} answers")
    started, sample_tokens = time.perf_counter(), sum(len(answer.input_ids) for answer in answers)
    cache_rows = worker.capture(answers)
    capture_speed = sample_tokens / (time.perf_counter() - started)
    fitting = sample_codecs(worker, cache_rows)
    codecs = measure_all(settings, fitting)
    stored = _write_sample(settings, fitting, cache_rows[1::2])
    raw = 2 * spec.hidden_size * (len(spec.target_layer_ids) + 1)
    error = round(stdev(lengths) / math.sqrt(len(lengths)) * len(prompts))
    return {
        "prompts": len(prompts),
        "conversations": kept,
        "sample_rows": len(answers),
        "tokens": total_tokens,
        "tokens_are_exact": recorded is not None,
        "tokens_standard_error": error if recorded is None else 0,
        "tokens_per_row": round(mean(lengths), 1),
        "supervised_share": round(sum(b - a for x in answers for a, b in x.spans) / sample_tokens, 4),
        "raw_bytes_per_token": raw,
        "raw_bytes": raw * total_tokens,
        "codecs": codecs,
        "configured": {**{part: spec_of(settings, part).name for part in FOR_AUTO}, **stored},
        "cache_bytes": round(stored["bytes_per_token"] * total_tokens),
        "free_bytes": Run(settings).directory.folder.free_bytes(),
        "max_bytes": settings.cache.max_bytes,
        "train_steps": count_steps(settings, kept),
        "regenerate_seconds": None if answer_seconds is None else round(answer_seconds, 1),
        "capture_seconds": round(total_tokens / capture_speed, 1),
    }


def _recorded(settings: Settings) -> list[Conversation] | None:
    """The conversations of a run whose `regenerate` is complete; None if there are none."""
    run = Run(settings)
    if not run.is_complete("regenerate"):
        return None
    rows = read_conversations(Folder(run.location("regenerate")))
    return [one for one in (cut_row(row, settings.cache.max_length) for row in rows) if one.spans]


def _answers(worker: CaptureWorker, prompts: Sequence[Prompt], reporter: Reporter) -> list[Conversation]:
    """The target's own answers to these prompts."""
    settings, size = worker.settings, worker.settings.regenerate.batch_size
    decoder, rows = answer_decoder(worker.target, settings), []
    with reporter.task("answers of the sample", total=len(prompts), unit="prompts") as task:
        for start in range(0, len(prompts), size):
            chosen = prompts[start : start + size]
            answered = answer(decoder, worker.target.tokenizer, chosen, settings, worker.spec)
            for _, of_prompt in groupby(answered, key=lambda row: row["key"]):
                rows += taught_rows(list(of_prompt), settings)
            task.advance(len(chosen))
    return [cut_row(row, settings.cache.max_length) for row in rows if supervised_tokens(row)]


def sample_codecs(worker: CaptureWorker, rows: Sequence[CacheRow]) -> SampleCodecs:
    """The sample that codecs are fitted and measured on.

    The components of a projected one are the whole sample's principal ones: which they are is known after the pilot,
    and their number and step decide the size.
    """
    taken, cache, spec = [teacher_row(row) for row in rows], worker.settings.cache, worker.spec
    count = cache.hidden_states_options.get("directions") or count_components(spec, cache.components)
    projection, shares = leading_components([], [(row.hidden_states, True) for row in taken], count)
    return SampleCodecs(
        taken,
        layers=len(spec.target_layer_ids),
        hidden_size=spec.hidden_size,
        target=worker.parts_for,
        components={"projection": projection, "shares": shares},
    )


def spec_of(settings: Settings, part: str, name: str | None = None) -> CodecSpec:
    """The codec that the settings ask for, or that of the name, with its defaults where it is another one."""
    configured, options = settings.cache.codec_of(part)
    configured = FOR_AUTO[part] if configured == "auto" else configured
    return CodecSpec(name=name or configured, settings=options if name in (None, configured) else {})


def measure_all(settings: Settings, sample: SampleCodecs) -> list[dict[str, Any]]:
    """Of each codec: bytes a token and signal-to-noise in dB of the features, bytes a state of the teacher and how far
    acceptance rates move at most."""
    found: dict[str, dict[str, Any]] = {}
    for part, kind in (("features", HIDDEN_STATES), ("teacher", TEACHER)):
        for name in codec_names(kind):
            try:
                codec = sample.fit(part, spec_of(settings, part, name))
            except TargetError:
                continue  # the target's upper layers do not run alone
            measured = sample.measure(part, codec)
            figures = {"bytes": measured["bytes_per_token"], "snr_db": measured.get("snr_db")}
            if part == "teacher":
                figures = {"bytes": measured["bytes_per_token"], "bound": measured["acceptance"]["bound"]}
            found.setdefault(name, {})[part] = figures
    return [{"codec": name, **parts} for name, parts in found.items()]


def _write_sample(settings: Settings, sample: SampleCodecs, rows: Sequence[CacheRow]) -> dict[str, Any]:
    """Bytes a token by part, of a cache with the configured codecs that holds the rows that they were not fitted on."""
    plan = caches.CachePlan(
        contract={},
        num_layers=sample.layers,
        hidden_size=sample.hidden_size,
        samples=[(row.sample_id, len(row.input_ids)) for row in rows],
        hidden_states=spec_of(settings, "features"),
        teacher=spec_of(settings, "teacher"),
    )
    assert plan.teacher is not None
    codecs = caches.Codecs(
        hidden_states=sample.fit("features", plan.hidden_states), teacher=sample.fit("teacher", plan.teacher)
    )
    with tempfile.TemporaryDirectory() as folder:
        caches.create_or_resume(folder, plan, codecs)
        for shard, (start, stop) in enumerate(plan.shards):
            caches.write_shard(folder, shard, rows[start:stop], codecs)
        caches.finish(folder)
        parts = caches.TargetCache.open(folder).info()["bytes_per_token"]
    return {"bytes_per_token": parts["all"], "parts": {name: size for name, size in parts.items() if name != "all"}}


def plan_text(plan: dict[str, Any]) -> str:
    """The plan for a person."""
    raw, total = plan["raw_bytes_per_token"], plan["tokens"]
    doubt = "" if plan["tokens_are_exact"] else f" ± {plan['tokens_standard_error']:,} (standard error of the sample)"
    lines = [
        f"{plan['conversations']:,} conversations, {total:,} tokens{doubt}, {plan['tokens_per_row']} a conversation, "
        f"{plan['supervised_share']:.0%} of them answers; measured on {plan['sample_rows']}",
        "",
        f"{'codec':<12} {'features B/token':>17} {'SNR dB':>7} {'teacher B/state':>16} {'error':>7}",
    ]
    for entry in plan["codecs"]:
        hidden_states, teacher = entry.get("features"), entry.get("teacher")
        cells = ["", ""] if hidden_states is None else [_cell(hidden_states["bytes"]), _cell(hidden_states["snr_db"])]
        cells += ["", ""] if teacher is None else [_cell(teacher["bytes"]), f"{teacher['bound']:.4f}"]
        lines.append(f"{entry['codec']:<12} {cells[0]:>17} {cells[1]:>7} {cells[2]:>16} {cells[3]:>7}")
    chosen, size = plan["configured"], plan["cache_bytes"]
    parts = ", ".join(f"{name} {count:,.1f}" for name, count in chosen["parts"].items())
    lines += [
        "error: how far acceptance rates move at most, on average; which components are projected, a pilot chooses",
        "",
        f"reference's raw layout: {raw:,} B/token, {byte_size(plan['raw_bytes'])} in all",
        f"this run ({chosen['features']} features, {chosen['teacher']} teacher): {chosen['bytes_per_token']:,.1f} "
        f"B/token ({parts}), {byte_size(size)} in all, {raw / chosen['bytes_per_token']:.1f} times smaller",
        f"training: {plan['train_steps']:,} steps",
    ]
    if plan["regenerate_seconds"] is not None:
        lines.append(f"answers: about {duration(plan['regenerate_seconds'])} with one worker of this machine")
    lines.append(f"states: about {duration(plan['capture_seconds'])} with one worker of this machine")
    for limit, what in ((plan["free_bytes"], "free here"), (plan["max_bytes"], "allowed by cache.max_bytes")):
        if limit is not None:
            verdict = "fits" if size <= limit else "DOES NOT FIT: choose a smaller codec, fewer prompts or another disk"
            lines.append(f"{byte_size(limit)} {what}: {verdict}")
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "exact" if value is None else f"{value:,.1f}"
