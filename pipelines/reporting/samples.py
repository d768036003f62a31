"""Sample texts, round by round: what was drafted, what was kept, what came from the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

Decode = Callable[[Sequence[int]], str]
LONGEST = 160
PER_DOMAIN = 1
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
    rows = [row for row in events.to_pylist() if row["drafter"] == drafter]
    answers: dict[tuple[float, str, str, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["temperature"], row["domain"], row["request_id"], row["seed"], row["policy"])
        answers.setdefault(key, []).append(row)
    chosen = []
    for temperature, domain in sorted({key[:2] for key in answers}):
        candidates = {key: group for key, group in answers.items() if key[:2] == (temperature, domain)}
        lengths = {key: float(np.mean([row["committed"] for row in group])) for key, group in candidates.items()}
        middle = float(np.mean(list(lengths.values())))
        nearest = sorted(candidates, key=lambda key: (len(candidates[key]) < 4, abs(lengths[key] - middle), key))
        chosen += nearest[:PER_DOMAIN]
    return [
        _sample(sorted(answers[key], key=lambda row: row["round"]), prompts.get(key[2], ""), show) for key in chosen
    ]


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
