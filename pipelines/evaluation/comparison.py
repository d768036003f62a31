"""Figures of a comparison: several drafters of one target, decoded on the same prompts, temperatures and seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dspark.acceptance import paired_gain
from pipelines.evaluation.figures import MEAN, PLAIN, Columns, groups
from pipelines.evaluation.quality import equality_with_plain

GAP_TOLERANCE = 1e-3


def gains(events: pa.Table, baseline: str) -> list[dict[str, Any]]:
    """How much longer each drafter's accepted length is than the baseline's: a record a temperature, drafter, domain.

    Only prompts that both answered count; 0.1 is 10% longer.
    """
    sums = {(name, temperature): _sums(rows) for name, temperature, rows in groups(events)}
    records = []
    for (name, temperature), own in sums.items():
        if name == baseline or (baseline, temperature) not in sums:
            continue
        theirs = sums[baseline, temperature]
        both: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for domain in sorted(own.keys() & theirs.keys()):
            prompts = sorted(own[domain].keys() & theirs[domain].keys())
            if prompts:
                both[domain] = (
                    np.array([own[domain][prompt] for prompt in prompts]),
                    np.array([theirs[domain][prompt] for prompt in prompts]),
                )
        parts = [([domain], domain) for domain in both] + ([(list(both), MEAN)] if both else [])
        for domains, label in parts:
            found = paired_gain([both[domain][0] for domain in domains], [both[domain][1] for domain in domains])
            place = {"drafter": name, "against": baseline, "temperature": temperature, "domain": label}
            records.append(place | found.to_dict())
    return records


def _sums(rows: Columns) -> dict[str, dict[str, tuple[int, int]]]:
    """Tokens committed and rounds by domain and prompt; a prompt's seeds and turns are added up."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for domain, prompt, committed in zip(rows["domain"], rows["prompt_id"], rows["committed"], strict=True):
        before = found.setdefault(domain, {}).get(prompt, (0, 0))
        found[domain][prompt] = (before[0] + int(committed), before[1] + 1)
    return found


def exactness(completions: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By drafter: its texts at temperature 0 beside plain greedy decoding. Empty where nothing decoded greedily."""
    greedy = [row for row in completions if row["temperature"] == 0]
    plain = [row for row in greedy if row["drafter"] == PLAIN]
    if not plain:
        return {}
    return {
        name: equality_with_plain([row for row in greedy if row["drafter"] == name], plain, gap_tolerance=GAP_TOLERANCE)
        for name in names
    }


def errors(equality: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence for each drafter whose greedy texts are not those of plain decoding, ties apart."""
    found = []
    for name, record in equality.items():
        wrong = [entry for entry in record["differing"] if not entry["tie"]]
        if wrong:
            first = f"{wrong[0]['request_id']}, token {wrong[0]['first_difference'] + 1}"
            texts = f"{len(wrong)} of {record['compared']} texts at temperature 0"
            found.append(
                f"{name}: {texts} differ from plain greedy decoding (first: {first}); its figures cannot be trusted"
            )
    return found


def account(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Who is ahead in the mean of domains, a sentence a drafter and temperature."""
    for row in records:
        if row["domain"] != MEAN:
            continue
        name, against, percent = row["drafter"], row["against"], abs(100 * row["value"])
        at = f"At temperature {row['temperature']:g}"
        if row["low"] is None:
            side = "longer" if row["value"] > 0 else "shorter"
            yield (
                f"{at} {name} is {percent:.1f}% {side} than {against} in accepted length, from too few prompts to say "
                "more."
            )
            continue
        interval = f"95% interval {100 * row['low']:+.1f} to {100 * row['high']:+.1f}%, {row['prompts']} prompts"
        if row["low"] > 0:
            yield f"{at} {name} is ahead of {against} by {percent:.1f}% ({interval})."
        elif row["high"] < 0:
            yield f"{at} {name} is behind {against} by {percent:.1f}% ({interval})."
        else:
            yield f"{at} {name} and {against} cannot be told apart: {100 * row['value']:+.1f}% ({interval})."
