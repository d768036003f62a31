"""Sample texts, round by round: what was drafted, what was kept, what came from the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Decode = Callable[[Sequence[int]], str]
LONGEST = 160
FEWEST = 4  # rounds of a text worth showing, where there is a longer one
_REQUEST = ["temperature", "domain", "request_id", "seed", "policy", "prompt_id", "turn"]
_CONTEXT = 8


def piece(decode: Decode, before: Sequence[int], token: int) -> str:
    """The text that `token` adds after `before`; half a character is shown by its replacement character."""
    context = list(before)[-_CONTEXT:]
    head, whole = decode(context), decode([*context, token])
    if whole.startswith(head):
        return whole[len(head) :]
    return decode([token])


def sample_texts(
    events: pa.Table, prompts: Mapping[str, str], decode: Decode | None, *, drafter: str = "dspark"
) -> list[dict[str, Any]]:
    """One answer a domain and temperature: the request whose accepted length is nearest to its domain's.

    Without `decode` token ids stand for their text.
    """
    show = decode or (lambda ids: "".join(f"⟨{token}⟩" for token in ids))
    own = events.filter(pc.equal(events["drafter"], drafter))
    lengths = own.group_by(_REQUEST).aggregate([("committed", "mean"), ("committed", "count")]).to_pylist()
    chosen = []
    for temperature, domain in sorted({(row["temperature"], row["domain"]) for row in lengths}):
        here = [row for row in lengths if (row["temperature"], row["domain"]) == (temperature, domain)]
        middle = sum(row["committed_mean"] for row in here) / len(here)
        chosen.append(
            min(
                here,
                key=lambda row: (
                    row["committed_count"] < FEWEST,
                    abs(row["committed_mean"] - middle),
                    [str(row[name]) for name in _REQUEST],
                ),
            )
        )
    samples = []
    for row in chosen:
        keep = pa.array(np.ones(len(own), dtype=bool))
        for name in _REQUEST:
            keep = pc.and_(keep, pc.equal(own[name], row[name]))
        rounds = sorted(own.filter(keep).to_pylist(), key=lambda event: event["round"])
        samples.append(_sample(rounds, prompts.get(row["prompt_id"], ""), show))
    return samples


def _sample(rows: Sequence[Mapping[str, Any]], prompt: str, decode: Decode) -> dict[str, Any]:
    text: list[int] = []
    rounds = []
    # The first token comes from the pass over the prompt and belongs to no round: it is the first round's anchor.
    opening = _grow(text, rows[0]["anchor_id"], decode) if rows[0]["position"] > 0 else ""
    for row in rows:
        if len(text) >= LONGEST:
            break
        committed = row["committed_ids"]
        kept = len(committed) - int(row["bonus"])
        drafts = row["draft_ids"][: row["scheduled"]]
        accepted = [_grow(text, token, decode) for token in committed[:kept]]
        draft_text = list(text)
        # A cut round stopped inside what was accepted: what follows was right but is not part of the text.
        dropped = [_grow(draft_text, token, decode) for token in drafts[kept:]]
        target = _grow(text, committed[-1], decode) if row["bonus"] and committed else None
        rounds.append(
            {
                "accepted": accepted,
                "dropped": dropped,
                "cut": max(0, row["accepted_raw"] - kept),
                "rejected": row["accepted_raw"] < len(drafts),
                "target": target,
                "confidence": [round(1 / (1 + float(np.exp(-logit))), 3) for logit in row["confidence_logits"]],
            }
        )
    first = rows[0]
    tokens = sum(len(entry["accepted"]) + (entry["target"] is not None) for entry in rounds)
    return {
        "request_id": first["request_id"],
        "domain": first["domain"],
        "temperature": first["temperature"],
        "prompt": prompt,
        "opening": opening,
        "tokens": tokens,
        "complete": len(rounds) == len(rows),
        "accepted_length": float(np.mean([row["committed"] for row in rows])),
        "rounds": rounds,
    }


def _grow(text: list[int], token: int, decode: Decode) -> str:
    shown = piece(decode, text, token)
    text.append(token)
    return shown
