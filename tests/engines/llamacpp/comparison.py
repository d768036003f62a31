"""Is what the engine did what our own evaluation did? Pure functions over token ids and rounds.

`position` counts the output tokens that stand before a round; a greedy decoder that takes its first token from the
prompt's pass has its first round at position 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Round:
    """One draft block. `accepted` is what the verification rule accepted among `draft_ids`."""

    position: int
    draft_ids: tuple[int, ...]
    accepted: int


@dataclass(frozen=True, kw_only=True)
class RoundAgreement:
    """Sums over rounds; add them up with `+` and read the shares."""

    ours: int = 0
    engine: int = 0
    paired: int = 0
    same_accepted: int = 0
    same_drafts: int = 0
    tokens_compared: int = 0
    tokens_equal: int = 0
    ours_accepted: int = 0
    engine_accepted: int = 0

    def __add__(self, other: "RoundAgreement") -> "RoundAgreement":
        mine, theirs = asdict(self), asdict(other)
        return RoundAgreement(**{name: mine[name] + theirs[name] for name in mine})

    @property
    def ours_per_round(self) -> float:
        return self.ours_accepted / max(self.ours, 1)

    @property
    def engine_per_round(self) -> float:
        return self.engine_accepted / max(self.engine, 1)

    @property
    def share_identical(self) -> float:
        """Share of our rounds for which the engine has one at the same position, with as many accepted drafts."""
        return self.same_accepted / max(self.ours, 1)

    def figures(self) -> dict[str, float]:
        shares = {
            "ours_accepted_per_round": self.ours_per_round,
            "engine_accepted_per_round": self.engine_per_round,
            "share_of_rounds_with_equal_accepted": self.share_identical,
            "share_of_rounds_with_equal_drafts": self.same_drafts / max(self.ours, 1),
            "share_of_equal_draft_tokens": self.tokens_equal / max(self.tokens_compared, 1),
        }
        return {**asdict(self), **{name: round(value, 5) for name, value in shares.items()}}


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ (one being longer counts), None when equal."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def without_stop(ids: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
    """The output up to its first stop token, which some decoders return and some do not."""
    for index, token in enumerate(ids):
        if token in stop_ids:
            return list(ids[:index])
    return list(ids)


def place(rounds: Sequence[tuple[tuple[int, ...], int]], first_position: int = 1) -> list[Round]:
    """(draft ids, accepted) in order -> rounds with their positions: each commits its accepted drafts and one more."""
    placed, position = [], first_position
    for draft_ids, accepted in rounds:
        placed.append(Round(position=position, draft_ids=draft_ids, accepted=accepted))
        position += accepted + 1
    return placed


def compare_rounds(ours: Sequence[Round], engine: Sequence[Round], max_new_tokens: int) -> RoundAgreement:
    """Rounds of one request, paired by position.

    llama.cpp never verifies more drafts than the token limit leaves room for (and one of its own after them); the same
    cut is applied to ours before comparing, and a round without room is left out on both sides.
    """
    room = {r.position: max_new_tokens - r.position - 1 for r in (*ours, *engine)}
    ours = [r for r in ours if room[r.position] > 0]
    theirs: Mapping[int, Round] = {r.position: r for r in engine if room[r.position] > 0}
    total = RoundAgreement(
        ours=len(ours),
        engine=len(theirs),
        ours_accepted=sum(min(r.accepted, room[r.position]) for r in ours),
        engine_accepted=sum(r.accepted for r in theirs.values()),
    )
    for mine in ours:
        other = theirs.get(mine.position)
        if other is None:
            continue
        equal = [a == b for a, b in zip(mine.draft_ids, other.draft_ids, strict=False)]
        total += RoundAgreement(
            paired=1,
            same_accepted=int(min(mine.accepted, room[mine.position]) == other.accepted),
            same_drafts=int(all(equal)),
            tokens_compared=len(equal),
            tokens_equal=sum(equal),
        )
    return total
