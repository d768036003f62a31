"""Caches made from other caches: to another codec, or several joined into one.

Rows pass from the old cache to the new one shard by shard, encoded by worker processes where that is work, and resume
like any build. What a part of a row is not re-coded for, is copied bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from storage.cache.commits import (
    COMPLETE,
    DATASET_INFO,
    MANIFEST,
    SAMPLES,
    STATE,
    Root,
    create_or_resume,
    finish,
    load_codecs,
    write_shard,
)
from storage.cache.plan import DEFAULT_TOKENS_PER_SHARD, CachePlan, Codecs
from storage.cache.read_ahead import ReadAhead
from storage.cache.shards import StoredRow, checksum_of
from storage.cache.target_cache import TargetCache
from storage.codecs.base import Codec, TargetParts, TeacherRow
from storage.codecs.fitting import fit_codec, fit_teacher
from storage.codecs.registry import CodecSpec, codec_class
from storage.errors import StorageError
from storage.files.filesystems import Folder, is_temporary
from storage.identity import differences

FIT_TOKENS = 8192  # tokens whose states a codec is fitted on
ROOT_FILES = (MANIFEST, SAMPLES, COMPLETE, STATE, DATASET_INFO)
COPIED_FIELDS = ("contract", "num_layers", "hidden_size", "teacher_scope")

Source = TypeVar("Source")
Encode = Callable[[Source, int, Codecs], Mapping[str, Any]]
OnShard = Callable[[Mapping[str, Any]], None]


def write_cache(
    root: Root,
    plan: CachePlan,
    codecs: Callable[[], Codecs] | None,
    source: Any,
    encode: Encode[Any],
    *,
    cost: Callable[[int], int],
    workers: int = 0,
    on_shard: OnShard | None = None,
    notes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the cache of `plan` whose row i is `encode(source, i, codecs)`; resumes; returns the finish record.

    `workers` processes read and encode (none: this one does); `source` and `encode` are then pickled, and `cost` bounds
    the bytes of a row on the way. `on_shard` is called with each shard's commit record, those that an earlier process
    wrote included. ValueError while another process does the same in this folder.
    """
    with Folder(root).only_writer():
        done = create_or_resume(root, plan, codecs)
        left = [shard for shard in range(len(plan.shards)) if shard not in done]
        indices = (row for shard in left for row in range(*plan.shards[shard]))
        work = partial(_encode, encode=encode, codecs=load_codecs(root))
        rows: Iterator[Any]
        if workers and left:
            rows = ReadAhead(source, indices, work, cost=cost, workers=workers)
        else:
            rows = (work(source, index) for index in indices)
        for shard, (start, stop) in enumerate(plan.shards):
            given = iter(()) if shard in done else islice(rows, stop - start)
            record = write_shard(root, shard, given, max_bytes=plan.max_bytes)
            if on_shard is not None:
                on_shard(record)
        if isinstance(rows, ReadAhead):
            rows.close()
        return finish(root, notes)


def require_own_folder(root: Root, *sources: Root) -> None:
    """Raises StorageError for a new cache inside one that it is made from, or among other files."""
    new = Folder(root)
    if new.is_file():
        raise StorageError(f"{new} is a file: give a folder for the new cache")
    for source in map(Folder, sources):
        if new.resolved == source.resolved:
            raise StorageError(f"{new} is the cache that is read: give another folder")
        if new.resolved.startswith(f"{source.resolved.rstrip('/')}/"):
            raise StorageError(f"{new} lies inside {source}, whose files are all its own: give another folder")
    files = new.files(recursive=False)
    foreign = [name for name in files if name not in ROOT_FILES and not is_temporary(name)]
    if foreign and MANIFEST not in files:
        raise StorageError(f"{new} holds other files ({', '.join(foreign[:3])}): give a new or an empty folder")


def _encode(source: Any, index: int, *, encode: Encode[Any], codecs: Codecs) -> Mapping[str, Any]:
    return encode(source, index, codecs)


