"""Building a cache: the manifest first, then shard after shard, then the finish.

A shard is committed in this order, each step durable before the next: rows to a temporary name, sync, re-read and
compare, rename to the shard's name, commit record. Readers believe commit records only, so a builder that is killed
anywhere leaves either a committed shard or nothing; doing a shard again gives the same shard.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from os import PathLike
from typing import IO, Any

import numpy as np

from storage.cache import schema
from storage.cache.plan import FORMAT, VERSION, CachePlan, Codecs, SampleList, write_samples
from storage.cache.records import CacheRow, dataset_features, seal, unseal
from storage.cache.shards import encode_row, write_rows
from storage.codecs.base import Codec
from storage.codecs.fitting import dump_codec, fit_codec, load_codec
from storage.errors import (
    AGAIN,
    WHOLE,
    CacheCorrupt,
    MissingFile,
    NonFiniteState,
    StorageCorrupt,
    StorageError,
    StorageFull,
)
from storage.files.filesystems import Folder
from storage.identity import require_same

MANIFEST, SAMPLES, COMPLETE = "manifest.json", "samples.arrow", "COMPLETE.json"
STATE, DATASET_INFO = "state.json", "dataset_info.json"
Root = str | PathLike[str]
EncodedRow = Mapping[str, Any]  # the columns of a shard's row


def shard_name(shard: int) -> str:
    return f"shards/unit-{shard:06d}.arrow"


def commit_name(shard: int) -> str:
    return f"commits/unit-{shard:06d}.json"


@dataclass(frozen=True)
class Opened:
    """What a builder or reader knows of a cache before it looks at any row."""

    folder: Folder
    manifest: dict[str, Any]
    manifest_sha256: str
    samples: SampleList
    codecs: Codecs

    @property
    def num_shards(self) -> int:
        return self.samples.num_shards


def create_or_resume(root: Root, plan: CachePlan, codecs: Codecs | Callable[[], Codecs] | None = None) -> set[int]:
    """Start the cache, or take it up again; returns the shards already committed.

    `codecs` (or a function that fits them, called only for a new cache) may be left out for codecs without statistics.
    IdentityMismatch names every field in which the stored plan differs from the one asked for.
    """
    folder = Folder(root)
    if not folder.exists(MANIFEST):
        stray = [name for name in folder.files() if name.endswith(".arrow") and name.startswith("shards/")]
        if stray or folder.exists(COMPLETE):
            raise CacheCorrupt(f"{folder} holds shards but no {MANIFEST}; restore it, or choose another folder")
        _create(folder, plan, _codecs_for(plan, codecs))
        require_room(open_folder(folder), set(), plan.max_bytes)
        return set()
    folder.remove_dead_temporaries()
    opened = open_folder(folder)
    require_same(
        plan.fields(),
        opened.manifest["fields"],
        what=f"the cache in {folder}",
        cure="Use the settings it was made with, or give another folder for the new cache.",
    )
    done = set(committed_shards(opened))
    require_room(opened, done, plan.max_bytes)
    return done


def _codecs_for(plan: CachePlan, codecs: Codecs | Callable[[], Codecs] | None) -> Codecs:
    width = plan.num_layers * plan.hidden_size
    if codecs is None:
        hidden_states = fit_codec(plan.hidden_states, [], width=width, layers=plan.num_layers)
        teacher = fit_codec(plan.teacher, [], width=plan.hidden_size) if plan.teacher else None
        return Codecs(hidden_states=hidden_states, teacher=teacher)
    fitted = codecs() if callable(codecs) else codecs
    pairs = [
        ("features", fitted.hidden_states, plan.hidden_states, width),
        ("teacher", fitted.teacher, plan.teacher, plan.hidden_size),
    ]
    for part, codec, spec, expected in pairs:
        have = (codec.name, codec.width) if codec else None
        want = (spec.name, expected) if spec else None
        if have != want:
            raise StorageError(f"{part}: the plan asks for codec and width {want}, the fitted one is {have}")
    return fitted


def _create(folder: Folder, plan: CachePlan, codecs: Codecs) -> None:
    folder.make()
    described: dict[str, Any] = {}
    for part, codec in (("features", codecs.hidden_states), ("teacher", codecs.teacher)):
        if codec is None:
            described[part] = None
            continue
        description, tensors = dump_codec(codec)
        name = f"codecs/{part}.safetensors"
        folder.write(name, tensors)
        described[part] = {**description, "file": name, "sha256": hashlib.sha256(tensors).hexdigest()}
    samples = write_samples(plan)
    folder.write(SAMPLES, samples)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "identity": plan.identity,
        "fields": plan.fields(),
        "codecs": described,
        "samples": {"file": SAMPLES, "sha256": hashlib.sha256(samples).hexdigest()},
        "units": len(plan.shards),
        "skipped": {reason: list(ids) for reason, ids in plan.skipped.items()},
        "shortened": list(plan.shortened),
    }
    folder.write(MANIFEST, seal(manifest))


def open_folder(folder: Folder) -> Opened:
    """Read and check manifest, sample list and codecs. FileNotFoundError if there is no cache."""
    if not folder.exists(MANIFEST):
        raise MissingFile(f"{folder} holds no target cache (no {MANIFEST}); build one first, or check the path")
    data, name = folder.read(folder.inside(MANIFEST, str(folder))), folder.describe(MANIFEST)
    manifest = unseal(data, name)
    if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        raise StorageError(
            f"{folder} is {manifest.get('format')!r} version {manifest.get('version')!r}; this program reads "
            f"{FORMAT!r} version {VERSION}: use the program version that wrote it, or build the cache anew"
        )
    schema.checked(schema.Manifest, manifest, name, WHOLE)
    samples = SampleList.parse(_checked(folder, manifest["samples"]), folder.describe(SAMPLES))
    if samples.num_shards != manifest["units"]:
        raise CacheCorrupt(f"{name}: {manifest['units']} shards, the sample list has {samples.num_shards}; {WHOLE}")
    fields = manifest["fields"]
    widths = {"features": fields["num_layers"] * fields["hidden_size"], "teacher": fields["hidden_size"]}
    loaded = {}
    for part, width in widths.items():
        entry = manifest["codecs"][part]
        if entry is not None and entry["width"] != width:
            raise CacheCorrupt(f"{name}: codecs.{part}.width is {entry['width']}, the fields make it {width}; {WHOLE}")
        loaded[part] = _load_codec(folder, entry) if entry else None
    hidden_states = loaded["features"]
    assert hidden_states is not None
    codecs = Codecs(hidden_states=hidden_states, teacher=loaded["teacher"])
    return Opened(folder, manifest, hashlib.sha256(data).hexdigest(), samples, codecs)


def _load_codec(folder: Folder, entry: Mapping[str, Any]) -> Codec:
    tensors = _checked(folder, entry)
    try:
        return load_codec(entry, tensors)
    except ValueError as error:
        raise CacheCorrupt(f"{folder.describe(entry['file'])}: {error}; {WHOLE}") from error


@lru_cache(maxsize=8)
def _opened_before(url: str, manifest: bytes) -> Opened:
    """A worker writes many shards of one cache: its sample list and codecs are read once."""
    return open_folder(Folder(url))


def _checked(folder: Folder, entry: Mapping[str, Any]) -> bytes:
    try:
        data = folder.read(folder.inside(entry["file"], folder.describe(MANIFEST)))
    except FileNotFoundError:
        raise CacheCorrupt(f"{folder.describe(entry['file'])} is missing; {WHOLE}") from None
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise CacheCorrupt(
            f"{folder.describe(entry['file'])}: its SHA-256 is not the manifest's: damaged or replaced; {WHOLE}"
        )
    return data


def load_codecs(root: Root) -> Codecs:
    """The fitted codecs of a cache, for a worker that encodes or decodes by itself."""
    return open_folder(Folder(root)).codecs


def committed_shards(opened: Opened) -> dict[int, dict[str, Any]]:
    """Commit records by shard, of those whose record is sound and whose file is there in full size."""
    sizes, names = opened.folder.files("shards"), opened.folder.files("commits")
    records = (read_commit(opened, shard) for shard in range(opened.num_shards) if commit_name(shard) in names)
    return {record["unit"]: record for record in records if record and sizes.get(record["shard"]) == record["bytes"]}


def read_commit(opened: Opened, shard: int) -> dict[str, Any] | None:
    """The shard's commit record. None if there is none, or one that is not sound: the shard is to be done again."""
    folder, name = opened.folder, commit_name(shard)
    try:
        record = unseal(folder.read(folder.inside(name, str(folder))), folder.describe(name))
        checked_commit(record, folder, name)
    except (StorageCorrupt, FileNotFoundError):
        return None
    return record if record["manifest_sha256"] == opened.manifest_sha256 and record["unit"] == shard else None


