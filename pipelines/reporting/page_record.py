"""The page's sections on what stands behind the figures: texts, training, cache, data, provenance, terms."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pipelines.reporting.charts import Series, line_chart, number, stacked_bar
from pipelines.reporting.page_parts import absent, folded, name_of, table
from pipelines.reporting.terms import TERMS

# The curves that get a chart: (title, names a training log may use, the first found is drawn).
CURVES = (
    ("Loss", ("loss", "train/loss")),
    ("Expected accepted length", ("expected_tau", "expected_accepted_length", "tau_probabilistic", "tau")),
    ("Cross-entropy", ("ce", "train/ce")),
    ("Distance to the target's distribution (L1)", ("l1", "train/l1")),
    ("Confidence loss", ("confidence", "bce", "train/bce")),
    ("Learning rate", ("learning_rate", "lr", "train/lr")),
)


def samples(report: Mapping[str, Any]) -> str:
    rows = report["samples"]
    if not rows:
        return absent("No text was recorded.")
    panels = "".join(_sample(row) for row in rows)
    return (
        "<p>One answer a domain, the one whose accepted length is nearest to its domain's mean. Point at a passage, or "
        "step through it with the arrow keys, to see what was drafted in that round.</p>"
        '<p class="tokens-legend"><span class="ok">draft, kept</span><span class="from-target">from the target</span>'
        '<span class="no">draft, rejected</span></p>'
        '<div class="controls only-script"><label><input type="checkbox" id="drafts">Show rejected drafts in the text'
        f'</label></div><div class="grid2" id="texts">{panels}</div>'
    )


def _sample(row: Mapping[str, Any]) -> str:
    text = f'<span class="from-target">{escape(row["opening"])}</span>' if row["opening"] else ""
    text += "".join(_round(number_, entry) for number_, entry in enumerate(row["rounds"], 1))
    more = "" if row["complete"] else " …"
    return (
        f'<article class="panel sample"><h3>{escape(row["domain"])}, temperature {row["temperature"]:g} · '
        f'{number(row["accepted_length"])} tokens a round</h3><div class="prompt">{escape(row["prompt"])}</div>'
        f'<div class="text">{text}{more}</div><p class="inspector only-script" aria-live="polite">'
        "Point at the text, or tap it.</p>"
        "</article>"
    )


def _round(order: int, entry: Mapping[str, Any]) -> str:
    kept = "".join(f'<span class="ok">{escape(piece)}</span>' for piece in entry["accepted"] if piece)
    dropped = entry["dropped"][entry["cut"] :]
    lost = "".join(
        f'<span class="no{" late" if index else ""}">{escape(_visible(piece))}</span>'
        for index, piece in enumerate(dropped)
    )
    own = f'<span class="from-target">{escape(entry["target"])}</span>' if entry["target"] else ""
    return f'<span class="round" title="{escape(_tip(order, entry), quote=True)}">{kept}{lost}{own}</span>'


def _visible(piece: str) -> str:
    """A rejected piece stays on its line."""
    return piece.replace("\n", "⏎")


def _tip(order: int, entry: Mapping[str, Any]) -> str:
    parts = [f"Round {order}: {len(entry['accepted'])} kept"]
    drafts = [f"“{_visible(piece)}” ✓" for piece in entry["accepted"]]
    drafts += [f"“{_visible(piece)}” cut" for piece in entry["dropped"][: entry["cut"]]]
    drafts += [
        f"“{_visible(piece)}” ✗" if i == 0 else f"“{_visible(piece)}”"
        for i, piece in enumerate(entry["dropped"][entry["cut"] :])
    ]
    if drafts:
        parts.append("drafted " + " ".join(drafts))
    if entry["target"] is not None:
        parts.append(f"then the target's own “{_visible(entry['target'])}”")
    if entry["confidence"]:
        parts.append("confidence " + " ".join(f"{value:.2f}" for value in entry["confidence"]))
    return "; ".join(parts) + "."


def training(report: Mapping[str, Any]) -> str:
    log = report["training"]
    series = log["series"]
    panels = []
    for title, names in CURVES:
        name = next((name for name in names if len(series.get(name, ())) > 1), None)
        if name is not None:
            panels.append(f'<div class="panel"><h3>{escape(title)}</h3>{_curve(title, name, series)}</div>')
    if not panels:
        return absent("No training log came with this run.")
    last = table(
        "Every logged number, at its last step",
        ["name", "value"],
        [[name, f"{value:.6g}"] for name, value in sorted(log["last"].items())],
    )
    return (
        f"<p>{log['steps']:,} optimiser steps.</p>"
        f'<div class="grid2">{"".join(panels)}</div>{folded("Last values", last)}'
    )


def _curve(title: str, name: str, series: Mapping[str, Sequence[Sequence[float]]]) -> str:
    lines = [Series(name="training", points=[(x, y) for x, y in series[name]], tone="a", marker="none")]
    held = next(
        (other for other in (f"validation_{name}", f"validation/{name}", f"val_{name}") if other in series), None
    )
    if held:
        marker = "square" if len(series[held]) < 40 else "none"
        lines.append(
            Series(name="held out", points=[(x, y) for x, y in series[held]], tone="b", dashed=True, marker=marker)
        )
    values = [y for line in lines for _, y in line.points if y is not None]
    low, high = min(values), max(values)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    floor = 0.0 if low >= 0 and low < 0.5 * high else low - margin
    return line_chart(
        lines,
        title=f"{title} over training",
        x_label="step" + (" (dashed: held out)" if held else ""),
        y_label="",
        x_range=(lines[0].points[0][0], lines[0].points[-1][0]),
        y_range=(floor, high + margin),
        height=190,
    )


def cache(report: Mapping[str, Any]) -> str:
    info = report["cache"]
    if not info or not info["bytes_per_token"]:
        return absent("No target cache figures came with this run.")
    rows = [("this cache", list(info["parts"].items()))]
    if info["reference_bytes_per_token"]:
        rows.append(("the reference, 16 bits a number", [("states", info["reference_bytes_per_token"])]))
    chart = stacked_bar(rows, title="Target cache, bytes a token", unit=lambda size: f"{size:,.0f} B a token")
    listing = table(
        "Target cache by part",
        ["part", "bytes a token", "share"],
        [
            [name, f"{size:,.1f}", f"{100 * size / info['bytes_per_token']:.1f}%"]
            for name, size in [*info["parts"].items(), ("together", info["bytes_per_token"])]
        ],
    )
    facts = _bytes(info["bytes"]) if info["bytes"] else "Size unknown"
    facts += f" for {info['tokens']:,} tokens" if info["tokens"] else ""
    facts += f" of {info['sequences']:,} sequences" if info["sequences"] else ""
    facts += f", {number(info['ratio'], 1)} times smaller than the reference" if info["ratio"] else ""
    codecs = (
        folded("Codecs and their measured errors", f"<pre>{escape(json.dumps(info['codecs'], indent=2))}</pre>")
        if info["codecs"]
        else ""
    )
    return (
        f"<p>{facts}. This is what the target thought, as training reads it.</p>"
        f'<div class="grid2"><div class="panel">{chart}</div><div class="panel">{listing}{codecs}</div></div>'
    )


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_inline(entry)}" for name, entry in value.items())
    if isinstance(value, list):
        return ", ".join(_inline(entry) for entry in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def data(report: Mapping[str, Any]) -> str:
    info = report["data"]
    if not info:
        return absent("Nothing was recorded about the conversations.")
    outputs = table(
        "Evaluation outputs",
        ["drafter", "temperature", "outputs", "empty", "looping", "repetitive", "identical", "cut by length"],
        [
            [
                name_of(entry["drafter"]),
                f"{entry['temperature']:g}",
                entry["completions"],
                len(entry["empty"]),
                len(entry["looping"]),
                len(entry["repetitive"]),
                entry["identical"],
                entry["cut_by_length"],
            ]
            for entry in report["outputs"]
        ],
    )
    excerpt = info.get("excerpt")
    quote = ""
    if excerpt:
        quote = (
            f'<h3>A row of it</h3><div class="prompt">{escape(excerpt.get("prompt", ""))}</div>'
            f'<div class="text">{escape(excerpt.get("answer", ""))}</div>'
        )
    pairs = _pairs({name: value for name, value in info.items() if name != "excerpt"})
    return (
        "<p>Which prompts, who answered them, and how the answers ended.</p>"
        f'<div class="grid2"><div class="panel">{pairs}</div><div class="panel">{quote or absent("No excerpt.")}</div>'
        f'<div class="panel wide">{outputs}</div></div>'
    )


def _pairs(values: Mapping[str, Any]) -> str:
    items = []
    for name, value in values.items():
        long = isinstance(value, str) and len(value) > 40
        shown = f"<code>{escape(value)}</code>" if long else escape(_inline(value))
        items.append(f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{shown}</dd>")
    return f'<dl class="pairs">{"".join(items)}</dl>'


def provenance(report: Mapping[str, Any]) -> str:
    flat: dict[str, Any] = {}
    folds = []
    for name, value in report["provenance"].items():
        if isinstance(value, Mapping) and len(json.dumps(value, default=str)) > 160:
            folds.append(folded(name, f"<pre>{escape(json.dumps(value, indent=2, ensure_ascii=False))}</pre>"))
        else:
            flat[name] = " ".join(map(str, value)) if name == "command" and isinstance(value, list) else value
    subject = report["subject"]
    for name in ("target", "drafter", "contract"):
        if subject.get(name):
            folds.append(folded(name, f"<pre>{escape(json.dumps(subject[name], indent=2, ensure_ascii=False))}</pre>"))
    if not flat and not folds:
        return absent("No provenance came with this run.")
    return f'<div class="panel">{_pairs(flat)}{"".join(folds)}</div>'


def terms(report: Mapping[str, Any]) -> str:
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(meaning)}</dd></div>" for name, meaning in TERMS.items())
    return f'<dl class="terms">{items}</dl>'
