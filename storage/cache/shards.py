"""One shard's rows as an Arrow IPC stream, written in bounded record batches and read one batch at a time."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import pyarrow as pa
import torch
import zstandard

from storage.cache.plan import Codecs
from storage.cache.records import (
    CacheRow,
    check_spans,
    row_checksum,
    schema,
    teacher_positions,
)
from storage.cache.schema import parse_json
from storage.cache.streams import read_batch
from storage.codecs.base import StoredTeacher, as_tensor
from storage.errors import AGAIN, CacheCorrupt, NonFiniteState, StorageError

BATCH_BYTES = 4 << 20
"""A record batch is closed once its columns reach this size, so offsets inside it stay far below 2^31."""


@dataclass(frozen=True, kw_only=True)
class StoredRow:
    """One sequence as a reader gets it. S tokens, P teacher positions.

    `hidden_states` [S, c]: m*d captured states, or the components that the cache's codec keeps; `teacher` at
    `teacher_positions` [P]: the teacher of label t+1 is what the target thinks at t. None if the cache stores none.
    """

    sample_id: str
    input_ids: torch.Tensor
    spans: tuple[tuple[int, int], ...]
    hidden_states: torch.Tensor
    teacher_positions: torch.Tensor
    teacher: StoredTeacher | None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def last_hidden_state(self) -> torch.Tensor:
        """[P, d], [0, 0] without a teacher. ValueError where the teacher is kept in another form."""
        if self.teacher is None:
            return self.hidden_states.new_empty(0, 0)
        if self.teacher.last_hidden_state is None:
            raise StorageError(
                f"sample {self.sample_id!r}: this cache keeps no last states, but "
                f"{'the layer they are computed from' if self.teacher.source is not None else 'sparse logits'}; "
                "read `teacher`, or recode the cache to a teacher codec with states"
            )
        return self.teacher.last_hidden_state

    @property
    def loss_mask(self) -> torch.Tensor:
        """[S] bool."""
        mask = torch.zeros(len(self.input_ids), dtype=torch.bool)
        for start, end in self.spans:
            mask[start:end] = True
        return mask


def encode_row(row: CacheRow, codecs: Codecs, *, scope: str) -> dict[str, Any]:
    """A row's columns. ValueError names the sample for wrong shapes, NonFiniteState for NaN and infinity."""
    input_ids = np.asarray(row.input_ids, np.int32).reshape(-1)
    length = len(input_ids)
    spans = check_spans(row.spans, length, row.sample_id)
    hidden_states = as_tensor(row.hidden_states)
    hidden_states = hidden_states.reshape(hidden_states.shape[0], -1)
    _check(row.sample_id, "captured states", hidden_states, (length, codecs.hidden_states.width))
    context = codecs.hidden_states.encode(hidden_states, first=True)
    teacher, positions = b"", teacher_positions(spans, length, scope)
    if codecs.teacher is not None:
        if row.last_hidden_state is None:
            raise StorageError(f"sample {row.sample_id!r}: no last state, but the cache stores the teacher")
        last = as_tensor(row.last_hidden_state)
        _check(row.sample_id, "last states", last, (length, codecs.teacher.width))
        if len(positions):
            teacher = codecs.teacher.encode_teacher(hidden_states, last, positions)
    flat = np.array(spans, np.int32).reshape(-1)
    extra = json.dumps(dict(row.extra), sort_keys=True, ensure_ascii=False)
    return {
        "sample_id": row.sample_id,
        "input_ids": input_ids,
        "spans": flat,
        "context": context,
        "teacher": teacher,
        "extra": extra,
        "checksum": row_checksum(row.sample_id, input_ids, flat, context, teacher, extra),
    }


def _check(sample_id: str, what: str, states: torch.Tensor, shape: tuple[int, int]) -> None:
    if tuple(states.shape) != shape:
        raise StorageError(f"sample {sample_id!r}: {what} are {tuple(states.shape)}, expected {shape}")
    finite = torch.isfinite(states)
    if not bool(finite.all()):
        token, channel = (int(v) for v in (~finite).nonzero()[0])
        raise NonFiniteState(
            f"sample {sample_id!r}: {what} hold {states[token, channel].item()} at token {token}, channel {channel}; "
            "capture in bfloat16 or float32 (float16 overflows), or leave the sample out"
        )