def checked_commit(record: dict[str, Any], folder: Folder, name: str) -> dict[str, Any]:
    """A commit record whose every field is of its kind, and which names its own shard's file. CacheCorrupt if not."""
    schema.checked(schema.Commit, record, folder.describe(name), AGAIN)
    if record["shard"] != shard_name(record["unit"]):
        raise CacheCorrupt(
            f"{folder.describe(name)}: shard {record['unit']} is said to be in {record['shard'][:80]!r}, and not in "
            f"{shard_name(record['unit'])}; {AGAIN}"
        )
    folder.inside(record["shard"], folder.describe(name))
    return record


def read_complete(opened: Opened) -> dict[str, Any]:
    """COMPLETE.json of a finished cache, its commit records checked. CacheCorrupt names what is wrong."""
    folder, name = opened.folder, opened.folder.describe(COMPLETE)
    complete = unseal(folder.read(folder.inside(COMPLETE, str(folder))), name)
    schema.checked(schema.Complete, complete, name, WHOLE)
    if complete["files"].get(MANIFEST) != opened.manifest_sha256:
        raise CacheCorrupt(f"{folder.describe(MANIFEST)}: not the manifest that the cache was finished with; {WHOLE}")
    for file in complete["files"]:
        folder.inside(file, name)
    starts = opened.samples.starts
    for shard, record in enumerate(complete["shards"]):
        checked_commit(record, folder, COMPLETE)
        if record["unit"] != shard or record["rows"] != starts[min(shard + 1, opened.num_shards)] - starts[shard]:
            raise CacheCorrupt(f"{name}: its records are not those of the manifest's shards in order; {WHOLE}")
    if len(complete["shards"]) != opened.num_shards:
        raise CacheCorrupt(f"{name}: {len(complete['shards'])} shards, {opened.num_shards} are planned; {WHOLE}")
    return complete


