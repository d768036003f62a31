"""What a reader should be warned of: degenerate text, too few rounds, a drafter that does not help.

Repetitive text is easy to draft, so a high accepted length on it says little. Every warning names what was
seen and how often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

FEWEST_ROUNDS = 200
_GRAM = 4
_LOOP_SHARE = 0.5
_LONGEST_PERIOD = 32
_SHORTEST_LOOP = 12


def repetition(tokens: Sequence[int]) -> float:
    """Share of n-grams that stood before in the same text; 0 for a text without repeats, 0 for a short one."""
    grams = [tuple(tokens[start : start + _GRAM]) for start in range(len(tokens) - _GRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Whether the text ends with a passage of up to 32 tokens said four times or more, 12 tokens together."""
    for period in range(1, _LONGEST_PERIOD + 1):
        length = max(4 * period, _SHORTEST_LOOP)
        tail = tokens[-length:]
        if len(tail) == length and all(tail[index] == tail[index - period] for index in range(period, length)):
            return True
    return False


def degenerate_outputs(completions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts over completions (`request_id`, `output_ids`, `finish_reason`); the ids of those that are flagged."""
    repetitive, looping, empty = [], [], []
    texts: Counter[tuple[int, ...]] = Counter()
    for row in completions:
        tokens = row["output_ids"]
        texts[tuple(tokens)] += 1
        if not tokens:
            empty.append(row["request_id"])
        elif ends_in_loop(tokens):
            looping.append(row["request_id"])
        elif repetition(tokens) > _LOOP_SHARE:
            repetitive.append(row["request_id"])
    same = sum(count for text, count in texts.items() if count > 1 and text)
    return {
        "completions": len(completions),
        "empty": sorted(empty),
        "looping": sorted(looping),
        "repetitive": sorted(repetitive),
        "identical": same,
        "cut_by_length": sum(row["finish_reason"] == "length" for row in completions),
    }


def equality_with_plain(
    drafted: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]], *, gap_tolerance: float
) -> dict[str, Any]:
    """Compare greedy outputs with plain greedy decoding, request by request.

    A difference is a tie when the target's two best logits lie at most `gap_tolerance` apart where the texts part.
    """

    def answer(row: Mapping[str, Any]) -> tuple[str, int, int]:
        return row["prompt_id"], row["turn"], row["seed"]

    reference = {answer(row): row for row in plain}
    compared, differing = 0, []
    for row in drafted:
        other = reference.get(answer(row))
        if other is None:
            continue
        compared += 1
        ours, theirs = list(row["output_ids"]), list(other["output_ids"])
        if ours == theirs:
            continue
        first = next(
            (at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
            min(len(ours), len(theirs)),
        )
        gaps = [entry["logit_gaps"][first] for entry in (row, other) if first < len(entry["logit_gaps"])]
        smallest = min(gaps, default=None)
        differing.append(
            {
                "request_id": row["request_id"],
                "first_difference": first,
                "logit_gap": smallest,
                "tie": smallest is not None and smallest <= gap_tolerance,
            }
        )
    return {
        "compared": compared,
        "equal": compared - len(differing),
        "ties": sum(entry["tie"] for entry in differing),
        "gap_tolerance": gap_tolerance,
        "differing": differing,
    }


def flags(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """Warnings of a report, gravest first: {"level": "warning" | "note", "text"}."""
    warnings, notes = [], []
    overall = {
        (row["drafter"], row["temperature"]): row for row in report["accepted_length"] if row["domain"] == "mean"
    }
    for (drafter, temperature), row in overall.items():
        if drafter != "dspark":
            continue
        at = f"temperature {temperature:g}"
        if row["rounds"] < FEWEST_ROUNDS:
            warnings.append(
                f"Only {row['rounds']} rounds at {at}; below {FEWEST_ROUNDS} the figures are little more than a guess."
            )
        without = overall.get(("no-sequential-head", temperature))
        if without and row["value"] is not None and without["value"] is not None:
            if row["value"] <= without["value"]:
                warnings.append(f"At {at} the sequential head does not lengthen what is accepted.")
            elif row["low"] is not None and without["high"] is not None and row["low"] <= without["high"]:
                notes.append(f"At {at} the intervals with and without the sequential head overlap.")
    for row in report["speed"]:
        if row["against_plain"] is not None and row["drafter"] == "dspark" and row["against_plain"] < 1:
            notes.append(
                f"Slower than plain decoding on this machine at temperature {row['temperature']:g}: "
                f"{row['against_plain']:.2f} times its speed."
            )
    _look_at_texts(report, warnings, notes)
    for row in report["confidence"]:
        before, after = row["ece_before"], row["ece_after"]
        if before is not None and after is not None and after > before:
            warnings.append(f"Calibration made the confidences worse at temperature {row['temperature']:g} (ECE).")
    return [{"level": "warning", "text": text} for text in warnings] + [{"level": "note", "text": t} for t in notes]


def _look_at_texts(report: Mapping[str, Any], warnings: list[str], notes: list[str]) -> None:
    drafted = [entry for entry in report["outputs"] if entry["drafter"] == "dspark"]
    # Where the drafter was run, its texts stand for all: they are the target's own, whoever drafts.
    for entry in drafted or report["outputs"]:
        total = entry["completions"]
        where = f"of {total} outputs of {entry['drafter']} at temperature {entry['temperature']:g}"
        for kind, words in (("empty", "are empty"), ("looping", "end in a loop"), ("repetitive", "repeat themselves")):
            if count := len(entry[kind]):
                level = warnings if count * 4 >= total else notes
                level.append(f"{count} {where} {words}; repetitive text flatters a drafter.")
        if entry["identical"] > max(1, total // 4):
            warnings.append(f"{entry['identical']} {where} are identical to another one.")
        if total and entry["cut_by_length"] * 2 > total:
            notes.append(f"{entry['cut_by_length']} {where} were cut by the length limit.")
    equality = report["equality"]
    if equality and (odd := equality["compared"] - equality["equal"] - equality["ties"]):
        warnings.append(
            f"{odd} of {equality['compared']} greedy outputs differ from plain greedy decoding by more than a tie."
        )
    block = (report["subject"].get("drafter") or {}).get("block_size")
    for row in report["accepted_length"]:
        if row["domain"] == "mean" or row["drafter"] != "dspark" or row["value"] is None:
            continue
        if block and row["value"] > 0.95 * (block + 1):
            warnings.append(
                f"Nearly every draft is accepted on {row['domain']} at temperature {row['temperature']:g}; look at "
                "the text before believing it."
            )
