"""Rows of a target cache for a person to look at. S tokens, P teacher positions, C decoded width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pipelines.errors import UserError

if TYPE_CHECKING:
    from storage.cache.shards import StoredRow
    from storage.cache.target_cache import TargetCache

TOKENS_SHOWN = 12


def describe_rows(
    cache: TargetCache, *, count: int, sample_id: str | None = None, target: str | None = None
) -> list[dict[str, Any]]:
    """`count` rows spread over the cache, or the one with `sample_id`; JSON-like.

    `target`: the model whose tokenizer shows their text.
    """
    ids = cache.sample_ids
    if sample_id is None:
        count = min(count, len(cache))
        chosen = [index * len(cache) // count for index in range(count)]
    elif sample_id in ids:
        chosen = [ids.index(sample_id)]
    else:
        raise UserError(f"no row of {cache.folder} has the id {sample_id!r}; the first ones are {', '.join(ids[:5])}")
    tokenizer = _open_tokenizer(target) if target else None
    return [_describe(index, cache.row(index, dtype=torch.float32), tokenizer) for index in chosen]


def _describe(index: int, row: StoredRow, tokenizer: Any) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "row": index,
        "sample_id": row.sample_id,
        "tokens": len(row.input_ids),
        "supervised_spans": [list(span) for span in row.spans],
        "supervised_tokens": int(row.loss_mask.sum()),
        "first_ids": row.input_ids[:TOKENS_SHOWN].tolist(),
        "features": _figures(row.hidden_states),
        "teacher_positions": len(row.teacher_positions),
    }
    for name, tensor in vars(row.teacher).items() if row.teacher is not None else ():
        if tensor is not None:
            shown[f"teacher_{name}"] = _figures(tensor)
    shown["extra"] = row.extra
    if tokenizer is not None:
        shown["text"] = _marked_text(row, tokenizer)
    return shown


def _figures(values: torch.Tensor) -> dict[str, Any]:
    """Shape, and over all tokens but the first, whose state is a world of its own, mean, deviation and largest."""
    rest = values[1:].float() if len(values) > 1 else values.float()
    shown: dict[str, Any] = {"shape": list(values.shape)}
    if rest.numel():
        shown |= {
            "mean": round(float(rest.mean()), 4),
            "deviation": round(float(rest.std(correction=0)), 4),
            "largest": round(float(rest.abs().max()), 4),
        }
    return shown


def _marked_text(row: StoredRow, tokenizer: Any) -> str:
    text, place = "", 0
    for start, end in row.spans:
        text += tokenizer.decode(row.input_ids[place:start]) + "[[" + tokenizer.decode(row.input_ids[start:end]) + "]]"
        place = end
    return text + str(tokenizer.decode(row.input_ids[place:]))


def _open_tokenizer(model: str) -> Any:
    from dspark.decoding.target import open_tokenizer
    from pipelines.settings.schema import TargetSettings
    from pipelines.target_spec import locate_target

    try:
        tokenizer = open_tokenizer(locate_target(TargetSettings(model=model))[1])
    except (OSError, ValueError) as error:
        raise UserError(f"--target {model!r}: no tokenizer can be opened there ({error})") from error
    if tokenizer is None:
        raise UserError(f"--target {model!r} has no tokenizer files")
    return tokenizer