def write_shard(
    root: Root,
    shard: int,
    rows: Iterable[CacheRow | EncodedRow],
    codecs: Codecs | None = None,
    *,
    max_bytes: int | None = None,
) -> dict[str, Any]:
    """Encode, write and commit one shard; returns its commit record. A shard that is committed already is left alone.

    The rows must be the plan's samples of that shard in order; columns that `encode_row` (or `TargetCache.raw_row` of a
    cache with the same codecs) made are written as they are. The shards together may not grow beyond `max_bytes`.
    NonFiniteState and ValueError name shard and sample; StorageFull says what ran out. After any error nothing of the
    shard is visible.
    """
    folder = Folder(root)
    if not folder.exists(MANIFEST):
        raise MissingFile(f"{folder} holds no cache to write to; call create_or_resume first")
    opened = _opened_before(folder.url, folder.read(MANIFEST))
    if not 0 <= shard < opened.num_shards:
        raise StorageError(f"shard {shard} is outside the plan's 0..{opened.num_shards - 1}")
    if folder.exists(commit_name(shard)):
        committed = read_commit(opened, shard)
        if committed is not None and opened.folder.files("shards").get(committed["shard"]) == committed["bytes"]:
            return committed
    use = codecs or opened.codecs
    _require(opened, estimate_shard(opened, shard, use), max_bytes, f"shard {shard}")
    scope = opened.manifest["fields"]["teacher_scope"]
    metadata = {"format": FORMAT, "version": str(VERSION), "identity": opened.manifest["identity"], "unit": str(shard)}
    try:
        encoded = (
            row if isinstance(row, Mapping) else encode_row(row, use, scope=scope)
            for row in _in_order(opened, shard, rows)
        )
        with folder.writer(shard_name(shard)) as stream:
            written = write_rows(stream, encoded, metadata)
            _check_written(stream, written, folder.describe(shard_name(shard)))
            _require(opened, 0 if folder.is_local else written["bytes"], max_bytes, f"shard {shard}")
    except NonFiniteState as error:
        raise NonFiniteState(f"shard {shard} of {folder}: {error}") from error
    record = {"unit": shard, "shard": shard_name(shard), "manifest_sha256": opened.manifest_sha256, **written}
    folder.write(commit_name(shard), seal(record))
    return record


def _in_order(opened: Opened, shard: int, rows: Iterable[CacheRow | EncodedRow]) -> Iterator[CacheRow | EncodedRow]:
    start, stop = int(opened.samples.starts[shard]), int(opened.samples.starts[shard + 1])
    place = start
    for row in rows:
        expected = (opened.samples.sample_ids[place], int(opened.samples.lengths[place])) if place < stop else None
        if isinstance(row, Mapping):
            given, spans = (row["sample_id"], len(row["input_ids"])), row["spans"]
        else:
            given, spans = (row.sample_id, len(row.input_ids)), row.spans
        if given != expected:
            raise StorageError(
                f"shard {shard}, row {place - start}: got sample {given[0]!r} of {given[1]} tokens, "
                f"the plan has {expected or 'no further row'}"
            )
        planned = opened.samples.spans(place)
        if planned is not None and np.asarray(spans).reshape(-1, 2).tolist() != [list(span) for span in planned]:
            raise StorageError(
                f"shard {shard}, row {place - start} ({given[0]!r}): its spans are not the plan's {planned}"
            )
        place += 1
        yield row
    if place != stop:
        raise StorageError(f"shard {shard}: {place - start} rows given, the plan has {stop - start}")


