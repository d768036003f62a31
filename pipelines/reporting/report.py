"""report.json, and the page and the Markdown that are rendered from it.

1. Gather: events and completions, the calibration record, training rows, cache figures, provenance (`ReportInputs`).
2. Derive every figure from the events (`build_report`); the result is plain JSON (schema in docs/report.md).
3. Write report.json, then index.html and report.md from what was written (`write_report`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from pipelines.data.answers import supervised_tokens
from pipelines.errors import UserError
from pipelines.evaluation import figures, quality
from pipelines.evaluation.round_log import COMPLETION_SCHEMA, EVENT_SCHEMA
from pipelines.evaluation.samples import Decode, sample_texts
from pipelines.reporting.looks import listed
from pipelines.reporting.markdown import render_markdown
from pipelines.reporting.page import render_page
from storage.errors import MissingFile
from storage.files.filesystems import Folder

SCHEMA = "dspark-report/2"
MOST_POINTS = 300


@dataclass(frozen=True, kw_only=True)
class ReportInputs:
    """What a report is made of. Everything but the events may be empty; its section then says so.

    events, completions: tables of pipelines.evaluation.round_log, all drafters and temperatures together.
    target, drafter: facts to name ("name", "revision", "parameters" …; "block_size", "markov_head_type" …).
    calibration: the record that `calibrate` leaves (dspark.calibration); None when not calibrated.
    training: rows of the training log, each with "step" and numbers.
    cache: what `TargetCache.info()` returns.
    conversations: result of `conversation_summary`, or the manifest of the conversations.
    timings: stopwatch records {"drafter", "temperature", "tokens", "seconds", "max_rows"}.
    serving: what `pipelines.evaluation.serving.serving` returns; None without step costs.
    prompts: text of the prompts by request id, for the samples. decode: token ids to text.
    """

    title: str = "Speculative decoding report"
    events: pa.Table = field(default_factory=EVENT_SCHEMA.empty_table)
    completions: pa.Table = field(default_factory=COMPLETION_SCHEMA.empty_table)
    target: Mapping[str, Any] = field(default_factory=dict)
    drafter: Mapping[str, Any] = field(default_factory=dict)
    contract: Mapping[str, Any] | None = None
    calibration: Mapping[str, Any] | None = None
    training: Sequence[Mapping[str, Any]] = ()
    cache: Mapping[str, Any] = field(default_factory=dict)
    conversations: Mapping[str, Any] = field(default_factory=dict)
    timings: Sequence[Mapping[str, Any]] = ()
    serving: Mapping[str, Any] | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    decode: Decode | None = None
    gap_tolerance: float = 1e-3
    created: str | None = None


def build_report(inputs: ReportInputs) -> dict[str, Any]:
    """The whole report as JSON values; docs/report.md says what each field is."""
    lengths = figures.accepted_lengths(inputs.events, inputs.completions)
    overall = {(row["drafter"], row["temperature"]): row["value"] for row in lengths if row["domain"] == figures.MEAN}
    completions = inputs.completions.to_pylist()
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "title": inputs.title,
        "created": inputs.created or datetime.now(UTC).isoformat(timespec="seconds"),
        "subject": {
            "target": dict(inputs.target),
            "drafter": dict(inputs.drafter),
            "contract": dict(inputs.contract) if inputs.contract else None,
        },
        "accepted_length": lengths,
        "speed": figures.speed(inputs.events, inputs.completions, inputs.timings, overall),
        "positions": figures.positions(inputs.events),
        "confidence": figures.confidence(inputs.events, inputs.calibration),
        "serving": dict(inputs.serving) if inputs.serving else None,
        "calibration": dict(inputs.calibration) if inputs.calibration else None,
        "equality": _equality(completions, inputs.gap_tolerance),
        "outputs": _outputs(completions),
        "samples": sample_texts(inputs.events, inputs.prompts, inputs.decode),
        "training": training_curves(inputs.training),
        "cache": cache_sizes(inputs.cache),
        "data": dict(inputs.conversations),
        "provenance": dict(inputs.provenance),
    }
    report["flags"] = quality.flags(report)
    report["summary"] = summary(report)
    # JSON has no NaN and no infinity: null stands for both.
    return json.loads(json.dumps(report, default=_plain_value), parse_constant=lambda _: None)


def write_report(report: Mapping[str, Any], folder: str | os.PathLike[str]) -> None:
    """Write report.json, index.html and report.md; each appears whole or not at all."""
    out = Folder(folder)
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    out.write("report.json", text.encode())
    render_report(folder)


def render_report(folder: str | os.PathLike[str]) -> None:
    """Render index.html and report.md again from the report.json that lies in the folder."""
    out = Folder(folder)
    if not out.exists("report.json"):
        raise MissingFile(f"{out.describe('report.json')} does not exist; `dspark evaluate` makes a report")
    report = json.loads(out.read("report.json"))
    if report.get("schema") != SCHEMA:
        raise UserError(
            f"{out.describe('report.json')} has the schema {report.get('schema')!r}, this version renders {SCHEMA!r}; "
            "evaluate again"
        )
    out.write("index.html", render_page(report).encode())
    out.write("report.md", render_markdown(report).encode())


def _plain_value(value: Any) -> Any:
    """What JSON cannot say: a number of numpy as Python's, anything else as text."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else str(value)