def write_rows(stream: IO[bytes], encoded: Iterable[Mapping[str, Any]], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Write the rows; returns sizes, the stream's SHA-256 and where each record batch lies."""
    counted = _Counted(stream)
    kind = schema(metadata)
    batches: list[dict[str, int]] = []
    totals = {"rows": 0, "tokens": 0, "context_bytes": 0, "teacher_bytes": 0}
    counted.write(kind.serialize().to_pybytes())
    pending: list[Mapping[str, Any]] = []
    pending_bytes = 0

    def close_batch() -> None:
        nonlocal pending, pending_bytes
        columns = [pa.array([row[f.name] for row in pending], f.type) for f in kind]
        data = pa.record_batch(columns, schema=kind).serialize()
        batches.append({"offset": counted.size, "bytes": data.size, "rows": len(pending)})
        counted.write(data)
        pending, pending_bytes = [], 0

    for row in encoded:
        pending.append(row)
        pending_bytes += len(row["context"]) + len(row["teacher"]) + len(row["extra"]) + 4 * len(row["input_ids"])
        totals["rows"] += 1
        totals["tokens"] += len(row["input_ids"])
        totals["context_bytes"] += len(row["context"])
        totals["teacher_bytes"] += len(row["teacher"])
        if pending_bytes >= BATCH_BYTES:
            close_batch()
    if pending:
        close_batch()
    counted.write(b"\xff\xff\xff\xff\x00\x00\x00\x00")  # the IPC end-of-stream mark
    return {**totals, "bytes": counted.size, "sha256": counted.digest.hexdigest(), "batches": batches}


class _Counted:
    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.size, self.digest = stream, 0, hashlib.sha256()

    def write(self, data: bytes | pa.Buffer) -> None:
        self.stream.write(data)
        self.digest.update(data)
        self.size += memoryview(data).nbytes


class ShardReader:
    """Random rows of one shard, through its commit record; only the batch asked for is looked at."""

    def __init__(self, file: pa.NativeFile, commit: Mapping[str, Any], name: str) -> None:
        self.name, self._file, self._commit = name, file, commit
        size, batches = file.size(), commit["batches"]
        if size != commit["bytes"]:
            raise CacheCorrupt(f"{name}: {size} bytes, {commit['bytes']} were committed; {AGAIN}")
        if any(batch["offset"] + batch["bytes"] > size for batch in batches):
            raise CacheCorrupt(f"{name}: its commit record has record batches beyond its {size} bytes; {AGAIN}")
        # Of a mapped file all bytes at once, without a copy: then rows are views of it.
        self._mapped = file.read_buffer(size) if isinstance(file, pa.MemoryMappedFile | pa.BufferReader) else None
        self._firsts = np.cumsum([0] + [batch["rows"] for batch in batches])
        if self._firsts[-1] != commit["rows"]:
            raise CacheCorrupt(
                f"{name}: its record batches have {self._firsts[-1]} rows, not {commit['rows']}; {AGAIN}"
            )
        self._schema = schema({})
        self._current: tuple[int, pa.RecordBatch] | None = None
        self.touched = 0  # bytes looked at; they stay in memory while a mapped file is open

    def batch(self, number: int) -> pa.RecordBatch:
        """Record batch `number`; CacheCorrupt if it cannot be parsed."""
        if self._current is not None and self._current[0] == number:
            return self._current[1]
        entry = self._commit["batches"][number]
        try:
            if self._mapped is not None:
                buffer = self._mapped.slice(entry["offset"], entry["bytes"])
            else:
                buffer = pa.py_buffer(self._file.read_at(entry["bytes"], entry["offset"]))
            self.touched += entry["bytes"]
            batch = read_batch(pa.ipc.read_message(buffer), self._schema)
        except (ValueError, struct.error, pa.ArrowException, OSError, EOFError) as error:
            raise CacheCorrupt(f"{self.name}: record batch {number} cannot be read ({error}); {AGAIN}") from error
        if batch.num_rows != entry["rows"]:
            raise CacheCorrupt(
                f"{self.name}: record batch {number} has {batch.num_rows} rows, not {entry['rows']}; {AGAIN}"
            )
        self._current = (number, batch)
        return batch

    def row(self, index: int) -> dict[str, Any]:
        """The columns of one row, states still coded."""
        number = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return columns_of(self.batch(number), index - int(self._firsts[number]))

    def rows(self) -> Iterator[dict[str, Any]]:
        for index in range(int(self._firsts[-1])):
            yield self.row(index)


def columns_of(batch: pa.RecordBatch, index: int) -> dict[str, Any]:
    """One row of a record batch without copying its states."""
    return {
        "sample_id": batch.column(0)[index].as_py(),
        "input_ids": batch.column(1)[index].values.to_numpy(),
        "spans": batch.column(2)[index].values.to_numpy(),
        "context": _bytes_at(batch.column(3), index),
        "teacher": _bytes_at(batch.column(4), index),
        "extra": batch.column(5)[index].as_py(),
        "checksum": batch.column(6)[index].as_py(),
    }


def _bytes_at(column: pa.Array, index: int) -> memoryview:
    """One value of a large_binary column; Arrow's own scalars are copies."""
    _, offsets, data = column.buffers()
    start, stop = np.frombuffer(offsets, np.int64, 2, 8 * (column.offset + index))
    return memoryview(b"" if data is None else data).cast("B")[start:stop]


def checksum_of(columns: Mapping[str, Any]) -> int:
    """What the row's checksum should be."""
    names = ("sample_id", "input_ids", "spans", "context", "teacher", "extra")
    return row_checksum(*(columns[name] for name in names))


def decode_row(
    columns: Mapping[str, Any], codecs: Codecs, *, scope: str, device: torch.device | str, dtype: torch.dtype
) -> StoredRow:
    """Columns to states on the device. CacheCorrupt names the sample whose columns are not those of a row."""
    length, teacher = len(columns["input_ids"]), None
    try:
        # Before anything is decoded: the spans say how many teacher positions there are.
        spans = check_spans(columns["spans"].reshape(-1, 2), length, columns["sample_id"])
        positions = teacher_positions(spans, length, scope)
        hidden_states = codecs.hidden_states.decode(columns["context"], length, device=device, dtype=dtype)
        if codecs.teacher is not None and not len(positions):
            teacher = StoredTeacher(
                last_hidden_state=torch.empty(0, codecs.teacher.out_width, dtype=dtype, device=device)
            )
        elif codecs.teacher is not None:
            teacher = codecs.teacher.decode_teacher(columns["teacher"], positions, device=device, dtype=dtype)
    except (ValueError, IndexError, KeyError, struct.error, zstandard.ZstdError) as error:
        raise CacheCorrupt(f"sample {columns['sample_id']!r} cannot be decoded: {error}; {AGAIN}") from error
    return StoredRow(
        sample_id=columns["sample_id"],
        input_ids=torch.from_numpy(columns["input_ids"].astype(np.int64)),
        spans=spans,
        hidden_states=hidden_states,
        teacher_positions=torch.from_numpy(positions),
        teacher=teacher,
        extra=parse_json(columns["extra"].encode(), f"sample {columns['sample_id']!r}, extra"),
    )