def recode(
    source: Root,
    root: Root,
    *,
    hidden_states: CodecSpec | None = None,
    teacher: CodecSpec | None = None,
    codecs_of: Root | None = None,
    target: TargetParts | None = None,
    components: Mapping[str, torch.Tensor] | None = None,
    tokens_per_shard: int | None = None,
    max_bytes: int | None = None,
    workers: int = 0,
    on_shard: OnShard | None = None,
) -> dict[str, Any]:
    """Write the cache `source` again to `root` with other codecs; returns the finish record. Resumes.

    A part for which no codec is given keeps its bytes. `codecs_of`: take both codecs, as fitted, from that cache, so
    that the two can be merged. `target` serves teacher codecs that ask for the target; it cannot go to `workers`.
    `components`: `projection` [K, W] and `shares` [K] of a pilot, for a projected codec.

    Raises:
        StorageError: nothing would change, or the source holds components where states are needed.
    """
    require_own_folder(root, source)
    cache = TargetCache.open(source)
    given = load_codecs(codecs_of) if codecs_of is not None else None
    if given is not None:
        if hidden_states or teacher:
            raise StorageError("give codecs by name, or a cache to take them from, not both")
        hidden_states = CodecSpec(name=given.hidden_states.name, settings=given.hidden_states.settings)
        teacher = CodecSpec(name=given.teacher.name, settings=given.teacher.settings) if given.teacher else None
    if hidden_states is None and teacher is None:
        raise StorageError(
            "neither a codec for the hidden states nor one for the teacher is given: nothing would change"
        )
    if hidden_states is not None and cache.projection is not None:
        raise StorageError(
            f"{cache.folder} keeps {cache.codecs.hidden_states.out_width} components of the captured states, not the "
            "states themselves: its hidden states cannot be coded anew; recode the cache that they were made from"
        )
    if teacher is not None and cache.codecs.teacher is None:
        raise StorageError(f"{cache.folder} stores no teacher that could be coded; build the cache anew")
    if teacher is not None and cache.codecs.teacher is not None and cache.codecs.teacher.teacher_only:
        raise StorageError(
            f"{cache.folder} keeps the teacher as {cache.codecs.teacher.name!r}, which has no exact last states; "
            "recode the cache that it was made from"
        )
    if teacher is not None and teacher.name == "recomputed" and cache.projection is not None:
        raise StorageError(f"{cache.folder} keeps components, and teacher codec 'recomputed' needs the captured states")
    if target is not None and workers:
        raise StorageError("a teacher codec that needs the target is encoded by this process: use workers = 0")
    if target is None and teacher is not None and codec_class(teacher.name).teacher_only:
        raise StorageError(
            f"teacher codec {teacher.name!r} asks for the target that the states are of: give it too (--target)"
        )
    if components is None and hidden_states is not None and hidden_states.name == "projected" and given is None:
        raise StorageError("codec 'projected' keeps what a pilot drafter looks at: give it too (--pilot)")
    fields = cache.manifest["fields"]
    inputs = {**fields["inputs"], "recoded_from": cache.identity}
    if components is not None:
        inputs["directions"] = sha256(components["projection"].numpy().tobytes()).hexdigest()
    old = {part: CodecSpec(**fields[part]) if fields[part] else None for part in ("features", "teacher")}
    plan = _plan_from(
        [cache],
        hidden_states=hidden_states or old["features"],
        teacher=teacher or old["teacher"],
        inputs=inputs,
        tokens_per_shard=tokens_per_shard or fields["unit_tokens"],
        max_bytes=max_bytes,
    )

    def codecs() -> Codecs:
        fresh = given or _fit(cache, hidden_states, teacher, target, components)
        return Codecs(
            hidden_states=fresh.hidden_states if hidden_states else cache.codecs.hidden_states,
            teacher=fresh.teacher if teacher else cache.codecs.teacher,
        )

    work = partial(_recoded, hidden_states=hidden_states is not None, teacher=teacher is not None, target=target)
    return write_cache(root, plan, codecs, cache, work, cost=cache.decoded_bytes, workers=workers, on_shard=on_shard)


