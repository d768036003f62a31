"""A reduced draft vocabulary: which tokens, and the mapping that engines read.

V target vocabulary, Vd draft vocabulary. The verifier still uses all of V; only proposals are limited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dspark.registry import SettingError


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


def mapped_tokens(mapping: Mapping[str, Tensor], vocab_size: int) -> Tensor:
    """The draft token ids [Vd], ascending, of a mapping's `d2t` [Vd] offsets.

    Raises SettingError for ids that are no tokens of the target, that do not rise, or that `t2d` [V] does not name.
    """
    d2t, t2d = mapping["d2t"], mapping["t2d"]
    if d2t.is_floating_point() or d2t.dtype == torch.bool or t2d.dtype != torch.bool:
        raise SettingError(f"d2t is {d2t.dtype} and t2d {t2d.dtype}; expected integer offsets and a bool mask")
    ids = d2t.long() + torch.arange(len(d2t), device=d2t.device)
    if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size or bool((ids.diff() <= 0).any()):
        raise SettingError(f"d2t does not give rising token ids from 0 to {vocab_size - 1}")
    if not torch.equal(t2d.nonzero().flatten(), ids):
        raise SettingError("d2t and t2d name different draft tokens")
    return ids