def _outputs(completions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_variant: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for row in completions:
        pair = (figures.variant(row["drafter"], row["policy"]), row["temperature"])
        by_variant.setdefault(pair, []).append(row)
    return [
        {"drafter": pair[0], "temperature": pair[1]} | quality.degenerate_outputs(by_variant[pair])
        for pair in sorted(by_variant, key=figures.rank)
    ]


def _equality(completions: Sequence[Mapping[str, Any]], gap_tolerance: float) -> dict[str, Any] | None:
    """The drafter against plain decoding at temperature 0; None when one of them was not run."""
    greedy = [row for row in completions if row["temperature"] == 0 and row["policy"] in figures.USUAL_POLICIES]
    drafted = [row for row in greedy if row["drafter"] == "dspark"]
    plain = [row for row in greedy if row["drafter"] == "plain"]
    if not drafted or not plain:
        return None
    return quality.equality_with_plain(drafted, plain, gap_tolerance=gap_tolerance)


def training_curves(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """{"steps", "last": {name: value}, "series": {name: [[step, value], …]}} of every number that the log has.

    Long series are thinned by means over equal stretches of steps, and the last point is kept.
    """
    series: dict[str, list[list[float]]] = {}
    for row in rows:
        step = row.get("step")
        if isinstance(step, bool) or not isinstance(step, int | float):
            continue
        for name, value in row.items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if number and name != "step":
                series.setdefault(name, []).append([float(step), float(value)])
    for points in series.values():
        points.sort(key=lambda point: point[0])
    return {
        "steps": int(max((points[-1][0] for points in series.values()), default=0)),
        "last": {name: points[-1][1] for name, points in series.items()},
        "series": {name: _thinned(points) for name, points in series.items()},
    }


def _thinned(points: list[list[float]]) -> list[list[float]]:
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil((len(points) - 1) / (MOST_POINTS - 1))
    stretches = [points[start : min(start + size, len(points) - 1)] for start in range(0, len(points) - 1, size)]
    means = [[sum(column) / len(stretch) for column in zip(*stretch, strict=True)] for stretch in stretches]
    return [*means, points[-1]]


def cache_sizes(cache: Mapping[str, Any]) -> dict[str, Any]:
    """`TargetCache.info()` as the report keeps it: bytes a token by part, beside the reference's.

    The reference keeps (captured layers + 1) · d numbers of 16 bits a token: 6·d·2 bytes for five layers.
    """
    if not cache:
        return {}
    by_part = dict(cache["bytes_per_token"])
    whole, raw = by_part.pop("all", None), cache.get("raw_bytes_per_token")
    if whole is None:
        whole = sum(by_part.values())
    return {
        "sequences": cache.get("rows"),
        "tokens": cache.get("tokens"),
        "bytes": cache.get("bytes"),
        "parts": by_part,
        "bytes_per_token": whole,
        "reference_bytes_per_token": raw,
        "ratio": raw / whole if raw and whole else None,
        "codecs": cache.get("codecs"),
        "identity": cache.get("identity"),
    }


def conversation_summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Who said what: counts by split, domain, finish reason, generator and thinking mode, and the prompts' hash.

    Rows are conversations as `regenerate` writes them. Rows without a generator count as "unknown".
    """
    kinds = ("split", "domain", "finish_reason", "thinking")
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in (*kinds, "generator")}
    prompts: list[str] = []
    answer_tokens = total = 0
    excerpt: dict[str, str] | None = None
    for row in rows:
        total += 1
        for kind in kinds:
            counts[kind][str(row.get(kind) or "unknown")] += 1
        generator = row.get("generator") or {}
        name = generator.get("target") or generator.get("name") if isinstance(generator, Mapping) else generator
        counts["generator"][str(name or "unknown")] += 1
        answer_tokens += supervised_tokens(row)
        said = row.get("conversations") or []
        asked = [turn["content"] for turn in said if turn["role"] != "assistant"]
        prompts.append(json.dumps([row.get("id"), asked], ensure_ascii=False))
        if excerpt is None and said:
            excerpt = {
                "prompt": asked[-1][:400] if asked else "",
                "answer": next((turn["content"][:400] for turn in said if turn["role"] == "assistant"), ""),
            }
    return {
        "conversations": total,
        "answer_tokens": answer_tokens,
        "prompts_sha256": hashlib.sha256("\n".join(sorted(prompts)).encode()).hexdigest(),
        **{kind: dict(sorted(found.items())) for kind, found in counts.items()},
        "excerpt": excerpt,
    }


def summary(report: Mapping[str, Any]) -> list[str]:
    """The findings in a few sentences, made from the figures alone."""
    rows = [row for row in report["accepted_length"] if row["domain"] == figures.MEAN and row["value"] is not None]
    lengths = {(row["drafter"], row["temperature"]): row["value"] for row in rows}
    temperatures = sorted(temperature for drafter, temperature in lengths if drafter == "dspark")
    if not temperatures:
        return []
    own = [
        f"{lengths['dspark', t]:.2f}{'' if index else ' tokens'} at temperature {t:g}"
        for index, t in enumerate(temperatures)
    ]
    text = f"One pass of the target yields {listed(own)}"
    without = [lengths.get(("no-sequential-head", t)) for t in temperatures]
    if known := [f"{value:.2f}" for value in without if value is not None]:
        text += f"; with the drafter's sequential head switched off, {listed(known)}"
    sentences = [text + "."]
    ratios = {row["temperature"]: row["against_plain"] for row in report["speed"] if row["drafter"] == "dspark"}
    known_ratios = [(t, ratio) for t in temperatures if (ratio := ratios.get(t)) is not None]
    if known_ratios:
        clock = [
            f"{ratio:.2f} times{'' if index else ' the speed of plain decoding'}"
            f"{' (slower)' if ratio < 0.995 else ''} at temperature {t:g}"
            for index, (t, ratio) in enumerate(known_ratios)
        ]
        sentences.append(f"By the clock of this machine that is {listed(clock)}.")
    return sentences


def decoder_of(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Token ids to text with nothing tidied away, for `ReportInputs.decode`."""
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