def _recoded(
    cache: TargetCache, index: int, codecs: Codecs, *, hidden_states: bool, teacher: bool, target: TargetParts | None
) -> Mapping[str, Any]:
    columns = dict(cache.raw_row(index))
    row = cache.decode(columns, dtype=torch.float32)
    if hidden_states:
        columns["context"] = codecs.hidden_states.encode(row.hidden_states, first=True)
    if teacher and len(row.teacher_positions):
        assert codecs.teacher is not None
        codecs.teacher.target = target
        whole = _teacher_row(row)
        columns["teacher"] = codecs.teacher.encode_teacher(
            whole.hidden_states, whole.last_hidden_state, whole.positions
        )
    columns["checksum"] = checksum_of(columns)
    return columns


def _teacher_row(row: StoredRow) -> TeacherRow:
    """A stored row as codecs of the teacher see one: last states at every token, zero where none is stored."""
    last = torch.zeros(len(row.input_ids), row.last_hidden_state.shape[1])
    last[row.teacher_positions] = row.last_hidden_state
    return TeacherRow(hidden_states=row.hidden_states, last_hidden_state=last, positions=row.teacher_positions.numpy())


def _fit(
    cache: TargetCache,
    hidden_states: CodecSpec | None,
    teacher: CodecSpec | None,
    target: TargetParts | None,
    components: Mapping[str, torch.Tensor] | None,
) -> Codecs:
    """New codecs, fitted on rows spread over the cache, up to FIT_TOKENS tokens."""
    fields = cache.manifest["fields"]
    step = max(1, int(cache.lengths.sum(dtype=np.int64)) // FIT_TOKENS)
    rows = list(cache.rows(range(0, len(cache), step), dtype=torch.float32))
    layers, hidden = fields["num_layers"], fields["hidden_size"]
    of_features: Codec = cache.codecs.hidden_states
    if hidden_states is not None:
        sample = [(row.hidden_states, True) for row in rows]
        of_features = fit_codec(hidden_states, sample, width=layers * hidden, layers=layers, tensors=components)
    of_teacher = cache.codecs.teacher
    if teacher is not None:
        of_teacher = fit_teacher(teacher, [_teacher_row(row) for row in rows], width=hidden, target=target)
    return Codecs(hidden_states=of_features, teacher=of_teacher)


class _Joined:
    """The rows of several caches, one cache after the other, with a prefix to the sample ids of each."""

    def __init__(self, caches: Sequence[TargetCache], prefixes: Sequence[str]) -> None:
        self.caches, self._prefixes = caches, prefixes
        self._starts = np.cumsum([0, *map(len, caches)])

    def _locate(self, index: int) -> tuple[int, int]:
        place = int(np.searchsorted(self._starts, index, side="right")) - 1
        return place, index - int(self._starts[place])

    def decoded_bytes(self, rows: int) -> int:
        place, row = self._locate(rows)
        return self.caches[place].decoded_bytes(row)

    def raw_row(self, index: int) -> dict[str, Any]:
        place, row = self._locate(index)
        columns = self.caches[place].raw_row(row)
        if self._prefixes[place]:
            columns["sample_id"] = self._prefixes[place] + columns["sample_id"]
            columns["checksum"] = checksum_of(columns)
        return columns


def _raw_row(source: _Joined, index: int, codecs: Codecs) -> Mapping[str, Any]:
    return source.raw_row(index)


def merge(
    sources: Sequence[Root],
    root: Root,
    *,
    number_ids: bool = False,
    tokens_per_shard: int | None = None,
    max_bytes: int | None = None,
    on_shard: OnShard | None = None,
) -> dict[str, Any]:
    """Join caches of one target, coded alike, into one; rows are copied bit by bit. Returns the finish record.

    `number_ids`: sample ids begin with the number of their cache from then on, `0/ID`.

    Raises:
        StorageError: fields that readers rely on differ, the codecs were fitted on different samples, a cache is given
            twice, or a sample id occurs in two of them. The message names what differs and the cure.
    """
    if len(sources) < 2:
        raise StorageError(f"{len(sources)} cache given: merging takes at least two")
    require_own_folder(root, *sources)
    caches = [TargetCache.open(source) for source in sources]
    first = caches[0]
    for other in caches[1:]:
        _require_alike(first, other)
    prefixes = [f"{number}/" if number_ids else "" for number in range(len(caches))]
    owners: dict[str, TargetCache] = {}
    for number, cache in enumerate(caches):
        for other in caches[:number]:
            if other.identity == cache.identity:
                raise StorageError(f"{other.folder} and {cache.folder} are the same cache: give each one once")
        for sample_id in cache.sample_ids:
            if not number_ids and sample_id in owners:
                raise StorageError(
                    f"sample {sample_id!r} is in {owners[sample_id].folder} and in {cache.folder}: with --number-ids "
                    "each id begins with the number of its cache (`0/ID`)"
                )
            owners[sample_id] = cache
    fields = first.manifest["fields"]
    plan = _plan_from(
        caches,
        hidden_states=CodecSpec(**fields["features"]),
        teacher=CodecSpec(**fields["teacher"]) if fields["teacher"] else None,
        inputs={"merged_from": [cache.identity for cache in caches], **({"number_ids": True} if number_ids else {})},
        prefixes=prefixes,
        tokens_per_shard=tokens_per_shard or fields["unit_tokens"],
        max_bytes=max_bytes,
    )
    source = _Joined(caches, prefixes)
    return write_cache(root, plan, lambda: first.codecs, source, _raw_row, cost=source.decoded_bytes, on_shard=on_shard)


def _require_alike(first: TargetCache, other: TargetCache) -> None:
    names = (*COPIED_FIELDS, "features", "teacher")
    ours, theirs = ({name: cache.manifest["fields"][name] for name in names} for cache in (first, other))
    found = differences(ours, theirs)
    if found:
        lines = "\n".join(f"  {path}: {a!r} and {b!r}" for path, a, b in found)
        raise StorageError(f"{first.folder} and {other.folder} cannot be merged; they differ in\n{lines}")
    for part in ("features", "teacher"):
        a, b = (cache.manifest["codecs"][part] for cache in (first, other))
        if a and a["sha256"] != b["sha256"]:
            raise StorageError(
                f"the {part} codecs of {first.folder} and {other.folder} were fitted on different samples: recode one "
                f"of them first (`dspark cache recode {other.folder} NEW --codecs-of {first.folder}`)"
            )


def _plan_from(
    caches: Sequence[TargetCache],
    *,
    hidden_states: CodecSpec | None,
    teacher: CodecSpec | None,
    inputs: Mapping[str, Any],
    prefixes: Sequence[str] = ("",),
    tokens_per_shard: int = DEFAULT_TOKENS_PER_SHARD,
    max_bytes: int | None = None,
) -> CachePlan:
    assert hidden_states is not None
    skipped: dict[str, list[str]] = {}
    shortened: list[str] = []
    samples: list[tuple[str, int]] = []
    for prefix, cache in zip(prefixes, caches, strict=True):
        for reason, ids in cache.manifest["skipped"].items():
            skipped.setdefault(reason, []).extend(prefix + sample_id for sample_id in ids)
        shortened += (prefix + sample_id for sample_id in cache.manifest.get("shortened", ()))
        samples += ((prefix + sample_id, int(n)) for sample_id, n in zip(cache.sample_ids, cache.lengths, strict=True))
    fields = caches[0].manifest["fields"]
    return CachePlan(
        **{name: fields[name] for name in COPIED_FIELDS},
        samples=samples,
        spans=[cache.spans(index) for cache in caches for index in range(len(cache))],
        hidden_states=hidden_states,
        teacher=teacher,
        tokens_per_shard=tokens_per_shard,
        inputs=inputs,
        skipped=skipped,
        shortened=shortened,
        max_bytes=max_bytes,
    )