def estimate_shard(opened: Opened, shard: int, codecs: Codecs | None = None) -> int:
    """Bytes that the shard will have, by the rates measured when the codecs were fitted."""
    start, stop = (int(row) for row in opened.samples.starts[shard : shard + 2])
    tokens = int(opened.samples.lengths[start:stop].sum(dtype=np.int64))
    scope = opened.manifest["fields"]["teacher_scope"]
    teacher = opened.samples.teacher_tokens(start, stop, scope)
    return (codecs or opened.codecs).estimate_bytes(tokens, teacher, stop - start)


def require_room(opened: Opened, done: set[int], max_bytes: int | None) -> None:
    """StorageFull unless all shards that are not `done` will fit, into the free space and under max_bytes."""
    needed = sum(estimate_shard(opened, shard) for shard in range(opened.num_shards) if shard not in done)
    if needed:
        _require(opened, needed, max_bytes, "the cache")


def _require(opened: Opened, needed: int, max_bytes: int | None, what: str) -> None:
    free = opened.folder.free_bytes()
    if free is not None and free < needed:
        raise StorageFull(
            f"{what} needs about {needed:,} bytes more, {free:,} are free in {opened.folder}: free some space and "
            "start again, or choose a smaller codec; what is committed stays"
        )
    if max_bytes is not None:
        used = sum(opened.folder.files("shards").values())  # those that others are writing included
        if used + needed > max_bytes:
            raise StorageFull(
                f"{what} needs about {needed:,} bytes more, which takes the shards from {used:,} above max_bytes = "
                f"{max_bytes:,}: raise max_bytes, choose a smaller codec, or cache fewer conversations"
            )


def _check_written(stream: IO[bytes], written: Mapping[str, Any], name: str) -> None:
    """Read a temporary file back before it gets its name."""
    stream.seek(0)
    if hashlib.file_digest(stream, "sha256").hexdigest() != written["sha256"]:  # type: ignore[arg-type]
        raise CacheCorrupt(f"{name}: the bytes read back are not those written; check the disk")


def finish(root: Root, notes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Close the cache once every shard is committed: dataset files, then the COMPLETE record over all of it.

    `notes` (an audit's result, say) are kept in the record. Doing it twice is harmless. StorageError names missing
    shards.
    """
    folder = Folder(root)
    opened = open_folder(folder)
    committed = committed_shards(opened)
    missing = [shard for shard in range(opened.num_shards) if shard not in committed]
    if missing:
        shown = ", ".join(map(str, missing[:10])) + ("..." if len(missing) > 10 else "")
        raise StorageError(
            f"{len(missing)} of {opened.num_shards} shards of {folder} are not committed ({shown}); build them first"
        )
    folder.remove_dead_temporaries(everything=True)
    shards = [committed[shard] for shard in range(opened.num_shards)]
    identity = opened.manifest["identity"]
    size = sum(record["bytes"] for record in shards)
    state = {
        "_data_files": [{"filename": record["shard"]} for record in shards],
        "_fingerprint": identity[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    description = "Target cache for training speculative-decoding drafters; states are compressed inside each row."
    info = {"description": description, "features": dataset_features(), "dataset_size": size, "version": None}
    files: dict[str, str] = {MANIFEST: opened.manifest_sha256, SAMPLES: opened.manifest["samples"]["sha256"]}
    for entry in opened.manifest["codecs"].values():
        if entry:
            files[entry["file"]] = entry["sha256"]
    for name, content in ((STATE, state), (DATASET_INFO, info)):
        data = json.dumps(content, indent=1, sort_keys=True).encode()
        folder.write(name, data)
        files[name] = hashlib.sha256(data).hexdigest()
    record = {
        "identity": identity,
        "files": files,
        "rows": sum(r["rows"] for r in shards),
        "tokens": sum(r["tokens"] for r in shards),
        "bytes": size,
        "shards": shards,
        "notes": dict(notes or {}),
    }
    folder.write(COMPLETE, seal(record))
    return record
