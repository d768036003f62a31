"""Damage of every kind done to a finished cache: one byte flipped, files cut, lost, swapped, doubled, records edited.

After each, `verify` has to name the file (and the row, where a row is hit), and reading every row has to end in
CacheCorrupt or in the right rows; nothing may be silently short or different. `verify` looks into damaged shards in a
process of its own, whose start takes seconds; here it does so for one damage in ten, and otherwise in this process.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from cache_builders import build, make_row
from common import LONG_SAMPLES, large_plan, parser, record

import storage.cache.verify
from storage.cache.records import CacheCorrupt, seal, unseal
from storage.cache.target_cache import TargetCache, verify


def reading(root: Path, exact: list[torch.Tensor]) -> str:
    """What a reader of all rows gets: "refused", or "right rows"; AssertionError if it gets anything else."""
    try:
        rows = list(TargetCache.open(root))
    except (CacheCorrupt, FileNotFoundError):
        return "refused"
    assert len(rows) == len(exact)
    for row, states in zip(rows, exact, strict=True):
        assert torch.equal(row.hidden_states, states), row.sample_id
    return "right rows"


def examine_here(jobs: list[storage.cache.verify.Job]) -> list[storage.cache.verify.Problem]:
    return [problem for job in jobs for problem in storage.cache.verify.examine_shard(job)]


def check(root: Path, names: tuple[str, ...], exact: list[torch.Tensor], counts: Counter[str]) -> None:
    """The damage to the files of these names is found by all of them, and no reader is fooled."""
    counts["checks"] += 1
    if counts["checks"] % 10 == 1:
        problems = verify(root, workers=2)
    else:
        with patch.object(storage.cache.verify, "_examine_apart", examine_here):
            problems = verify(root, workers=2)
    for name in names:
        mine = [problem for problem in problems if problem.file == name or name in problem.what]
        assert mine, f"damage to {name} went unnoticed: {problems}"
        counts["found"] += 1
        counts["row named"] += any(problem.row is not None for problem in mine)
        counts["outside any row"] += any("outside any row" in problem.what for problem in mine)
    counts[f"reading: {reading(root, exact)}"] += 1


def flips(root: Path, exact: list[torch.Tensor], count: int, generator: random.Random) -> dict[str, Any]:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for number in range(count):
        # Half by size, which is nearly always a shard, half with every file alike.
        path = generator.choices(files, sizes)[0] if number % 2 else generator.choice(files)
        place, bit = generator.randrange(path.stat().st_size), 1 << generator.randrange(8)
        with open(path, "r+b") as file:
            file.seek(place)
            old = file.read(1)
            file.seek(place)
            file.write(bytes([old[0] ^ bit]))
        kinds[path.parent.name if path.parent != root else path.name] += 1
        check(root, (str(path.relative_to(root)),), exact, counts)
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(old)
    return {"offsets": count, "files": dict(kinds), **counts}


def truncations(root: Path, exact: list[torch.Tensor]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    for shard in TargetCache.open(root)._shards.values():
        path = root / shard["shard"]
        data = path.read_bytes()
        borders = {0, len(data)} | {b["offset"] for b in shard["batches"]}
        borders |= {b["offset"] + b["bytes"] for b in shard["batches"]}
        for size in sorted({border + step for border in borders for step in (-1, 0, 1)}):
            if 0 <= size < len(data):
                path.write_bytes(data[:size])
                counts["cuts"] += 1
                check(root, (shard["shard"],), exact, counts)
        path.write_bytes(data)
    return dict(counts)


def edits(root: Path) -> Iterator[tuple[str, tuple[str, ...], Callable[[], None]]]:
    """(name, files that have to be named, the damage)."""
    first, second = "shards/unit-000000.arrow", "shards/unit-000001.arrow"
    yield "shard missing", (first,), (root / first).unlink

    def swap() -> None:
        a, b = (root / first).read_bytes(), (root / second).read_bytes()
        (root / first).write_bytes(b)
        (root / second).write_bytes(a)

    yield "shards swapped", (first, second), swap
    yield "shard overwritten by another", (second,), lambda: shutil.copyfile(root / first, root / second)  # type: ignore[func-returns-value]
    extra = "shards/unit-000099.arrow"
    yield "shard doubled under a new name", (extra,), lambda: shutil.copyfile(root / first, root / extra)  # type: ignore[func-returns-value]

    def edit(name: str, change: Callable[[dict[str, Any]], None], again: bool) -> Callable[[], None]:
        def apply() -> None:
            content = unseal((root / name).read_bytes(), name)
            seal_before = (root / name).read_bytes()
            change(content)
            data = seal(content)
            if not again:  # the old seal over new content
                old, new = (text.split(b'"seal": "')[1][:64] for text in (seal_before, data))
                data = data.replace(new, old)
            (root / name).write_bytes(data)

        return apply

    changes: dict[str, Callable[[dict[str, Any]], None]] = {
        "layers": lambda m: m["fields"]["contract"].update(target_layer_ids=[0, 1, 5]),
        "hidden size": lambda m: m["fields"].update(hidden_size=16),
        "codec": lambda m: m["codecs"]["features"].update(name="bf16-planes"),
        "number of shards": lambda m: m.update(shards=99),
        "samples' hash": lambda m: m["samples"].update(sha256="0" * 64),
        "scope": lambda m: m["fields"].update(teacher_scope="all"),
    }
    for what, change in changes.items():
        for again in (False, True):
            how = "sealed again" if again else "old seal"
            yield f"manifest: {what}, {how}", ("manifest.json",), edit("manifest.json", change, again)
    for key, value in (("rows", 3), ("bytes", 7), ("sha256", "1" * 64), ("unit", 2)):
        name = "commits/unit-000001.json"
        yield f"commit record: {key}", (name,), edit(name, lambda c, k=key, v=value: c.update({k: v}), True)  # type: ignore[misc]
    for name in ("manifest.json", "samples.arrow", "commits/unit-000000.json", "codecs/features.safetensors"):
        yield f"{name} missing", (name,), (root / name).unlink


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--count", type=int, default=200)
    options = arguments.parse_args()

    def run() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "cache"
            build(root, large_plan())
            exact = [make_row(*sample).hidden_states.flatten(1) for sample in LONG_SAMPLES]  # type: ignore[union-attr]
            assert verify(root) == []
            assert reading(root, exact) == "right rows"
            found: dict[str, Any] = {
                "cache": {
                    "bytes": sum(path.stat().st_size for path in root.rglob("*") if path.is_file()),
                    "files": sum(path.is_file() for path in root.rglob("*")),
                    "record_batches": sum(len(s["batches"]) for s in TargetCache.open(root)._shards.values()),
                },
                "one_bit_flipped": flips(root, exact, options.count, random.Random(options.seed)),
                "cut_at_batch_borders_and_one_byte_beside": truncations(root, exact),
                "edits": {},
            }
            for name in [name for name, _, _ in edits(root)]:
                copy = Path(folder) / "copy"
                shutil.copytree(root, copy)
                files, damage = next((files, damage) for title, files, damage in edits(copy) if title == name)
                damage()
                counts: Counter[str] = Counter()
                check(copy, files, exact, counts)
                found["edits"][name] = next(key for key in counts if key.startswith("reading: ")).removeprefix(
                    "reading: "
                )
                shutil.rmtree(copy)
            assert verify(root) == []
            return found

    record(options.output, run)


if __name__ == "__main__":
    main()
