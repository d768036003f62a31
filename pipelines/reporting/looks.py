"""Names and looks of what a report compares: decodings, length policies, domains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Points that rest on fewer rounds or predictions are drawn hollow.
FEW = 20
NAMES = {
    "dspark": "this drafter",
    "no-sequential-head": "without sequential head",
    "one-slot": "first slot alone",
    "plain": "plain decoding",
}
POLICY_NAMES = {
    "none": "no drafting",
    "one-slot": "one slot",
    "static": "fixed length",
    "full": "whole block",
    "threshold": "threshold",
    "scheduler": "scheduler",
    "two-steps-behind": "two steps behind",
}


@dataclass(frozen=True)
class Look:
    """How a line is drawn: a colour class of the style sheet, the marker of its points, and whether it is dashed."""

    tone: str
    marker: str
    dashed: bool = False


_DRAFTERS = {
    "dspark": Look("a", "circle"),
    "no-sequential-head": Look("b", "square"),
    "plain": Look("c", "diamond"),
    "one-slot": Look("e", "square"),
}
_POLICIES = {
    "none": Look("c", "none", True),
    "one-slot": Look("e", "none", True),
    "static": Look("f", "none"),
    "full": Look("b", "none"),
    "threshold": Look("d", "none"),
    "scheduler": Look("a", "none"),
    "two-steps-behind": Look("a", "none", True),
}


def listed(items: Sequence[object]) -> str:
    """`1, 2 and 3`."""
    words = [str(item) for item in items]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def name_of(drafter: str) -> str:
    return NAMES.get(drafter, drafter)


def look_of(drafter: str) -> Look:
    """Drafters that are named in the settings keep their tone from report to report."""
    return _DRAFTERS.get(drafter) or Look("df"[sum(drafter.encode()) % 2], "diamond")


def policy_look(policy: str) -> Look:
    return _POLICIES[policy]


def domain_look(domains: Sequence[str], domain: str) -> Look:
    place = list(domains).index(domain)
    return Look("adbc"[place % 4], ("circle", "diamond", "square")[place % 3])
