"""What a cache will hold, fixed before anything is captured: samples in order, cut into shards, and their codecs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from storage.cache.records import check_spans
from storage.cache.streams import read_stream
from storage.codecs.base import Codec
from storage.codecs.registry import CodecSpec
from storage.errors import WHOLE, CacheCorrupt, StorageError
from storage.identity import identity_of, plain

Spans = Sequence[tuple[int, int]]

FORMAT = "dspark-target-cache"
VERSION = 1
DEFAULT_TOKENS_PER_SHARD = 65_536
SAMPLE_COLUMNS = {
    "sample_id": pa.string(),
    "length": pa.int32(),
    "unit": pa.int32(),
    "spans": pa.list_(pa.int32()),
}
LONGEST = 2**27  # tokens of a sequence: a record batch with one alone is far below Arrow's 2^31 elements
ROW_BYTES = 200  # of a row beside its states and token ids: id, spans, the JSON of `extra`, checksum, Arrow's offsets


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """The cache to build.

    `contract`: how states and blocks are to be read (the caller's value object as a dict). `inputs`: whatever else the
    content depends on (identity of the conversations, capture dtype, seeds). `samples`: (sample id, tokens) in order,
    `spans` their supervised spans where they are known beforehand: then sizes are estimated exactly, rows must have
    just these, and a reader knows them without opening a shard. `skipped`: sample ids left out, by reason; `shortened`:
    those cut to a length limit. `max_bytes`: the shards may not grow beyond it.
    """

    contract: Mapping[str, Any]
    num_layers: int
    hidden_size: int
    samples: Sequence[tuple[str, int]]
    hidden_states: CodecSpec = field(default_factory=lambda: CodecSpec(name="bf16"))
    teacher: CodecSpec | None = field(default_factory=lambda: CodecSpec(name="bf16"))
    teacher_scope: Literal["supervised", "all"] = "supervised"
    tokens_per_shard: int = DEFAULT_TOKENS_PER_SHARD
    inputs: Mapping[str, Any] = field(default_factory=dict)
    spans: Sequence[Spans] | None = None
    skipped: Mapping[str, Sequence[str]] = field(default_factory=dict)
    shortened: Sequence[str] = ()
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.samples:
            counts = {reason: len(ids) for reason, ids in self.skipped.items()}
            raise StorageError(f"no sample is left to cache (left out: {counts or 'none'}); give more conversations")
        seen: set[str] = set()
        for sample_id, length in self.samples:
            if sample_id in seen:
                raise StorageError(f"sample id {sample_id!r} occurs twice; ids must be unique in a cache")
            if length < 1:
                raise StorageError(
                    f"sample {sample_id!r} has {length} tokens; leave empty rows out and list them as skipped"
                )
            if length > LONGEST:
                raise StorageError(f"sample {sample_id!r} has {length:,} tokens, a row holds {LONGEST:,}: cut it")
            seen.add(sample_id)
        if self.spans is not None:
            for (sample_id, length), spans in zip(self.samples, self.spans, strict=True):
                check_spans(spans, length, sample_id)

    @property
    def shards(self) -> list[tuple[int, int]]:
        return plan_shards([length for _, length in self.samples], self.tokens_per_shard)

    @property
    def tokens(self) -> int:
        return sum(length for _, length in self.samples)

    def fields(self) -> dict[str, Any]:
        """Everything that the cache's content depends on, as it is compared on resume."""
        return plain(
            {
                "format": FORMAT,
                "version": VERSION,
                "contract": self.contract,
                "inputs": self.inputs,
                "num_layers": self.num_layers,
                "hidden_size": self.hidden_size,
                "features": self.hidden_states.to_dict(),
                "teacher": self.teacher.to_dict() if self.teacher else None,
                "teacher_scope": self.teacher_scope,
                "unit_tokens": self.tokens_per_shard,
                "samples": {
                    "count": len(self.samples),
                    "tokens": self.tokens,
                    "order_sha256": order_hash(self.samples),
                    "spans_sha256": None if self.spans is None else spans_hash(self.spans),
                },
            }
        )

    @property
    def identity(self) -> str:
        return identity_of(self.fields())


@dataclass(frozen=True, kw_only=True)
class Codecs:
    """The fitted codecs of a cache. `teacher` is None when last states are not stored."""

    hidden_states: Codec
    teacher: Codec | None

    def estimate_bytes(self, tokens: int, teacher_tokens: int, rows: int) -> int:
        """Bytes of a shard's rows, by the rates measured when the codecs were fitted (raw size if never)."""
        size = tokens * (_bytes_per_token(self.hidden_states) + 4) + rows * ROW_BYTES
        if self.teacher is not None:
            size += teacher_tokens * _bytes_per_token(self.teacher)
        return round(size)


def _bytes_per_token(codec: Codec) -> float:
    return float(codec.measured.get("bytes_per_token", 2 * codec.width))


def plan_shards(sample_lengths: Sequence[int], tokens_per_shard: int) -> list[tuple[int, int]]:
    """Cut the samples into half-open ranges of at most `tokens_per_shard` tokens each (one sample at least)."""
    if tokens_per_shard < 1:
        raise StorageError(f"tokens_per_shard = {tokens_per_shard}: a shard holds at least one token")
    shards, start, filled = [], 0, 0
    for index, length in enumerate(sample_lengths):
        if index > start and filled + length > tokens_per_shard:
            shards.append((start, index))
            start, filled = index, 0
        filled += length
    if start < len(sample_lengths):
        shards.append((start, len(sample_lengths)))
    return shards


def order_hash(samples: Sequence[tuple[str, int]]) -> str:
    """SHA-256 over the samples' ids and lengths in order."""
    digest = hashlib.sha256()
    for sample_id, length in samples:
        digest.update(f"{sample_id}\t{length}\n".encode())
    return digest.hexdigest()


def spans_hash(spans: Sequence[Spans]) -> str:
    """SHA-256 over the samples' spans in order: "start-end,start-end" and a newline for each."""
    digest = hashlib.sha256()
    for of_sample in spans:
        digest.update((",".join(f"{start}-{end}" for start, end in of_sample) + "\n").encode())
    return digest.hexdigest()


def write_samples(plan: CachePlan) -> bytes:
    """`samples.arrow`: an IPC stream with sample_id, length and shard, and spans where the plan has them."""
    shards = np.repeat(np.arange(len(plan.shards), dtype=np.int32), [stop - start for start, stop in plan.shards])
    columns = {
        "sample_id": pa.array([sample_id for sample_id, _ in plan.samples], pa.string()),
        "length": pa.array([length for _, length in plan.samples], pa.int32()),
        "unit": pa.array(shards, pa.int32()),
    }
    if plan.spans is not None:
        flat = [[int(edge) for span in spans for edge in span] for spans in plan.spans]
        columns["spans"] = pa.array(flat, pa.list_(pa.int32()))
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


@dataclass(frozen=True, kw_only=True)
class SampleList:
    """Which sample is which row: ids, lengths [N] int32, `starts` [shards + 1], the first row of each shard.

    `edges` holds the spans' edges of all rows back to back and `edge_starts` [N + 1] where each row's begin; None where
    the plan did not know them.
    """

    sample_ids: list[str]
    lengths: np.ndarray
    starts: np.ndarray
    edges: np.ndarray | None = None
    edge_starts: np.ndarray | None = None

    @property
    def num_shards(self) -> int:
        return len(self.starts) - 1

    @classmethod
    def parse(cls, data: bytes, name: str) -> SampleList:
        """Raises CacheCorrupt, naming the file, for anything but what `write_samples` writes."""
        try:
            table = read_stream(data, SAMPLE_COLUMNS)
            ids, lengths, shards = table["sample_id"].to_pylist(), table["length"].to_numpy(), table["unit"].to_numpy()
            if len(shards) == 0 or shards[0] != 0 or not np.isin(np.diff(shards), (0, 1)).all():
                raise StorageError("its shards do not count up from 0")
            if lengths.min() < 1 or lengths.max() > LONGEST:
                raise StorageError(f"its lengths are not all from 1 to {LONGEST}")
            edges = edge_starts = None
            if "spans" in table.column_names:
                spans = table["spans"].combine_chunks()
                edges, edge_starts = spans.values.to_numpy(), spans.offsets.to_numpy()
                _check_edges(edges, edge_starts, lengths)
        except (ValueError, TypeError, KeyError, OSError, pa.ArrowException) as error:
            raise CacheCorrupt(f"{name}: not the list of samples ({error}); {WHOLE}") from error
        return cls(
            sample_ids=ids,
            lengths=lengths,
            starts=np.searchsorted(shards, np.arange(int(shards[-1]) + 2)),
            edges=edges,
            edge_starts=edge_starts,
        )

    def spans(self, row: int) -> Spans | None:
        """The row's supervised spans, if the plan knew them."""
        if self.edges is None or self.edge_starts is None:
            return None
        flat = self.edges[self.edge_starts[row] : self.edge_starts[row + 1]].tolist()
        return tuple(zip(flat[::2], flat[1::2], strict=True))

    def teacher_tokens(self, start: int, stop: int, scope: str) -> int:
        """Teacher positions of the rows start..stop-1; one for every token where spans are not known."""
        if scope == "all" or self.edges is None:
            return int(self.lengths[start:stop].sum(dtype=np.int64))
        edges = self.edges[self.edge_starts[start] : self.edge_starts[stop]].reshape(-1, 2)  # type: ignore[index]
        return int((edges[:, 1] - 1 - np.maximum(edges[:, 0] - 1, 0)).sum())

    def locate(self, row: int) -> tuple[int, int]:
        """(shard, row within it)."""
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        return shard, row - int(self.starts[shard])


def _check_edges(edges: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
    """ValueError unless the rows' spans are pairs, ascending, apart and inside their rows."""
    counts = np.diff(starts)
    if len(edges) < starts[-1] or (counts % 2).any():
        raise StorageError("a row's spans are not pairs")
    used = edges[starts[0] : starts[-1]].astype(np.int64)
    row = np.repeat(np.arange(len(lengths)), counts)
    firsts, ends = used[::2], used[1::2]
    before = np.where(np.diff(row[::2], prepend=-1) == 0, np.roll(ends, 1), 0)
    if (firsts < before).any() or (firsts >= ends).any() or (ends > lengths[row[::2]]).any():
        raise StorageError("a row's spans are not ascending, apart and inside the row")
