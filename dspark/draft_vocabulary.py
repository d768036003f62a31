"""A reduced draft vocabulary: which tokens, and the mapping that engines read.

V target vocabulary, Vd draft vocabulary. The verifier still uses all of V; only proposals are limited.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dspark.config import SettingError


def most_frequent_tokens(counts: Tensor, size: int, *, always: Iterable[int] = ()) -> Tensor:
    """The `size` most frequent token ids [Vd], ascending, of counts [V]; `always` (stop tokens, say) come first.

    Ties go to the smaller id. Raises SettingError when `size` cannot hold them.
    """
    forced = sorted(set(always))
    if not max(len(forced), 1) <= size <= len(counts):
        raise SettingError(
            f"draft_vocab_size is {size}; allowed: {max(len(forced), 1)} to {len(counts)} "
            "(option `drafter.draft_vocab_size`)"
        )
    order = torch.argsort(counts, descending=True, stable=True)
    order = order[~torch.isin(order, torch.tensor(forced, dtype=order.dtype))]
    return torch.cat([torch.tensor(forced, dtype=torch.long), order[: size - len(forced)]]).sort().values


def engine_mapping(draft_token_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(d2t [Vd] i64, t2d [V] bool): target id = draft id + d2t[draft id], and which target ids are drafted."""
    ids = draft_token_ids.long().cpu()
    drafted = torch.zeros(vocab_size, dtype=torch.bool)
    drafted[ids] = True
    return ids - torch.arange(len(ids)), drafted


def mapped_tokens(d2t: Tensor) -> Tensor:
    """The draft token ids [Vd] of a mapping's offsets."""
    return d2t.long() + torch.arange(len(d2t), device=d2t.device)
