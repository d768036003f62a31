"""Every byte of a cache checked; what is wrong is named by file and, inside a shard, by row."""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike
from typing import Any

import pyarrow as pa

from storage.cache import schema
from storage.cache.commits import (
    COMPLETE,
    MANIFEST,
    commit_name,
    committed_shards,
    open_folder,
    read_complete,
    shard_name,
)
from storage.cache.records import unseal
from storage.cache.shards import ShardReader, checksum_of
from storage.errors import WHOLE, CacheCorrupt, MissingFile, StorageCorrupt, StorageError
from storage.files.filesystems import Folder, is_temporary


@dataclass(frozen=True)
class Problem:
    """Something that is not as it was written. `row` is the row within the shard, `sample_id` that of the plan."""

    file: str
    what: str
    row: int | None = None
    sample_id: str | None = None

    def __str__(self) -> str:
        place = f", row {self.row} ({self.sample_id!r})" if self.row is not None else ""
        return f"{self.file}{place}: {self.what.removeprefix(f'{self.file}: ')}"


def verify(root: str | PathLike[str], *, workers: int = 1) -> list[Problem]:
    """All problems of a finished cache (or of the committed part of an unfinished one); none means sound.

    Shards are hashed in `workers` threads. FileNotFoundError if there is no cache at all.
    """
    folder = Folder(root)
    if not folder.exists(MANIFEST) and not folder.exists(COMPLETE):
        raise MissingFile(f"{folder} holds no target cache (no {MANIFEST}); check the path")
    problems: list[Problem] = []
    complete: dict[str, Any] | None = None
    names = folder.files()
    if COMPLETE in names:
        try:
            complete = unseal(folder.read(COMPLETE), COMPLETE)
            schema.checked(schema.Complete, complete, COMPLETE, WHOLE)
        except StorageCorrupt as error:
            problems.append(Problem(COMPLETE, str(error)))
            complete = None
    for name, digest in (complete or {}).get("files", {}).items():
        if name not in names:
            problems.append(Problem(name, "missing"))
            continue
        try:
            whole = hashlib.sha256(folder.read(folder.inside(name, COMPLETE))).hexdigest() == digest
            what = "" if whole else "its SHA-256 is not the one that the cache was finished with"
        except StorageCorrupt as error:
            what = str(error)
        if what:
            problems.append(Problem(name, what))
    try:
        opened = open_folder(folder)
        if complete is not None:
            complete = read_complete(opened)
    except (StorageError, FileNotFoundError) as error:
        return problems or [Problem(MANIFEST, str(error))]
    if complete is not None:
        records = {record["unit"]: record for record in complete["shards"]}
        problems += _check_commits(folder, records, names)
    else:
        records = committed_shards(opened)
        unsound = [u for u in range(opened.num_shards) if commit_name(u) in names and u not in records]
        problems += [Problem(commit_name(u), "damaged, or its shard is missing or short") for u in unsound]
    ids = opened.samples.sample_ids
    starts = opened.samples.starts
    owners = {record["sha256"]: shard for shard, record in records.items()}
    jobs = [
        (folder.url, record, ids[starts[shard] : starts[shard + 1]], owners)
        for shard, record in sorted(records.items())
        if _present(record, names, problems)
    ]
    problems += _check_shards(jobs, workers)
    problems += _check_strangers(names, complete, opened.num_shards)
    return problems


def _present(record: Mapping[str, Any], names: Mapping[str, int], problems: list[Problem]) -> bool:
    if record["shard"] in names:
        return True
    problems.append(Problem(record["shard"], f"missing (shard {record['unit']}, {record['rows']} rows)"))
    return False


def _check_commits(folder: Folder, records: Mapping[int, Any], names: Mapping[str, int]) -> list[Problem]:
    problems = []
    for shard, record in records.items():
        name = commit_name(shard)
        if name not in names:
            problems.append(Problem(name, "missing"))
            continue
        try:
            if unseal(folder.read(name), name) != record:
                problems.append(Problem(name, "not the record that the cache was finished with"))
        except StorageCorrupt as error:
            problems.append(Problem(name, str(error)))
    return problems


