"""Reads the reference implementation's binary target caches (version 2) and rewrites them in this format.

S tokens of a sample, m captured layers, d hidden size. `samples.idx` holds one 56-byte little-endian record a sample:
i64 sample id, i32 shard, i32 S, then i64 byte offsets into the shard of input ids [S] i32, attention mask [S] u8,
loss mask [S] u8, captured states [S, m*d] bf16 and last states [S, d] bf16.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field, with_config
from typing_extensions import TypedDict

from storage.cache.plan import DEFAULT_TOKENS_PER_SHARD, LONGEST, CachePlan, Codecs
from storage.cache.records import CacheRow, teacher_positions
from storage.cache.rewrite import FIT_TOKENS, OnShard, require_own_folder, write_cache
from storage.cache.schema import MOST_HIDDEN, MOST_LAYERS, STRICT, checked, parse_json
from storage.cache.shards import encode_row
from storage.codecs.base import TeacherRow, as_tensor
from storage.codecs.fitting import fit_codec, fit_teacher
from storage.codecs.registry import CodecSpec
from storage.errors import CacheCorrupt, MissingFile, StorageError
from storage.files.filesystems import Folder

MANIFEST, INDEX = "manifest.json", "samples.idx"
RECORD = struct.Struct("<qii5q")
MAX_OPEN = 32  # shards held open


class _Shard(TypedDict):
    shard_id: int
    file_name: str


@with_config(STRICT)
class _Manifest(TypedDict):
    num_samples: Annotated[int, Field(ge=1, lt=1 << 40)]
    hidden_size: Annotated[int, Field(ge=1, le=MOST_HIDDEN)]
    target_layer_ids: Annotated[list[Annotated[int, Field(ge=-1, lt=MOST_LAYERS)]], Field(min_length=1, max_length=256)]
    target_model_name_or_path: str
    shards: list[_Shard]


@dataclass(frozen=True, kw_only=True)
class DeepSpecSample:
    """input_ids [S] int32, loss_mask [S] uint8, states [S, m*d] and last [S, d] as bf16."""

    sample_id: int
    input_ids: np.ndarray
    loss_mask: np.ndarray
    states: torch.Tensor
    last_hidden_state: torch.Tensor


class DeepSpecCache:
    """Random samples of a cache that the reference wrote."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.folder = folder = Folder(path)
        self._files: dict[str, pa.NativeFile] = {}
        for name in (MANIFEST, INDEX):
            if not folder.is_file(name):
                raise MissingFile(f"{folder.describe(name)} is not there: not a cache of the reference")
            folder.inside(name, str(folder))
        source = folder.describe(MANIFEST)
        self.manifest: dict[str, Any] = parse_json(folder.read(MANIFEST), source)
        expected = {
            "version": 2,
            "hidden_dtype": "bfloat16",
            "mask_dtype": "uint8",
            "token_dtype": "int32",
            "index_record_size": RECORD.size,
        }
        for key, value in expected.items():
            if isinstance(self.manifest, dict) and self.manifest.get(key) != value:
                raise StorageError(
                    f"{source}: {key} is {self.manifest.get(key)!r}, not {value!r}; "
                    "only version 2 caches in bfloat16 can be imported"
                )
        checked(_Manifest, self.manifest, source, "fetch the cache again, or write it again with the reference")
        self.shards = {
            entry["shard_id"]: folder.inside(entry["file_name"], source) for entry in self.manifest["shards"]
        }
        self.hidden_size: int = self.manifest["hidden_size"]
        self.layer_ids: list[int] = self.manifest["target_layer_ids"]
        index, count = folder.read(INDEX), self.manifest["num_samples"]
        if len(index) != count * RECORD.size:
            raise CacheCorrupt(
                f"{folder.describe(INDEX)}: {len(index)} bytes, {count} samples take {count * RECORD.size}"
            )
        self.records = list(RECORD.iter_unpack(index))
        for number, (sample_id, shard, length, *_) in enumerate(self.records):
            if shard not in self.shards or not 0 <= length <= LONGEST:
                raise CacheCorrupt(
                    f"{folder.describe(INDEX)}, record {number}: sample {sample_id}, {length} tokens, shard {shard}; "
                    f"the shards are {sorted(self.shards)[:10]}, and a sample has 0 to {LONGEST:,} tokens"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}

    def __len__(self) -> int:
        return len(self.records)

    def length(self, index: int) -> int:
        return int(self.records[index][2])

    def sample(self, index: int) -> DeepSpecSample:
        """One sample; ValueError names the shard and the sample if the index points outside the shard."""
        sample_id, shard, length = self.records[index][:3]
        ids, attention_mask, loss_mask, states, last = (self._part(index, part) for part in range(5))
        if not attention_mask.all():
            raise StorageError(
                f"{self.folder.describe(self.shards[shard])}: sample {sample_id} has "
                f"{int((attention_mask == 0).sum())} tokens outside its attention mask; this format keeps whole "
                "sequences only: write the sample without its padding"
            )
        return DeepSpecSample(
            sample_id=sample_id,
            input_ids=ids.view("<i4"),
            loss_mask=loss_mask,
            states=torch.from_numpy(states.view("<i2")).view(torch.bfloat16).view(length, -1),
            last_hidden_state=torch.from_numpy(last.view("<i2")).view(torch.bfloat16).view(length, self.hidden_size),
        )

    def loss_mask(self, index: int) -> np.ndarray:
        """[S] uint8, without reading the states."""
        return self._part(index, 2)

    def _part(self, index: int, part: int) -> np.ndarray:
        """Bytes of one of the five arrays of a sample, in the order of its offsets."""
        sample_id, shard, length, *offsets = self.records[index]
        name = self.shards[shard]
        size = length * (4, 1, 1, 2 * len(self.layer_ids) * self.hidden_size, 2 * self.hidden_size)[part]
        if name not in self._files:
            if len(self._files) >= MAX_OPEN:
                self._files.pop(next(iter(self._files)))
            try:
                self._files[name] = self.folder.open_input(name, memory_map=False)
            except OSError as error:
                raise CacheCorrupt(f"{self.folder.describe(name)}, which sample {sample_id} is in: {error}") from error
        file, offset = self._files[name], offsets[part]
        if offset < 0 or offset + size > file.size():
            raise CacheCorrupt(
                f"{self.folder.describe(name)}: sample {sample_id} should lie at {offset}..{offset + size}, "
                f"but the file has {file.size()} bytes; it is cut short or not of this cache"
            )
        return np.frombuffer(file.read_at(size, offset), np.uint8).copy()


