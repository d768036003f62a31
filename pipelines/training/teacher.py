"""From the teacher as a cache keeps it to the teacher as the loss takes it. P teacher positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from dspark.packing import DenseTeacher, SparseTeacher, Teacher, TopOffsets

if TYPE_CHECKING:
    from storage.cache.target_cache import StoredRow

Finish = Callable[[Tensor], Tensor]


def teacher_of(stored: StoredRow, finish: Finish | None = None) -> Teacher:
    """A row's teacher, a row of it for each teacher position.

    `finish` makes last states of the last captured layer's outputs, for a cache whose teacher is recomputed. Raises
    ValueError where the cache has no teacher, or one that cannot be used here.
    """
    kept = stored.teacher
    if kept is None:
        raise ValueError(f"sample {stored.sample_id!r}: the cache keeps no teacher; build it with cache.teacher_codec")
    if kept.tail_mass is not None:
        assert kept.top_ids is not None
        assert kept.top_values is not None
        return SparseTeacher(token_ids=kept.top_ids, log_probs=kept.top_values, tail_mass=kept.tail_mass)
    states = kept.states
    if kept.source is not None:
        if finish is None:
            raise ValueError(f"sample {stored.sample_id!r}: its teacher is recomputed by the target's upper layers")
        states = finish(kept.source)[stored.teacher_positions].to(stored.features.dtype)
    assert states is not None
    offsets = None
    if kept.top_ids is not None and kept.top_values is not None:
        offsets = TopOffsets(token_ids=kept.top_ids, values=kept.top_values)
    return DenseTeacher(states=states, offsets=offsets)
