"""The event log: one row a decoding round, one a completion, as Parquet.

While an evaluation runs, every prompt has its own file, written whole or not at all, so that a stopped evaluation goes
on with the prompts that are missing. When all are there, they are merged into one file of rounds and one of
completions; figures are derived from those and from nothing else.

Legend: R rounds, G block slots.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.errors import UserError
from storage.errors import MissingFile
from storage.files.filesystems import TEMPORARY_SUFFIX, Folder

# What a row is about; the same columns lead both tables.
LABEL_FIELDS = [
    pa.field("request_id", pa.string(), nullable=False),
    pa.field("prompt_id", pa.string(), nullable=False),
    pa.field("turn", pa.int32(), nullable=False),
    pa.field("domain", pa.string(), nullable=False),
    pa.field("split", pa.string(), nullable=False),
    pa.field("seed", pa.int64(), nullable=False),
    pa.field("temperature", pa.float64(), nullable=False),
    pa.field("drafter", pa.string(), nullable=False),
    pa.field("policy", pa.string(), nullable=False),
]
EVENT_SCHEMA = pa.schema(
    [
        *LABEL_FIELDS,
        pa.field("round", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("anchor_id", pa.int32(), nullable=False),
        pa.field("draft_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("proposed", pa.int32(), nullable=False),
        pa.field("scheduled", pa.int32(), nullable=False),
        pa.field("accepted_raw", pa.int32(), nullable=False),
        pa.field("committed", pa.int32(), nullable=False),
        pa.field("bonus", pa.bool_(), nullable=False),
        pa.field("stop_cut", pa.bool_(), nullable=False),
        pa.field("confidence_logits", pa.list_(pa.float32()), nullable=False),
        pa.field("accepted", pa.list_(pa.bool_()), nullable=False),
        pa.field("reached", pa.list_(pa.bool_()), nullable=False),
        pa.field("acceptance_rate", pa.list_(pa.float32()), nullable=False),
        pa.field("committed_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("draft_ms", pa.float32(), nullable=False),
        pa.field("verify_ms", pa.float32(), nullable=False),
        pa.field("batch_rows", pa.int32(), nullable=False),
        pa.field("batch_tokens", pa.int32(), nullable=False),
    ]
)
COMPLETION_SCHEMA = pa.schema(
    [
        *LABEL_FIELDS,
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("output_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("rounds", pa.int32(), nullable=False),
        pa.field("seconds", pa.float64(), nullable=False),
        pa.field("logit_gaps", pa.list_(pa.float32()), nullable=False),
    ]
)
_ROUND_FIELDS = [field.name for field in EVENT_SCHEMA if field not in LABEL_FIELDS]
_MISSING = {"f": np.nan, "i": -1, "b": False}


class EventsMismatch(UserError):
    """Events that lie here were recorded under other circumstances than those asked for."""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What a completion was asked for: `turn` (from 0) of the prompt `prompt_id`, and how it was decoded.

    `drafter` is "dspark", "no-sequential-head", "plain" or another name.
    """

    prompt_id: str
    turn: int = 0
    domain: str
    split: str
    seed: int
    temperature: float
    drafter: str
    policy: str


