"""What decoding is asked for and what it leaves behind. No torch here: reports read these without it.

A *round* is one draft and one verification of one row. Its event is the only source of every acceptance figure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to answer. `seed` and the position alone decide every random draw of the answer."""

    request_id: str
    prompt_ids: list[int]
    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class RoundEvent:
    """One round of one row. Lists named "per slot" have `scheduled` entries, one for each verified draft token.

    accepted_raw counts what the rule accepted, before stop tokens and the length limit; committed counts the tokens
    appended to the answer, the target's own token included when `bonus`. A slot is `reached` when every slot before
    it was accepted and none of them held a stop token: only reached slots say something about acceptance.
    """

    round: int
    position: int  # output tokens before this round
    anchor_id: int
    draft_ids: list[int]  # all proposed tokens, also those not scheduled
    proposed: int
    scheduled: int
    accepted_raw: int
    committed: int
    bonus: bool  # the target's own token after the accepted prefix was appended
    stop_cut: bool  # a stop token among the accepted drafts ended the answer
    confidence_logits: list[float]  # one for each proposed token; empty without a confidence head
    accepted: list[bool]  # per slot
    reached: list[bool]  # per slot
    acceptance_rate: list[float]  # per slot: sum of min(draft, target) where reached, else 0
    committed_ids: list[int]
    draft_ms: float  # wall time of the batch's draft in this step, with the taking in of what the last one committed
    verify_ms: float  # wall time of the batch's verification in this step
    batch_rows: int  # rows in the step
    batch_tokens: int  # tokens verified in the step, all rows together

    def to_dict(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Completion:
    """An answer. The first token comes from the prompt's own pass and belongs to no round."""

    request_id: str
    prompt_ids: list[int]
    output_ids: list[int]
    finish_reason: FinishReason
    rounds: list[RoundEvent]
    seconds: float  # from the row's admission to its end
    logit_gaps: list[float] = field(default_factory=list)  # top-1 minus top-2 target logit at each output token


@dataclass(frozen=True)
class Commit:
    """What becomes of a round's tokens."""

    token_ids: list[int]
    drafts_kept: int
    bonus: bool
    stop_cut: bool
    finish_reason: FinishReason | None


def commit(accepted_ids: Iterable[int], next_id: int, stop_token_ids: frozenset[int], room: int) -> Commit:
    """Apply stop tokens and the length limit to a round's accepted drafts and the target's next token.

    The one place where answers end: the first token after a prompt (no drafts), the bonus token, a stop token inside
    the accepted prefix (kept; what follows is dropped) and `room`, how many tokens the answer may still take (>= 1).
    """
    assert room >= 1
    kept: list[int] = []
    for token in accepted_ids:
        kept.append(token)
        if token in stop_token_ids:
            return Commit(kept, len(kept), bonus=False, stop_cut=True, finish_reason="stop")
        if len(kept) == room:
            return Commit(kept, len(kept), bonus=False, stop_cut=False, finish_reason="length")
    drafts = len(kept)
    kept.append(next_id)
    reason: FinishReason | None = None
    if next_id in stop_token_ids:
        reason = "stop"
    elif len(kept) == room:
        reason = "length"
    return Commit(kept, drafts, bonus=True, stop_cut=False, finish_reason=reason)