def _check_strangers(names: Mapping[str, int], complete: Mapping[str, Any] | None, shards: int) -> list[Problem]:
    known = set((complete or {}).get("files", {})) | {COMPLETE}
    known |= {name(shard) for shard in range(shards) for name in (shard_name, commit_name)}
    if complete is None:
        return []
    return [
        Problem(name, "a temporary file left behind" if is_temporary(name) else "not part of the cache")
        for name in names
        if name not in known
    ]


Job = tuple[str, dict[str, Any], list[str], dict[str, int]]


def _check_shards(jobs: list[Job], workers: int) -> list[Problem]:
    with ThreadPoolExecutor(max(workers, 1)) as pool:  # hashing and reading leave the interpreter lock free
        suspects = [job for job, whole in zip(jobs, pool.map(_is_whole, jobs), strict=True) if not whole]
    return _examine_apart(suspects)


def _examine_apart(jobs: list[Job]) -> list[Problem]:
    """Parse damaged files in a process of their own: whatever they do there, this one goes on."""
    if not jobs:
        return []
    command = [sys.executable, "-m", "storage.cache.verify"]
    done = subprocess.run(command, input=pickle.dumps(jobs), capture_output=True, check=False)
    if done.returncode == 0:
        return list(pickle.loads(done.stdout))
    if len(jobs) > 1:
        return [problem for job in jobs for problem in _examine_apart([job])]
    reason = done.stderr.decode(errors="replace").strip().rsplit("\n", 1)[-1]
    return [Problem(jobs[0][1]["shard"], f"damaged so badly that reading it fails: {reason}")]


def _is_whole(job: Job) -> bool:
    url, record, ids, _ = job
    folder = Folder(url)
    digest, size = hashlib.sha256(), 0
    for chunk in folder.chunks(record["shard"]):
        digest.update(chunk)
        size += len(chunk)
    return size == record["bytes"] and digest.hexdigest() == record["sha256"] and record["rows"] == len(ids)


def examine_shard(job: Job) -> list[Problem]:
    """Find the rows that a shard with a wrong hash or size has lost or altered."""
    url, record, ids, owners = job
    folder, name = Folder(url), record["shard"]
    data = folder.read(name)
    owner = owners.get(hashlib.sha256(data).hexdigest())
    if owner is not None and owner != record["unit"]:
        return [Problem(name, f"holds the bytes of shard {owner}: swapped or duplicated")]
    problems = []
    if len(data) != record["bytes"]:
        lost = sum(b["rows"] for b in record["batches"] if b["offset"] + b["bytes"] > len(data))
        problems.append(
            Problem(
                name, f"{len(data)} bytes, {record['bytes']} were committed; {lost} of {record['rows']} rows cut off"
            )
        )
    row = 0
    for number, batch in enumerate(record["batches"]):
        if batch["offset"] + batch["bytes"] > len(data):
            first = ids[row] if row < len(ids) else None
            problems.append(Problem(name, f"record batch {number} is cut off", row, first))
            break
        problems += _examine_batch(data, record, number, row, ids)
        row += batch["rows"]
    return problems or [Problem(name, "bytes outside any row were changed (schema, padding or end mark)")]


def _examine_batch(data: bytes, record: Mapping[str, Any], number: int, row: int, ids: list[str]) -> list[Problem]:
    name, count = record["shard"], record["batches"][number]["rows"]
    reader = ShardReader(pa.BufferReader(data), {**record, "bytes": len(data)}, name)
    try:
        reader.batch(number)
    except CacheCorrupt as error:
        return [Problem(name, f"rows {row}..{row + count - 1}: {error}", row, ids[row])]
    problems = []
    for index in range(row, row + count):
        try:
            columns = reader.row(index)
            if columns["sample_id"] != ids[index]:
                problems.append(Problem(name, f"holds sample {columns['sample_id']!r}", index, ids[index]))
            elif checksum_of(columns) != columns["checksum"]:
                problems.append(Problem(name, "checksum differs", index, ids[index]))
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            problems.append(Problem(name, f"cannot be read ({error})", index, ids[index]))
    return problems


if __name__ == "__main__":
    from storage.cache import verify as module  # the importable one, so that what is pickled can be read back

    found = [problem for job in pickle.load(sys.stdin.buffer) for problem in module.examine_shard(job)]
    sys.stdout.buffer.write(pickle.dumps(found))
