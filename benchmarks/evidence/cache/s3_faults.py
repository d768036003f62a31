"""Caches built on and read from an S3-compatible server a share of whose answers is bad: right bytes or a named error.

The server is moto on loopback, the faults (500, 503, connections cut before or inside the answer, delays) come from a
proxy before it. What fails with a named error is started again, as a user would, and must end in the right bytes.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from cache_builders import SAMPLES, build, make_plan, make_row
from common import parser, record
from object_stores import CREDENTIALS, FaultyProxy, make_bucket, s3_server

from storage.cache.records import CacheCorrupt
from storage.cache.target_cache import TargetCache
from storage.files import filesystems
from storage.files.filesystems import Folder


def until_done(what: str, work: Any, errors: Counter[str]) -> Any:
    """The result, after as many starts as it takes; errors have to name a file of the store."""
    for _ in range(50):
        try:
            return work()
        except (OSError, CacheCorrupt) as error:
            if "s3://bucket/" not in str(error):
                raise AssertionError(f"an error without a name: {error!r}") from error
            errors[f"{what}: {type(error).__name__}"] += 1
    raise AssertionError(f"{what}: fifty starts were not enough")


def trial(store: int, scratch: Path, rate: float, seed: int) -> dict[str, Any]:
    proxy = FaultyProxy(store, rate=rate, seed=seed)
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{proxy.port}"
    url, errors = f"s3://bucket/cache-{rate}-{seed}", Counter[str]()
    plan = make_plan("bf16")
    until_done("build", lambda: build(url, plan), errors)
    built = proxy.faults

    def read() -> None:
        cache = TargetCache.open(url, local_copy=scratch / f"copy-{rate}-{seed}", local_copy_bytes=60_000)
        for index, sample in enumerate(SAMPLES):
            row, exact = cache.row(index), make_row(*sample)
            assert torch.equal(row.hidden_states, exact.hidden_states.flatten(1))  # type: ignore[union-attr]

    until_done("read", read, errors)
    assert until_done("verify", lambda: TargetCache.open(url).verify(), errors) == []
    proxy.close()
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{store}"
    local, remote = Folder(scratch / "local"), Folder(url)
    assert remote.files() == local.files()
    assert all(remote.read(name) == local.read(name) for name in local.files())
    return {
        "rate": rate,
        "seed": seed,
        "requests": proxy.counts.total(),
        "faults": proxy.faults,
        "of_them_while_building": built,
        "named_errors": dict(errors),
        "right_bytes": True,
    }


def run(trials: int, seed: int) -> dict[str, Any]:
    os.environ.update(CREDENTIALS)
    filesystems.PAUSE = 0.02
    with tempfile.TemporaryDirectory() as folder, s3_server() as store:
        make_bucket(store, "bucket")
        build(Path(folder) / "local", make_plan("bf16"))
        rates = [0.05] * trials + [0.3, 0.6]
        found = [trial(store, Path(folder), rate, seed + number) for number, rate in enumerate(rates)]
    kinds = {"requests": sum(t["requests"] for t in found), "faults": sum(t["faults"] for t in found)}
    return {"trials": found, **kinds}


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--trials", type=int, default=8)
    options = arguments.parse_args()
    record(options.output, lambda: run(options.trials, options.seed))