def completion_key(request_id: str, labels: Labels) -> str:
    """The name under which one completion's events are kept; equal for equal circumstances."""
    text = json.dumps([request_id, asdict(labels)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def event_table(completion: Any, labels: Labels) -> pa.Table:
    """The rounds of a `dspark.decoding.decoder.Completion` as rows of EVENT_SCHEMA."""
    shared = {"request_id": completion.request_id, **asdict(labels)}
    rows = [shared | {name: _plain(getattr(event, name)) for name in _ROUND_FIELDS} for event in completion.rounds]
    return pa.Table.from_pylist(rows, schema=EVENT_SCHEMA)


def completion_table(completion: Any, labels: Labels) -> pa.Table:
    """One row of COMPLETION_SCHEMA."""
    row = {
        "request_id": completion.request_id,
        **asdict(labels),
        "prompt_tokens": len(completion.prompt_ids),
        "output_ids": [int(token) for token in completion.output_ids],
        "finish_reason": completion.finish_reason,
        "rounds": len(completion.rounds),
        "seconds": float(completion.seconds),
        "logit_gaps": [float(gap) for gap in completion.logit_gaps],
    }
    return pa.Table.from_pylist([row], schema=COMPLETION_SCHEMA)


class EventLog:
    """Events of one evaluation, one file a completion, in a folder (local, `s3://`, `gs://`).

    `circumstances` (contract, checkpoint, settings; JSON values) stands in every file; a folder with events of other
    circumstances is refused, so that figures never mix two drafters.
    """

    def __init__(self, folder: str | os.PathLike[str] | Folder, circumstances: Mapping[str, Any] | None = None) -> None:
        self.folder = folder if isinstance(folder, Folder) else Folder(folder)
        self.circumstances = json.dumps(circumstances or {}, sort_keys=True)

    def _parts(self) -> list[str]:
        files = self.folder.files("parts", recursive=False)
        return [name for name in files if name.endswith(".parquet") and not name.endswith(TEMPORARY_SUFFIX)]

    def finished(self) -> set[str]:
        """Keys (`completion_key`) of the completions that are already there.

        Raises EventsMismatch when one of them was recorded under other circumstances.
        """
        return {name.rsplit("/", 1)[-1].removesuffix(".parquet") for name, _ in self._checked()}

    def _checked(self) -> Iterator[tuple[str, pa.Table]]:
        for name in self._parts():
            table = _read(self.folder, name)
            found = (table.schema.metadata or {}).get(b"circumstances", b"{}").decode()
            if found != self.circumstances:
                raise EventsMismatch(
                    f"{self.folder.describe(name)} was recorded with {found}, this evaluation asks for "
                    f"{self.circumstances}; evaluate into another folder, or remove this one to measure again"
                )
            yield name, table

    def append(self, completion: Any, labels: Labels, *, stopwatch: float = 0.0) -> None:
        """Keep one completion with all its rounds; whole or not at all. Doing it again replaces it.

        `stopwatch`: seconds of decoding since the completion before it, of all rows that were decoded together.
        """
        rows = completion_table(completion, labels).to_pylist()
        table = event_table(completion, labels).replace_schema_metadata(
            {
                "circumstances": self.circumstances,
                "completion": json.dumps(rows[0]),
                "stopwatch": json.dumps(stopwatch),
            }
        )
        write_table(self.folder, f"parts/{completion_key(completion.request_id, labels)}.parquet", table)

    def kept(self, request_id: str, labels: Labels) -> tuple[list[int], float] | None:
        """Answer and stopwatch of a completion that is already there; None when it is not."""
        name = f"parts/{completion_key(request_id, labels)}.parquet"
        if not self.folder.exists(name):
            return None
        metadata = _read(self.folder, name).schema.metadata
        return list(json.loads(metadata[b"completion"])["output_ids"]), json.loads(metadata.get(b"stopwatch", b"0"))

    def tables(self, keys: Iterable[str] | None = None) -> tuple[pa.Table, pa.Table]:
        """(events, completions), in an order that does not depend on who wrote first.

        `keys` limits them to those completions; FileNotFoundError names how many are missing.
        """
        wanted = None if keys is None else set(keys)
        events, rows, seen = [], [], set()
        for name, table in self._checked():
            key = name.rsplit("/", 1)[-1].removesuffix(".parquet")
            if wanted is None or key in wanted:
                seen.add(key)
                rows.append(json.loads(table.schema.metadata[b"completion"]))
                events.append(table.replace_schema_metadata(None))
        if wanted is not None and (missing := wanted - seen):
            raise MissingFile(
                f"{len(missing)} of {len(wanted)} completions are not in {self.folder}; run the evaluation again, it "
                "goes on with those"
            )
        metadata = {"circumstances": self.circumstances}
        all_events = pa.concat_tables(events) if events else EVENT_SCHEMA.empty_table()
        completions = pa.Table.from_pylist(rows, schema=COMPLETION_SCHEMA)
        order = [("drafter", "ascending"), ("temperature", "ascending"), ("request_id", "ascending")]
        order += [("seed", "ascending"), ("policy", "ascending"), ("prompt_id", "ascending"), ("turn", "ascending")]
        return (
            all_events.sort_by([*order, ("round", "ascending")]).replace_schema_metadata(metadata),
            completions.sort_by(order).replace_schema_metadata(metadata),
        )

    def merge(self, keys: Iterable[str] | None = None, *, name: str = "all") -> tuple[str, str]:
        """Write `events-NAME.parquet` and `completions-NAME.parquet`; returns both names. The parts stay."""
        events, completions = self.tables(keys)
        names = (f"events-{name}.parquet", f"completions-{name}.parquet")
        write_table(self.folder, names[0], events)
        write_table(self.folder, names[1], completions)
        return names


def write_table(folder: Folder, name: str, table: pa.Table) -> None:
    """Write one Parquet file that appears whole or not at all."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    folder.write(name, buffer.getvalue())


def read_events(*paths: str | os.PathLike[str]) -> pa.Table:
    """Events of one or more files; FileNotFoundError or ValueError name the file that cannot be read."""
    return _read_all(paths, EVENT_SCHEMA)


def read_completions(*paths: str | os.PathLike[str]) -> pa.Table:
    """Completions of one or more files."""
    return _read_all(paths, COMPLETION_SCHEMA)


def _read_all(paths: Sequence[str | os.PathLike[str]], schema: pa.Schema) -> pa.Table:
    tables = []
    for path in paths:
        parent, _, name = os.fspath(path).rpartition("/")
        table = _read(Folder(parent or "."), name)
        if missing := [column for column in schema.names if column not in table.schema.names]:
            raise UserError(
                f"{path} lacks the columns {', '.join(missing)}: it is no event file of this version; evaluate again"
            )
        tables.append(table.select(schema.names).cast(schema).replace_schema_metadata(None))
    return pa.concat_tables(tables) if tables else schema.empty_table()


def _read(folder: Folder, name: str) -> pa.Table:
    try:
        return pq.read_table(pa.BufferReader(folder.read(name)))
    except pa.ArrowInvalid as error:
        raise UserError(
            f"{folder.describe(name)} is no Parquet file ({error}); remove it and evaluate again"
        ) from error


def columns(table: pa.Table, *, slots: int | None = None) -> dict[str, np.ndarray]:
    """Columns as numpy arrays. List columns become [R, slots], short rows filled with NaN, -1 or False.

    `slots` is the longest list by default. Token lists other than `draft_ids` are left out (they are ragged text,
    not figures).
    """
    widths = [_longest(table.column(name)) for name in ("draft_ids", "reached") if name in table.column_names]
    width = max(widths, default=0) if slots is None else slots
    out: dict[str, np.ndarray] = {}
    for name in table.column_names:
        column = table.column(name)
        if not pa.types.is_list(column.type):
            out[name] = np.asarray(column.to_pylist(), dtype=_dtype(column.type))
        elif name not in ("committed_ids", "output_ids", "logit_gaps"):
            out[name] = _padded(column, width)
    return out


def _dtype(kind: pa.DataType) -> Any:
    return object if pa.types.is_string(kind) else kind.to_pandas_dtype()


def _lists(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """All values of a list column one after another, and the length of each row."""
    if len(column) == 0:
        return np.array([], dtype=column.type.value_type.to_pandas_dtype()), np.array([], dtype=np.int64)
    array = pa.concat_arrays(column.chunks)
    return array.flatten().to_numpy(zero_copy_only=False), np.diff(array.offsets.to_numpy())


def _longest(column: pa.ChunkedArray) -> int:
    return int(np.max(_lists(column)[1], initial=0))


def _padded(column: pa.ChunkedArray, width: int) -> np.ndarray:
    values, lengths = _lists(column)
    out = np.full((len(column), width), _MISSING[values.dtype.kind], dtype=values.dtype)
    rows = np.repeat(np.arange(len(column)), lengths)
    places = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    kept = places < width
    out[rows[kept], places[kept]] = values[kept]
    return out


def _plain(value: Any) -> Any:
    """Numpy and torch scalars and arrays as Python values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value
