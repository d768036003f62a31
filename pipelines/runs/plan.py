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
from dataclasses import dataclass
from functools import partial
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from dspark.decoding.decoder import Decoder, SamplingConfig
from dspark.decoding.target import TargetError
from pipelines.data.chat import generated_sample, make_request, render_turn, thinks
from pipelines.data.conversations import Prompt, evenly_spaced
from pipelines.errors import UserError
from pipelines.progress import Reporter, byte_size, duration
from pipelines.runs.run import Run
from pipelines.settings import Settings
from pipelines.stages.build_cache import count_components
from pipelines.stages.capture import target_parts, teacher_row
from pipelines.stages.regenerate import read_conversations, read_splits
from pipelines.stages.train import count_steps
from pipelines.target_spec import resolve_target
from pipelines.workers import open_target
from storage.cache import target_cache as caches
from storage.cache.target_cache import CacheRow
from storage.codecs.components import leading_components
from storage.codecs.fitting import SampleCodecs
from storage.codecs.registry import HIDDEN_STATES, TEACHER, CodecSpec, codec_names
from storage.files.filesystems import Folder

if TYPE_CHECKING:
    from dspark.decoding.target import Target
    from pipelines.target_spec import TargetSpec

# What `auto` takes is known after the pilot; these stand for it.
FOR_AUTO = {"features": "projected", "teacher": "corrected"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One conversation as ids [S], its supervised spans, and what its row says beside."""

    sample_id: str
    ids: list[int]
    spans: list[tuple[int, int]]
    extra: dict[str, Any]


def make_plan(settings: Settings, reporter: Reporter, *, rows: int) -> dict[str, Any]:
    """Tokens, bytes a token by codec, storage in all, steps, and times of one worker on this machine; JSON-like."""
    prompts = read_splits(settings)["train"].prompts
    spec = resolve_target(settings)
    reporter.say(f"opening {spec.name}")
    target = open_target(settings, spec)
    recorded = _recorded(settings)
    decode_speed = None
    if recorded is None:
        sample = evenly_spaced(prompts, rows)
        answers, decode_speed = _answers(settings, target, sample, spec, reporter)
        lengths, exact = [len(answer.ids) for answer in answers], False
        total_tokens = round(mean(lengths) * len(prompts))
    else:
        lengths, exact = [len(answer.ids) for answer in recorded], True
        total_tokens, answers = sum(lengths), evenly_spaced(recorded, rows)
    if len(answers) < 2:
        raise UserError("a plan is measured on two answers at least; give data.train more prompts")
    cache_rows, capture_speed = _capture(settings, target, answers, reporter)
    fitting = sample_codecs(settings, spec, target, cache_rows)
    codecs = measure_all(settings, fitting)
    stored = _write_sample(settings, fitting, cache_rows[1::2])
    raw = 2 * spec.hidden_size * (len(spec.target_layer_ids) + 1)
    kept = len(recorded) if recorded is not None else len(prompts)
    return {
        "prompts": len(prompts),
        "conversations": kept,
        "sample_rows": len(answers),
        "tokens": total_tokens,
        "tokens_are_exact": exact,
        "tokens_standard_error": 0 if exact else round(stdev(lengths) / math.sqrt(len(lengths)) * len(prompts)),
        "tokens_per_row": round(mean(lengths), 1),
        "supervised_share": round(
            sum(b - a for x in answers for a, b in x.spans) / sum(len(x.ids) for x in answers), 4
        ),
        "raw_bytes_per_token": raw,
        "raw_bytes": raw * total_tokens,
        "codecs": codecs,
        "configured": {**{part: spec_of(settings, part).name for part in FOR_AUTO}, **stored},
        "cache_bytes": round(stored["bytes_per_token"] * total_tokens),
        "free_bytes": Run(settings).directory.folder.free_bytes(),
        "max_bytes": settings.cache.max_bytes,
        "train_steps": count_steps(settings, kept),
        "regenerate_seconds": None
        if decode_speed is None
        else round(_answer_tokens(answers, prompts) / decode_speed, 1),
        "capture_seconds": round(total_tokens / capture_speed, 1),
    }


def _recorded(settings: Settings) -> list[Answer] | None:
    """The conversations of a run whose `regenerate` is complete; None if there are none."""
    run = Run(settings)
    if not run.is_complete("regenerate"):
        return None
    answers = []
    for row in read_conversations(Folder(run.location("regenerate"))):
        place = str(row["id"])
        ids, spans = generated_sample(row["prompt_ids"], row["response_ids"], settings.cache.max_length, row=place)
        if spans:
            extra = {key: row.get(key) for key in ("domain", "thinking", "finish_reason")}
            answers.append(Answer(sample_id=place, ids=ids, spans=spans, extra=extra))
    return answers


def _answers(
    settings: Settings, target: Target, prompts: Sequence[Prompt], spec: TargetSpec, reporter: Reporter
) -> tuple[list[Answer], float]:
    """The target's own answers to the sample's first questions, and tokens written a second."""
    wanted, seed = settings.regenerate, settings.run.seed
    requests = [
        make_request(
            prompt.prompt_id,
            render_turn(target.tokenizer, prompt, prompt.messages, settings),
            wanted.max_new_tokens,
            spec,
            seed,
        )
        for prompt in prompts
    ]
    sampling = SamplingConfig(temperature=wanted.temperature, top_p=wanted.top_p, top_k=wanted.top_k)
    of_id = {prompt.prompt_id: prompt for prompt in prompts}
    decoder = Decoder(target, None, sampling=sampling, max_rows=wanted.batch_size)
    answers, written, started = [], 0, time.perf_counter()
    with reporter.task("answers of the sample", total=len(requests), unit="prompts") as task:
        for done in decoder.generate(requests):
            written += len(done.output_ids)
            ids, spans = generated_sample(done.prompt_ids, done.output_ids, settings.cache.max_length)
            if spans:
                extra = {
                    "domain": of_id[done.request_id].domain,
                    "thinking": thinks(settings.target.thinking, seed, done.request_id),
                    "finish_reason": done.finish_reason,
                }
                answers.append(Answer(sample_id=done.request_id, ids=ids, spans=spans, extra=extra))
            task.advance(1, tokens=written)
    return sorted(answers, key=lambda answer: answer.sample_id), written / (time.perf_counter() - started)


def _answer_tokens(answers: Sequence[Answer], prompts: Sequence[Prompt]) -> float:
    return mean(sum(end - start for start, end in answer.spans) for answer in answers) * len(prompts)


def _capture(
    settings: Settings, target: Target, answers: Sequence[Answer], reporter: Reporter
) -> tuple[list[CacheRow], float]:
    """The sample's states, and tokens a second of the target's forward pass."""
    import torch

    rows, seconds = [], 0.0
    total = sum(len(answer.ids) for answer in answers)
    with reporter.task("states of the sample", total=total, unit="tokens") as task:
        for answer in answers:
            started = time.perf_counter()
            captured = target.capture(torch.tensor([answer.ids], device=target.device), None)
            features, last = (
                captured.features[0].to("cpu", torch.bfloat16),
                captured.last_hidden_state[0].to("cpu", torch.bfloat16),
            )
            seconds += time.perf_counter() - started
            rows.append(
                CacheRow(
                    sample_id=answer.sample_id,
                    input_ids=answer.ids,
                    spans=answer.spans,
                    features=features,
                    last_hidden_state=last,
                    extra=answer.extra,
                )
            )
            task.advance(len(answer.ids))
    return rows, total / max(seconds, 1e-9)


def sample_codecs(settings: Settings, spec: TargetSpec, target: Target, rows: Sequence[CacheRow]) -> SampleCodecs:
    """The sample that codecs are fitted and measured on.

    The components of a projected one are the whole sample's principal ones: which they are is known after the pilot,
    and their number and step decide the size.
    """
    taken = [teacher_row(row) for row in rows]
    count = settings.cache.hidden_states_options.get("directions") or count_components(spec, settings.cache.components)
    projection, shares = leading_components([], [(row.features, True) for row in taken], count)
    return SampleCodecs(
        taken,
        layers=len(spec.target_layer_ids),
        hidden_size=spec.hidden_size,
        target=partial(target_parts, target),
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
        features=spec_of(settings, "features"),
        teacher=spec_of(settings, "teacher"),
    )
    assert plan.teacher is not None
    codecs = caches.Codecs(features=sample.fit("features", plan.features), teacher=sample.fit("teacher", plan.teacher))
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
        features, teacher = entry.get("features"), entry.get("teacher")
        cells = ["", ""] if features is None else [_cell(features["bytes"]), _cell(features["snr_db"])]
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
