"""The two kinds of record that the cache consists of: sealed JSON files, and Arrow rows with a checksum each."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import xxhash

from storage.cache.schema import parse_json
from storage.errors import WHOLE, CacheCorrupt, StorageError
from storage.identity import plain

ROW_FIELDS = (
    ("sample_id", pa.string()),
    ("input_ids", pa.list_(pa.int32())),
    ("spans", pa.list_(pa.int32())),
    ("context", pa.large_binary()),
    ("teacher", pa.large_binary()),
    ("extra", pa.string()),
    ("checksum", pa.uint64()),
)


def seal(content: Mapping[str, Any]) -> bytes:
    """JSON that carries the SHA-256 of its own content, in one fixed form: any changed byte shows."""
    content = plain(content)
    digest = hashlib.sha256(_form(content)).hexdigest()
    return _form({**content, "seal": digest})


def unseal(data: bytes, name: str) -> dict[str, Any]:
    """The content of a sealed record; CacheCorrupt names the file if a byte was changed."""
    content = parse_json(data, name)
    if not isinstance(content, dict) or not isinstance(content.get("seal"), str):
        raise CacheCorrupt(f"{name}: not a sealed record (an object with a `seal`); {WHOLE}")
    digest = content.pop("seal")
    if seal(content) != data or hashlib.sha256(_form(content)).hexdigest() != digest:
        raise CacheCorrupt(f"{name}: its content does not match its own SHA-256: it was edited or damaged; {WHOLE}")
    return content


def _form(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


@dataclass(frozen=True, kw_only=True)
class CacheRow:
    """One sequence as the builder hands it over. S tokens, m captured layers, d hidden size.

    `hidden_states` [S, m, d] or [S, m*d]; `last` [S, d] (after the final norm) or None when the teacher is not stored;
    bf16 or float32, torch or numpy. `spans` are half-open, sorted, apart, and cover the supervised tokens.
    """

    sample_id: str
    input_ids: Sequence[int] | np.ndarray | torch.Tensor
    spans: Sequence[tuple[int, int]]
    hidden_states: torch.Tensor | np.ndarray
    last_hidden_state: torch.Tensor | np.ndarray | None
    extra: Mapping[str, Any] = field(default_factory=dict)


def check_spans(spans: Iterable[tuple[int, int]], length: int, sample_id: str) -> tuple[tuple[int, int], ...]:
    """The spans as a tuple; ValueError unless they are sorted, apart, non-empty and inside the sequence."""
    checked = tuple((int(start), int(end)) for start, end in spans)
    previous = 0
    for start, end in checked:
        if not previous <= start < end <= length:
            raise StorageError(
                f"sample {sample_id!r}: span ({start}, {end}) must be non-empty, inside 0..{length} "
                f"and not before {previous}, where the span before it ends"
            )
        previous = end
    return checked


def teacher_positions(spans: Iterable[tuple[int, int]], length: int, scope: str = "supervised") -> np.ndarray:
    """Positions whose next token is supervised (or all of them), int64, ascending."""
    if scope == "all":
        return np.arange(length)
    pieces = [np.arange(max(start - 1, 0), end - 1) for start, end in spans]
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def row_checksum(
    sample_id: str, input_ids: np.ndarray, spans: np.ndarray, context: bytes, teacher: bytes, extra: str
) -> int:
    """XXH3-64 over the columns in order, each preceded by its length in bytes as a little-endian u64."""
    digest = xxhash.xxh3_64()
    columns: tuple[Any, ...] = (
        sample_id.encode(),
        input_ids.astype("<i4", copy=False).tobytes(),
        spans.astype("<i4", copy=False).tobytes(),
        context,
        teacher,
        extra.encode(),
    )
    for column in columns:
        digest.update(struct.pack("<Q", memoryview(column).nbytes))
        digest.update(column)
    return digest.intdigest()


def schema(metadata: Mapping[str, str]) -> pa.Schema:
    """The shards' schema; the metadata says whose they are."""
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in ROW_FIELDS], metadata=dict(metadata))


def dataset_features() -> dict[str, Any]:
    """The same columns in the words of Hugging Face `datasets`."""
    integers = {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "List"}
    kinds = {"input_ids": integers, "spans": integers}
    names = {"large_binary": "large_binary", "string": "string", "uint64": "uint64"}
    return {n: kinds.get(n) or {"dtype": names[str(kind)], "_type": "Value"} for n, kind in ROW_FIELDS}
