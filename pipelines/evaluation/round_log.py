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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dspark.decoding.rounds import Completion
from pipelines.errors import UserError
from storage.files.filesystems import Folder

EVENTS, COMPLETIONS = "events-all.parquet", "completions-all.parquet"


def _schema(columns: Mapping[str, pa.DataType]) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


# What a row is about; the same columns lead both tables.
_LABELS = {
    **dict.fromkeys(("request_id", "prompt_id"), pa.string()),
    "turn": pa.int32(),
    **dict.fromkeys(("domain", "split"), pa.string()),
    "seed": pa.int64(),
    "temperature": pa.float64(),
    **dict.fromkeys(("drafter", "policy"), pa.string()),
}
_ROUND = {
    **dict.fromkeys(("round", "position", "anchor_id"), pa.int32()),
    "draft_ids": pa.list_(pa.int32()),
    **dict.fromkeys(("proposed", "scheduled", "accepted_raw", "committed"), pa.int32()),
    **dict.fromkeys(("bonus", "stop_cut"), pa.bool_()),
    "confidence_logits": pa.list_(pa.float32()),
    **dict.fromkeys(("accepted", "reached"), pa.list_(pa.bool_())),
    "acceptance_rate": pa.list_(pa.float32()),
    "committed_ids": pa.list_(pa.int32()),
    **dict.fromkeys(("draft_ms", "verify_ms"), pa.float32()),
    **dict.fromkeys(("batch_rows", "batch_tokens"), pa.int32()),
}
EVENT_SCHEMA = _schema(_LABELS | _ROUND)
COMPLETION_SCHEMA = _schema(
    {
        **_LABELS,
        "prompt_tokens": pa.int32(),
        "output_ids": pa.list_(pa.int32()),
        "finish_reason": pa.string(),
        "rounds": pa.int32(),
        "seconds": pa.float64(),
        "logit_gaps": pa.list_(pa.float32()),
    }
)
_ORDER = ("drafter", "temperature", "request_id", "seed", "policy", "prompt_id", "turn")
_MISSING = {"float": np.nan, "int32": -1, "bool": False}  # what fills up a short list


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


def event_table(completion: Completion, labels: Labels) -> pa.Table:
    """The rounds of a completion as rows of EVENT_SCHEMA."""
    shared = {"request_id": completion.request_id, **asdict(labels)}
    return pa.Table.from_pylist([shared | event.to_dict() for event in completion.rounds], schema=EVENT_SCHEMA)


def completion_table(completion: Completion, labels: Labels) -> pa.Table:
    """One row of COMPLETION_SCHEMA."""
    return pa.Table.from_pylist([_completion_row(completion, labels)], schema=COMPLETION_SCHEMA)


def _completion_row(completion: Completion, labels: Labels) -> dict[str, Any]:
    return {
        "request_id": completion.request_id,
        **asdict(labels),
        "prompt_tokens": len(completion.prompt_ids),
        "output_ids": [int(token) for token in completion.output_ids],
        "finish_reason": completion.finish_reason,
        "rounds": len(completion.rounds),
        "seconds": float(completion.seconds),
        "logit_gaps": [float(gap) for gap in completion.logit_gaps],
    }


class EventLog:
    """Events of one evaluation, one file a completion, in a folder (local, `s3://`, `gs://`).

    `circumstances` (contract, checkpoint, settings; JSON values) stands in every file; a folder with events of other
    circumstances is refused, so that figures never mix two drafters.
    """

    def __init__(self, folder: str | os.PathLike[str] | Folder, circumstances: Mapping[str, Any] | None = None) -> None:
        self.folder = folder if isinstance(folder, Folder) else Folder(folder)
        self.circumstances = json.dumps(circumstances or {}, sort_keys=True)

    def append(self, completion: Completion, labels: Labels, *, stopwatch: float = 0.0) -> None:
        """Keep one completion with all its rounds; whole or not at all. Doing it again replaces it.

        `stopwatch`: seconds of decoding since the completion before it, of all rows that were decoded together.
        """
        table = event_table(completion, labels).replace_schema_metadata(
            {
                "circumstances": self.circumstances,
                "completion": json.dumps(_completion_row(completion, labels)),
                "stopwatch": json.dumps(stopwatch),
            }
        )
        _write(self.folder, f"parts/{completion_key(completion.request_id, labels)}.parquet", table)

    def kept(self, request_id: str, labels: Labels) -> tuple[list[int], float] | None:
        """Answer and stopwatch of a completion that is already there; None when it is not."""
        name = f"parts/{completion_key(request_id, labels)}.parquet"
        if not self.folder.exists(name):
            return None
        metadata = _read(self.folder, name).schema.metadata
        return list(json.loads(metadata[b"completion"])["output_ids"]), json.loads(metadata.get(b"stopwatch", b"0"))

    def tables(self) -> tuple[pa.Table, pa.Table]:
        """(events, completions), in an order that does not depend on who wrote first.

        Raises EventsMismatch when one of them was recorded under other circumstances.
        """
        events, rows = [EVENT_SCHEMA.empty_table()], []
        for name in self.folder.files("parts", recursive=False):
            if not name.endswith(".parquet"):  # half written
                continue
            table = _read(self.folder, name)
            kept = table.schema.metadata or {}
            found = kept.get(b"circumstances", b"{}").decode()
            if found != self.circumstances:
                raise EventsMismatch(
                    f"{self.folder.describe(name)} was recorded with {found}, this evaluation asks for "
                    f"{self.circumstances}; evaluate into another folder, or remove this one to measure again"
                )
            rows.append(json.loads(kept[b"completion"]))
            events.append(table.replace_schema_metadata(None))
        order = [(name, "ascending") for name in _ORDER]
        metadata = {"circumstances": self.circumstances}
        return (
            pa.concat_tables(events).sort_by([*order, ("round", "ascending")]).replace_schema_metadata(metadata),
            pa.Table.from_pylist(rows, schema=COMPLETION_SCHEMA).sort_by(order).replace_schema_metadata(metadata),
        )

    def merge(self) -> None:
        """Write `events-all.parquet` and `completions-all.parquet`. The parts stay."""
        for name, table in zip((EVENTS, COMPLETIONS), self.tables(), strict=True):
            _write(self.folder, name, table)


def _write(folder: Folder, name: str, table: pa.Table) -> None:
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
    lengths = [pc.max(pc.list_value_length(table[name])).as_py() for name in ("draft_ids", "reached")]
    width = max(length or 0 for length in lengths) if slots is None else slots
    out: dict[str, np.ndarray] = {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        if not pa.types.is_list(column.type):
            out[name] = column.to_numpy(zero_copy_only=False)
        elif name not in ("committed_ids", "output_ids", "logit_gaps"):
            out[name] = _padded(column, width)
    return out


def _padded(column: pa.ListArray, width: int) -> np.ndarray:
    kind = column.type.value_type
    if not width:
        return np.empty((len(column), 0), dtype=kind.to_pandas_dtype())
    same = pc.list_slice(column, 0, width, return_fixed_size_list=True).flatten()
    return np.asarray(same.fill_null(_MISSING[str(kind)]).to_numpy(zero_copy_only=False)).reshape(len(column), width)
