"""Small caches for the tests: states are a pure function of the sample id, so any process can make them again."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from storage.cache.target_cache import (
    CachePlan,
    CacheRow,
    Codecs,
    CodecSpec,
    create_or_resume,
    finish,
    fit_codec,
    write_shard,
)

LAYERS, HIDDEN = 3, 32
LENGTHS = [7, 1, 30, 64, 12, 5, 45, 9, 28, 17, 33, 2, 50, 21]
SAMPLES = [(f"sample-{i:03d}", length) for i, length in enumerate(LENGTHS)]


def make_row(sample_id: str, length: int) -> CacheRow:
    generator = torch.Generator().manual_seed(zlib.crc32(sample_id.encode()))
    scale = torch.linspace(0.2, 5.0, LAYERS * HIDDEN).view(LAYERS, HIDDEN)
    hidden_states = torch.randn(length, LAYERS, HIDDEN, generator=generator) * scale + 1.5
    hidden_states[0] = 400.0 * torch.sin(torch.arange(LAYERS * HIDDEN)).view(LAYERS, HIDDEN)
    start = max(1, length // 2)
    spans = [(start, length)] if start < length else []
    return CacheRow(
        sample_id=sample_id,
        input_ids=torch.randint(0, 1000, (length,), generator=generator),
        spans=spans,
        hidden_states=hidden_states.to(torch.bfloat16),
        last_hidden_state=torch.randn(length, HIDDEN, generator=generator).to(torch.bfloat16),
        extra={"domain": "test", "number": length},
    )


def make_rows(samples: list[tuple[str, int]] = SAMPLES) -> list[CacheRow]:
    return [make_row(*sample) for sample in samples]


def make_plan(codec: str = "bf16", *, tokens_per_shard: int = 80, **changes: object) -> CachePlan:
    spec = CodecSpec(name=codec)
    options: dict[str, object] = {
        "contract": {"target_name": "tiny", "target_layer_ids": [0, 1, 2]},
        "inputs": {"seed": 1},
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "samples": SAMPLES,
        "hidden_states": spec,
        "teacher": spec,
        "tokens_per_shard": tokens_per_shard,
    }
    return CachePlan(**{**options, **changes})  # type: ignore[arg-type]


def fit(plan: CachePlan) -> Codecs:
    rows = make_rows(list(plan.samples))
    assert plan.teacher is not None
    hidden_states = fit_codec(
        plan.hidden_states, [(r.hidden_states.flatten(1), True) for r in rows], width=LAYERS * HIDDEN, layers=LAYERS
    )
    teacher = fit_codec(plan.teacher, [(r.last_hidden_state, True) for r in rows], width=HIDDEN)
    return Codecs(hidden_states=hidden_states, teacher=teacher)


def rows_of(plan: CachePlan, shard: int) -> Iterator[CacheRow]:
    start, stop = plan.shards[shard]
    return (make_row(*sample) for sample in plan.samples[start:stop])


def build(root: Path | str, plan: CachePlan | None = None) -> CachePlan:
    plan = plan or make_plan()
    done = create_or_resume(root, plan, lambda: fit(plan))
    for shard in range(len(plan.shards)):
        if shard not in done:
            write_shard(root, shard, rows_of(plan, shard))
    finish(root)
    return plan


def folder_bytes(root: Path) -> dict[str, str]:
    """SHA-256 of every file below the folder."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
