"""The page's charts, out of the report's records. Each returns an SVG element."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from pipelines.reporting.charts import (
    IntervalPoint,
    Series,
    bar_chart,
    interval_chart,
    line_chart,
    percent,
    stacked_bar,
)
from pipelines.reporting.looks import FEW, POLICY_NAMES, Look, domain_look, look_of, name_of, policy_look

Record = Mapping[str, Any]
Records = Sequence[Record]
QUARTERS = (0, 0.25, 0.5, 0.75, 1)
# The curves that get a chart: (title, names a training log may use, the first found is drawn).
CURVES = (
    ("Loss", ("loss", "train/loss")),
    ("Expected accepted length", ("expected_tau", "expected_accepted_length", "tau_probabilistic", "tau")),
    ("Cross-entropy", ("ce", "train/ce")),
    ("Distance to the target's distribution (L1)", ("l1", "train/l1")),
    ("Confidence loss", ("confidence", "bce", "train/bce")),
    ("Learning rate", ("learning_rate", "lr", "train/lr")),
)


def lengths_by_domain(
    rows: Records, temperature: float, domains: Sequence[str], look_of: Callable[[str], Look] = look_of
) -> Markup:
    here = [row for row in rows if row["temperature"] == temperature and row["drafter"] != "plain"]

    def point(row: Record) -> IntervalPoint:
        look = look_of(row["drafter"])
        value, low, high = row["value"], row["low"], row["high"]
        name = name_of(row["drafter"])
        return IntervalPoint(name=name, value=value, low=low, high=high, tone=look.tone, marker=look.marker)

    return interval_chart(
        [(domain, [point(row) for row in here if row["domain"] == domain]) for domain in domains],
        title=f"Accepted length by domain, temperature {temperature:g}",
        x_label="tokens a target pass",
        start=1.0,
    )


def speeds(rows: Records, temperature: float) -> Markup:
    def pace(row: Record) -> str:
        text = f"{row['tokens_per_second']:.1f} tokens/s"
        ratio = row["against_plain"]
        return text if row["drafter"] == "plain" or ratio is None else f"{text} ({ratio:.2f}×)"

    bars = [
        (name_of(row["drafter"]), row["tokens_per_second"], pace(row), look_of(row["drafter"]).tone) for row in rows
    ]
    return bar_chart(bars, title=f"Tokens a second, temperature {temperature:g}")


def slots(
    rows: Records, temperature: float, kind: str, count: int, title: str, look_of: Callable[[str], Look] = look_of
) -> Markup:
    """Acceptance by slot over all domains, a line a drafter."""
    own = [row for row in rows if row["temperature"] == temperature and row["domain"] == "all"]
    lines = [_slot_line(row, kind, name_of(row["drafter"]), look_of(row["drafter"])) for row in own]
    return _slot_chart(lines, count, title)


def slots_by_domain(rows: Records, temperature: float, domains: Sequence[str], count: int, title: str) -> Markup:
    own = [row for row in rows if row["temperature"] == temperature]
    kind = "Conditional acceptance"
    lines = [_slot_line(row, kind, row["domain"], domain_look(domains, row["domain"])) for row in own]
    return _slot_chart(lines, count, title)


def _slot_line(row: Record, kind: str, name: str, look: Any) -> Series:
    found = [(slot["slot"], slot["survival" if kind == "Survival" else "conditional"]) for slot in row["slots"]]
    return Series(
        name=name,
        points=[(slot, estimate["value"]) for slot, estimate in found],
        band=[(slot, estimate["low"], estimate["high"]) for slot, estimate in found] if row["domain"] == "all" else [],
        hollow=frozenset(slot for slot, estimate in found if estimate["rounds"] < FEW),
        tone=look.tone,
        marker=look.marker,
    )


def _slot_chart(lines: Sequence[Series], count: int, title: str) -> Markup:
    return line_chart(
        lines,
        title=title,
        x_label="draft slot",
        y_label="",
        x_range=(0.7, count + 0.3),
        y_range=(0.0, 1.0),
        x_ticks=list(range(1, count + 1)),
        y_ticks=QUARTERS,
        y_format=percent,
    )


def reliability(row: Record) -> Markup:
    lines = []
    for name, tone, marker, dashed in (("before", "b", "square", True), ("after", "a", "circle", False)):
        bins = [b for b in row[f"reliability_{name}"] if b["count"]]
        points = [(b["confidence"], b["accepted"]) for b in bins]
        few = frozenset(b["confidence"] for b in bins if b["count"] < FEW)
        lines.append(Series(name=name, points=points, tone=tone, marker=marker, dashed=dashed, hollow=few))
    most = max((b["count"] for b in row["reliability_after"]), default=0) or 1
    return line_chart(
        lines,
        title=f"Reliability, temperature {row['temperature']:g}",
        x_label="predicted survival",
        y_label="really accepted",
        x_range=(0.0, 1.0),
        y_range=(0.0, 1.0),
        x_ticks=QUARTERS,
        y_ticks=QUARTERS,
        x_format=percent,
        y_format=percent,
        diagonal=True,
        bars=[(b["low"], b["high"], 0.3 * b["count"] / most) for b in row["reliability_after"] if b["count"]],
        height=250,
    )


def thresholds(row: Record) -> Markup:
    sweep = row["thresholds"]
    lengths = [(point["threshold"], point["accepted_length"]) for point in sweep]
    verified = [(point["threshold"], point["scheduled"] + 1) for point in sweep]
    return line_chart(
        [
            Series(name="accepted length", points=lengths, tone="a", marker="none"),
            Series(name="tokens verified", points=verified, tone="c", marker="none", dashed=True),
        ],
        title=f"Accepted length against confidence threshold, temperature {row['temperature']:g}",
        x_label="confidence threshold",
        y_label="tokens a round",
        x_range=(0.0, 1.0),
        y_range=(0.0, max(max(y for _, y in verified), 2.0)),
        x_ticks=QUARTERS,
        height=200,
        cursor=True,
    )


def _policy_lines(found: Record, at: Any) -> list[Series]:
    """A line a policy, replayed, and the engine's own as single points; `at(point)` is (x, y) or None."""
    lines = []
    for name in found["policies"]:
        look = policy_look(name)
        line = [at(point) for point in found["replayed"] if point["policy"] == name]
        lines.append(Series(name=POLICY_NAMES[name], points=line, tone=look.tone, marker="none", dashed=look.dashed))
        own = [at(point) for point in found["measured"] if point["policy"] == name]
        # The line is broken between single points.
        broken = [part for x, y in filter(None, own) for part in ((x, y), (x, None))]
        if broken:
            hollow = frozenset(x for x, _ in broken)
            lines.append(Series(name=f"{POLICY_NAMES[name]}, engine", points=broken, tone=look.tone, hollow=hollow))
    return lines


