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

from pipelines.reporting import figures, quality
from pipelines.reporting.events import COMPLETION_SCHEMA, EVENT_SCHEMA
from pipelines.reporting.markdown import render_markdown
from pipelines.reporting.page import render_page
from pipelines.reporting.samples import Decode, sample_texts
from storage.filesystems import Folder

SCHEMA = "dspark-report/1"
MOST_POINTS = 300


@dataclass(frozen=True, kw_only=True)
class ReportInputs:
    """What a report is made of. Everything but the events may be empty; its section then says so.

    events, completions: tables of pipelines.reporting.events, all drafters and temperatures together.
    target, drafter: facts to name ("name", "revision", "parameters" …; "block_size", "markov_head_type" …).
    calibration: {"temperatures": [G], "fitted_on": …, "rounds": …}; None when not calibrated.
    training: rows of the training log, each with "step" and numbers.
    cache: {"sequences", "tokens", "hidden_size", "captured_layers", "parts": {name: bytes}, "codecs"}.
    conversations: result of `conversation_summary`, or the manifest of the conversations.
    timings: stopwatch records {"drafter", "temperature", "tokens", "seconds", "max_rows"}.
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
    prompts: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    decode: Decode | None = None
    gap_tolerance: float = 1e-3
    created: str | None = None


def build_report(run_inputs: ReportInputs) -> dict[str, Any]:
    """The whole report as JSON values; docs/report.md says what each field is."""
    inputs = run_inputs
    lengths = figures.accepted_lengths(inputs.events)
    overall = {(row["drafter"], row["temperature"]): row["value"] for row in lengths if row["domain"] == figures.MEAN}
    temperatures = (inputs.calibration or {}).get("temperatures")
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
        "confidence": figures.confidence(inputs.events, temperatures),
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
    return json.loads(json.dumps(_finite(report), default=str))


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
        raise FileNotFoundError(f"{out.describe('report.json')} does not exist; `dspark evaluate` makes a report")
    report = json.loads(out.read("report.json"))
    if report.get("schema") != SCHEMA:
        raise ValueError(
            f"{out.describe('report.json')} has the schema {report.get('schema')!r}, this version renders {SCHEMA!r}; "
            "evaluate again"
        )
    out.write("index.html", render_page(report).encode())
    out.write("report.md", render_markdown(report).encode())


def _finite(value: Any) -> Any:
    """NaN and infinity as null: JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return _finite(value.item()) if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value


def _outputs(completions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    pairs = sorted({(row["drafter"], row["temperature"]) for row in completions}, key=lambda pair: figures._rank(pair))
    return [
        {"drafter": drafter, "temperature": temperature}
        | quality.degenerate_outputs(
            [row for row in completions if (row["drafter"], row["temperature"]) == (drafter, temperature)]
        )
        for drafter, temperature in pairs
    ]


def _equality(completions: Sequence[Mapping[str, Any]], gap_tolerance: float) -> dict[str, Any] | None:
    """DSpark against plain decoding at temperature 0; None when one of them was not run."""
    greedy = [row for row in completions if row["temperature"] == 0]
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
            if (
                name != "step"
                and isinstance(value, int | float)
                and not isinstance(value, bool)
                and math.isfinite(value)
            ):
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
    """Bytes by part, a token, and beside the reference's (captured layers + 1) · d · 2 bytes a token (6·d·2 for five)."""
    if not cache:
        return {}
    tokens, hidden, layers = cache.get("tokens"), cache.get("hidden_size"), cache.get("captured_layers")
    parts = {name: int(size) for name, size in (cache.get("parts") or {}).items()}
    total = sum(parts.values()) or cache.get("bytes")
    reference = (layers + 1) * hidden * 2 if layers and hidden else None
    per_token = total / tokens if total and tokens else None
    return dict(cache) | {
        "parts": parts,
        "bytes": total,
        "bytes_per_token": per_token,
        "reference_bytes_per_token": reference,
        "ratio": reference / per_token if reference and per_token else None,
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
        answer_tokens += len(row.get("response_ids") or ())
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
    lengths = {
        (row["drafter"], row["temperature"]): row for row in report["accepted_length"] if row["domain"] == "mean"
    }
    fastest = {(row["drafter"], row["temperature"]): row["against_plain"] for row in report["speed"]}
    sentences = []
    for (drafter, temperature), row in sorted(lengths.items(), key=lambda item: item[0][1]):
        if drafter != "dspark" or row["value"] is None:
            continue
        text = f"At temperature {temperature:g} the target's every pass yields {row['value']:.2f} tokens"
        without = lengths.get(("no-sequential-head", temperature))
        if without and without["value"] is not None:
            text += f" ({without['value']:.2f} with the sequential head switched off, 1 without a drafter)"
        speed = fastest.get(("dspark", temperature))
        if speed is not None:
            text += f"; by the clock of this machine, {_times(speed)}"
        sentences.append(text + ".")
    equality = report["equality"]
    if equality:
        text = f"{equality['equal']} of {equality['compared']} greedy texts equal plain greedy decoding token for token"
        if equality["ties"]:
            text += f", {equality['ties']} part at a tie (logit gap up to {equality['gap_tolerance']:g})"
        sentences.append(text + ".")
    return sentences


def _times(ratio: float) -> str:
    if ratio >= 1.005:
        return f"{ratio:.2f} times as fast as plain decoding"
    return (
        f"slower than plain decoding, at {ratio:.2f} times its speed" if ratio < 0.995 else "as fast as plain decoding"
    )


def decoder_of(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Token ids to text with nothing tidied away, for `ReportInputs.decode`."""
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