def spans_of(mask: np.ndarray) -> list[tuple[int, int]]:
    """Half-open runs of non-zero entries of a mask [S]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (mask != 0).astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def import_deepspec(
    source: str | PathLike[str],
    root: str | PathLike[str],
    *,
    contract: Mapping[str, Any] | None = None,
    hidden_states: CodecSpec | None = None,
    teacher: CodecSpec | None = None,
    teacher_scope: Literal["supervised", "all"] = "supervised",
    tokens_per_shard: int = DEFAULT_TOKENS_PER_SHARD,
    max_bytes: int | None = None,
    workers: int = 0,
    on_shard: OnShard | None = None,
) -> dict[str, Any]:
    """Write `source` to `root` in this format, bit-exact by default. Resumes; returns the finish record.

    `contract` gives what the reference does not record (hashes, thinking mode); a field that it does record must agree.
    `teacher_scope="all"` keeps last states at unsupervised positions too. Samples without a token are left out, listed.
    """
    require_own_folder(root, source)
    cache = DeepSpecCache(source)
    known = {"target_name": cache.manifest["target_model_name_or_path"], "target_layer_ids": cache.layer_ids}
    merged = {**known, **(contract or {})}
    if merged["target_layer_ids"] != cache.layer_ids:
        raise StorageError(
            f"the contract captures layers {merged['target_layer_ids']}, the cache in {source} holds {cache.layer_ids}"
        )
    kept = [index for index in range(len(cache)) if cache.length(index)]
    empty = [str(cache.records[index][0]) for index in range(len(cache)) if not cache.length(index)]
    plan = CachePlan(
        contract=merged,
        inputs={"imported_from": "deepspec-v2", "manifest": cache.manifest},
        num_layers=len(cache.layer_ids),
        hidden_size=cache.hidden_size,
        samples=[(str(cache.records[index][0]), cache.length(index)) for index in kept],
        spans=[spans_of(cache.loss_mask(index)) for index in kept],
        hidden_states=hidden_states or CodecSpec(name="bf16"),
        teacher=teacher or CodecSpec(name="bf16"),
        teacher_scope=teacher_scope,
        tokens_per_shard=tokens_per_shard,
        skipped={"empty": empty} if empty else {},
        max_bytes=max_bytes,
    )
    width = 2 * cache.hidden_size * (len(cache.layer_ids) + 1)
    return write_cache(
        root,
        plan,
        lambda: _fit(cache, plan, kept),
        cache,
        partial(_encoded, kept=kept, scope=teacher_scope),
        cost=lambda index: cache.length(kept[index]) * width,
        workers=workers,
        on_shard=on_shard,
    )


def _encoded(cache: DeepSpecCache, index: int, codecs: Codecs, *, kept: list[int], scope: str) -> Mapping[str, Any]:
    return encode_row(_row(cache.sample(kept[index])), codecs, scope=scope)


def _row(sample: DeepSpecSample) -> CacheRow:
    return CacheRow(
        sample_id=str(sample.sample_id),
        input_ids=sample.input_ids,
        spans=spans_of(sample.loss_mask),
        hidden_states=sample.states,
        last_hidden_state=sample.last_hidden_state,
    )


def _fit(cache: DeepSpecCache, plan: CachePlan, kept: list[int]) -> Codecs:
    """Codecs fitted on samples spread over the cache, up to FIT_TOKENS tokens."""
    step = max(1, plan.tokens // FIT_TOKENS)
    rows = [_row(cache.sample(index)) for index in kept[::step]]
    layers, hidden = plan.num_layers, plan.hidden_size
    of_features = [(as_tensor(row.hidden_states), True) for row in rows]
    of_teacher = []
    for row in rows:
        assert row.last_hidden_state is not None
        positions = teacher_positions(row.spans, len(row.input_ids), plan.teacher_scope)
        of_teacher.append(
            TeacherRow(
                hidden_states=as_tensor(row.hidden_states),
                last_hidden_state=as_tensor(row.last_hidden_state),
                positions=positions,
            )
        )
    assert plan.teacher is not None
    return Codecs(
        hidden_states=fit_codec(plan.hidden_states, of_features, width=layers * hidden, layers=layers),
        teacher=fit_teacher(plan.teacher, of_teacher, width=hidden),
    )
