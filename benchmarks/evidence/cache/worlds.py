"""Training reads {1,2,4,8} ranks wide, stops at a random step, and goes on {1,2,4,8} ranks wide: the same sequence.

Every rank reads its share of each global batch from a real cache, with or without worker processes, and notes what came
at which place of the batch. Put together in the order of the places (nothing is sorted by sample), the samples of all
steps must be those of one rank that never stopped: none twice, none missing, the epoch's end in the middle included.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cache_builders import build, make_plan
from common import parser, record
from dealing import deal

from storage.cache.target_cache import TargetCache
from storage.order import global_batches, position, steps_per_epoch

BATCH, SEED = 7, 5
WORLDS = (1, 2, 4, 8)


def hands(
    cache: TargetCache, steps: range, rank: int, ranks: int, window: int | None
) -> Iterator[tuple[int, int, int]]:
    """Everything that a rank reads."""
    in_epoch = steps_per_epoch(len(cache), BATCH)
    for step in steps:
        epoch, number = position(step, in_epoch)
        batches = global_batches(
            len(cache), BATCH, seed=SEED, epoch=epoch, rows_per_shard=cache.rows_per_shard, window=window
        )
        batch = batches[number]
        for row in deal(batch, cache.lengths, ranks)[rank]:
            yield step, batch.tolist().index(int(row)), int(row)


def read(cache: TargetCache, steps: range, ranks: int, workers: int, window: int | None) -> list[str]:
    """Sample ids that all ranks got, in the order of steps and places."""
    got: dict[tuple[int, int], str] = {}
    for rank in range(ranks):
        mine = list(hands(cache, steps, rank, ranks, window))
        for (step, place, _), row in zip(mine, cache.rows([row for *_, row in mine], workers=workers), strict=True):
            assert (step, place) not in got, f"two ranks read place {place} of step {step}"
            got[step, place] = row.sample_id
    return [got[key] for key in sorted(got)]


def run(seed: int) -> dict[str, Any]:
    generator = random.Random(seed)
    samples = [(f"sample-{number:03d}", generator.randrange(2, 90)) for number in range(60)]
    compared = 0
    cuts = []
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), make_plan("int8", samples=samples, tokens_per_shard=400))
        cache = TargetCache.open(folder)
        total = 2 * steps_per_epoch(len(cache), BATCH) + 3
        for window in (None, 2):
            straight = read(cache, range(total), 1, 0, window)
            assert sorted(straight[: len(cache)]) == sorted(cache.sample_ids)
            for before in WORLDS:
                for after in WORLDS:
                    cut = generator.randrange(1, total)
                    workers = 2 if (before, after) in ((8, 1), (4, 2)) else 0  # their start takes seconds
                    parts = read(cache, range(cut), before, 0, window)
                    parts += read(cache, range(cut, total), after, workers, window)
                    assert parts == straight, (before, after, cut, window)
                    compared += 1
                    cuts.append(
                        {
                            "ranks": [before, after],
                            "resumed_at_step": cut,
                            "of": total,
                            "window": window,
                            "workers": workers,
                        }
                    )
    return {"samples": len(samples), "global_batch": BATCH, "identical_sequences": compared, "runs": cuts}


if __name__ == "__main__":
    options = parser(__doc__).parse_args()
    record(options.output, lambda: run(options.seed))