def throughput(found: Record) -> Markup:
    every = [*found["replayed"], *found["measured"]]
    return line_chart(
        _policy_lines(found, lambda point: (point["tokens_per_second_user"], point["tokens_per_second"])),
        title="All users' tokens a second against those of one user",
        x_label="tokens a second, one user",
        y_label="all users together",
        x_range=(0.0, 1.04 * max(point["tokens_per_second_user"] for point in every)),
        y_range=(0.0, 1.06 * max(point["tokens_per_second"] for point in every)),
        height=260,
    )


def drafts_by_users(found: Record) -> Markup:
    users = found["users"]
    return line_chart(
        _policy_lines(
            found, lambda point: (users.index(point["users"]), point["drafts"]) if point["users"] in users else None
        ),
        title="Verified drafts a request and step, against users",
        x_label="users",
        y_label="drafts a step",
        x_range=(0.0, max(len(users) - 1, 1)),
        y_range=(0.0, found["rounds"]["slots"] + 0.3),
        x_ticks=list(range(len(users))),
        y_ticks=list(range(found["rounds"]["slots"] + 1)),
        x_format=lambda index: str(users[int(index)]),
        height=260,
        cursor=True,
    )


def training_curves(series: Mapping[str, Sequence[Sequence[float]]]) -> list[tuple[str, Markup]]:
    found = []
    for title, names in CURVES:
        name = next((name for name in names if len(series.get(name, ())) > 1), None)
        if name is not None:
            found.append((title, _curve(title, name, series)))
    return found


def _curve(title: str, name: str, series: Mapping[str, Sequence[Sequence[float]]]) -> Markup:
    lines = [Series(name="training", points=[(x, y) for x, y in series[name]], tone="a", marker="none")]
    validation = next((key for key in (f"validation_{name}", f"validation/{name}", f"val_{name}") if key in series), "")
    if validation:
        marker = "square" if len(series[validation]) < 40 else "none"
        points = [(x, y) for x, y in series[validation]]
        lines.append(Series(name="validation", points=points, tone="b", dashed=True, marker=marker))
    values = [y for line in lines for _, y in line.points if y is not None]
    low, high = min(values), max(values)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    floor = 0.0 if low >= 0 and low < 0.5 * high else low - margin
    return line_chart(
        lines,
        title=f"{title} over training",
        x_label="step" + (" (dashed: validation)" if validation else ""),
        y_label="",
        x_range=(lines[0].points[0][0], lines[0].points[-1][0]),
        y_range=(floor, high + margin),
        height=190,
    )


def cache_sizes(info: Record) -> Markup:
    rows = [("this cache", list(info["parts"].items()))]
    if info["reference_bytes_per_token"]:
        rows.append(("the reference, 16 bits a number", [("states", info["reference_bytes_per_token"])]))
    return stacked_bar(rows, title="Target cache, bytes a token", size_text=lambda size: f"{size:,.0f} B a token")
