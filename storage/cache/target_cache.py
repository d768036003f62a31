"""Reading a target cache, and the names a user of this package needs in one place.

N rows (sequences), S tokens of a row, P teacher positions of a row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from storage.cache.commits import (
    COMPLETE,
    Opened,
    Root,
    committed_shards,
    create_or_resume,
    finish,
    load_codecs,
    open_folder,
    read_complete,
    write_shard,
)
from storage.cache.plan import CachePlan, Codecs, Spans, plan_shards
from storage.cache.read_ahead import ReadAhead
from storage.cache.records import CacheRow
from storage.cache.shards import ShardReader, StoredRow, checksum_of, decode_row, encode_row
from storage.cache.verify import Problem, verify
from storage.codecs.base import Codec
from storage.codecs.fitting import fit_codec
from storage.codecs.registry import CodecSpec
from storage.errors import AGAIN, CacheCorrupt, NonFiniteState, StorageFull
from storage.files.filesystems import Folder
from storage.files.local_copy import LocalCopy

__all__ = [
    "CacheCorrupt",
    "CachePlan",
    "CacheRow",
    "Codec",
    "CodecSpec",
    "Codecs",
    "NonFiniteState",
    "Problem",
    "ReadAhead",
    "StorageFull",
    "StoredRow",
    "TargetCache",
    "create_or_resume",
    "encode_row",
    "finish",
    "fit_codec",
    "is_finished",
    "load_codecs",
    "plan_shards",
    "verify",
    "write_shard",
]

READ_AHEAD_BYTES = 1 << 30
MAPPED_BYTES = 256 << 20  # of shards' pages that one process keeps in its memory


def is_finished(root: Root) -> bool:
    """Whether a cache was built there to the end."""
    return Folder(root).exists(COMPLETE)


class TargetCache:
    """Random rows, ranges and streams of a finished cache; pickles, so workers may hold one each."""

    def __init__(
        self,
        opened: Opened,
        shards: dict[int, dict[str, Any]],
        *,
        complete: dict[str, Any] | None,
        local_copy: Root | None = None,
        local_copy_bytes: int | None = None,
        check: bool = True,
        max_open: int = 32,
    ) -> None:
        self._opened, self._shards, self.complete = opened, shards, complete
        self.folder, self.manifest, self.codecs = opened.folder, opened.manifest, opened.codecs
        self._options = {
            "local_copy": local_copy,
            "local_copy_bytes": local_copy_bytes,
            "check": check,
            "max_open": max_open,
        }
        starts = opened.samples.starts
        self._rows = np.concatenate(
            [np.arange(starts[shard], starts[shard + 1]) for shard in sorted(shards)] or [np.empty(0, np.int64)]
        )
        self._check = check
        self._checked = np.zeros(len(opened.samples.lengths), bool)
        self._open: OrderedDict[int, ShardReader] = OrderedDict()
        self._copy = None
        if not self.folder.is_local or local_copy is not None:
            self._copy = LocalCopy(self.folder, local_copy, max_bytes=local_copy_bytes)
        self._max_open = max_open if self._copy is None else 1  # an open shard keeps its disk space when it is removed

    @classmethod
    def open(
        cls,
        root: Root,
        *,
        partial: bool = False,
        local_copy: Root | None = None,
        local_copy_bytes: int | None = None,
        check: bool = True,
        max_open: int = 32,
    ) -> TargetCache:
        """Open a finished cache at a path or URL.

        `partial`: also one still being built, of which the rows committed so far are seen. `local_copy`: where shards
        of a remote cache are kept, at most `local_copy_bytes` of them. `check`: verify each row's checksum at its first
        read. `max_open`: shards held open at once.
        """
        folder = Folder(root)
        opened = open_folder(folder)
        complete = None
        if folder.exists(COMPLETE):
            complete = read_complete(opened)
            shards = {record["unit"]: record for record in complete["shards"]}
        elif partial:
            shards = committed_shards(opened)
        else:
            done, total = len(committed_shards(opened)), opened.num_shards
            raise CacheCorrupt(
                f"{folder} is not finished ({done} of {total} shards committed): the command that builds it "
                "goes on where it stopped; `dspark cache info` and `sample` show what is there (partial=True)"
            )
        return cls(
            opened,
            shards,
            complete=complete,
            local_copy=local_copy,
            local_copy_bytes=local_copy_bytes,
            check=check,
            max_open=max_open,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.folder.url, "partial": self.complete is None, "options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        other = TargetCache.open(state["root"], partial=state["partial"], **state["options"])
        self.__dict__.update(other.__dict__)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> np.ndarray:
        """[N] int32, tokens of each row."""
        return self._opened.samples.lengths[self._rows]

    @property
    def sample_ids(self) -> list[str]:
        ids = self._opened.samples.sample_ids
        return ids if len(self._rows) == len(ids) else [ids[row] for row in self._rows]

    @property
    def rows_per_shard(self) -> list[int]:
        """Rows of each shard in order, for a windowed shuffle."""
        return [self._shards[shard]["rows"] for shard in sorted(self._shards)]

    @property
    def identity(self) -> str:
        return str(self.manifest["identity"])

    @property
    def contract(self) -> dict[str, Any]:
        """How states and blocks are to be read, as given when the cache was planned."""
        return dict(self.manifest["fields"]["contract"])

    @property
    def projection(self) -> torch.Tensor | None:
        """P [C, m*d] float32 if `hidden_states` are components P x, else None.

        A context projection F [d, C] trained on them is F @ P on the captured states themselves.
        """
        return self.codecs.hidden_states.projection

    @property
    def unprojection(self) -> torch.Tensor | None:
        """[m*d, C]: states out of components, as well as these know them; None where they are the states."""
        return self.codecs.hidden_states.unprojection

    def tokens(self, index: int) -> tuple[np.ndarray, Spans]:
        """Token ids [S] and supervised spans of a row; its states are not looked at, and so not its checksum."""
        shard, place = self._opened.samples.locate(int(self._rows[index]))
        columns = self._reader(shard).row(place)
        return columns["input_ids"], tuple((int(a), int(b)) for a, b in columns["spans"].reshape(-1, 2))

    def spans(self, index: int) -> Spans:
        """Supervised spans of a row: from the sample list, or from the row itself where the plan did not know them."""
        known = self._opened.samples.spans(int(self._rows[index]))
        return self.tokens(index)[1] if known is None else known

    def raw_row(self, index: int) -> dict[str, Any]:
        """A row's columns with its states still coded; checksum and sample id verified at the first read."""
        if not -len(self._rows) <= index < len(self._rows):
            raise IndexError(f"row {index} of {len(self._rows)}")
        row = int(self._rows[index])
        shard, place = self._opened.samples.locate(row)
        reader = self._reader(shard)
        columns = reader.row(place)
        if self._check and not self._checked[row]:
            expected = self._opened.samples.sample_ids[row]
            if columns["sample_id"] != expected:
                raise CacheCorrupt(
                    f"{reader.name}, row {place}: holds {columns['sample_id']!r}, not {expected!r}; {AGAIN}"
                )
            if checksum_of(columns) != columns["checksum"]:
                raise CacheCorrupt(f"{reader.name}, row {place} ({expected!r}): checksum differs; {AGAIN}")
            tokens, planned = len(columns["input_ids"]), int(self._opened.samples.lengths[row])
            if tokens != planned:
                raise CacheCorrupt(
                    f"{reader.name}, row {place} ({expected!r}): {tokens} tokens, not {planned}; {AGAIN}"
                )
            self._checked[row] = True
        return columns

    def row(self, index: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16) -> StoredRow:
        """Row `index`, decoded to the device."""
        return self.decode(self.raw_row(index), device=device, dtype=dtype)

    def decode(
        self, columns: Mapping[str, Any], *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
    ) -> StoredRow:
        """What `raw_row` returned (here or in another process), decoded to the device."""
        scope = self.manifest["fields"]["teacher_scope"]
        return decode_row(columns, self.codecs, scope=scope, device=device, dtype=dtype)

    def rows(
        self,
        indices: Iterable[int],
        *,
        workers: int = 0,
        max_bytes: int = READ_AHEAD_BYTES,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> Iterator[StoredRow]:
        """Rows in the order asked for, one at a time.

        With `workers` so many processes work ahead of need and hold at most `max_bytes` of rows: decoded ones for the
        CPU; for another device, which decodes faster itself, those read and checked. Without them a row is read when
        it is asked for.
        """
        if not workers:
            for index in indices:
                yield self.row(int(index), device=device, dtype=dtype)
            return
        here = torch.device(device).type != "cpu"
        work: Any = TargetCache.raw_row if here else partial(TargetCache.row, dtype=dtype)
        cost = partial(self.decoded_bytes, dtype=dtype)
        with ReadAhead(self, map(int, indices), work, cost=cost, workers=workers, max_bytes=max_bytes) as ahead:
            for row in ahead:
                yield self.decode(row, device=device, dtype=dtype) if here else row

    def decoded_bytes(self, rows: int | Iterable[int], *, dtype: torch.dtype = torch.bfloat16) -> int:
        """The most bytes that these rows take once decoded: a teacher at every position."""
        lengths = self._opened.samples.lengths[self._rows[[rows] if isinstance(rows, int) else list(rows)]]
        width = self.codecs.hidden_states.out_width + (self.codecs.teacher.out_width if self.codecs.teacher else 0)
        return int(lengths.sum(dtype=np.int64)) * (width * dtype.itemsize + 16)  # 16: token id and teacher position

    def __iter__(self) -> Iterator[StoredRow]:
        return self.rows(range(len(self)))

    def _reader(self, shard: int) -> ShardReader:
        if sum(reader.touched for reader in self._open.values()) > MAPPED_BYTES:
            self._open.clear()  # the pages that were looked at leave this process's memory
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        while len(self._open) >= self._max_open:
            self._open.popitem(last=False)
        self._open[shard] = reader = self._open_shard(self._shards[shard])
        return reader

    def _open_shard(self, record: Mapping[str, Any]) -> ShardReader:
        name, attempts = record["shard"], 1 if self._copy is None else 100
        folder = self.folder
        for attempt in range(attempts):
            if self._copy is not None:
                folder = self._copy.fetch(record)
            try:
                return ShardReader(folder.open_input(name), record, folder.describe(name))
            except FileNotFoundError as error:  # of a local copy: another process needed the room in between
                if attempt == attempts - 1:
                    raise CacheCorrupt(f"{folder.describe(name)} is missing; {AGAIN}") from error
        raise AssertionError

    def info(self, *, corpus_tokens: int | None = None) -> dict[str, Any]:
        """Rows, tokens, bytes a token by part, codecs with measured errors, identity; TB for a corpus of that size."""
        records = list(self._shards.values())
        tokens = sum(record["tokens"] for record in records)
        context = sum(record["context_bytes"] for record in records)
        teacher = sum(record["teacher_bytes"] for record in records)
        size = sum(record["bytes"] for record in records)
        fields = self.manifest["fields"]
        raw = 2 * fields["hidden_size"] * (fields["num_layers"] + 1)
        per = {"context": context, "teacher": teacher, "other": size - context - teacher, "all": size}
        result: dict[str, Any] = {
            "finished": self.complete is not None,
            "rows": len(self),
            "tokens": tokens,
            "bytes": size,
            "bytes_per_token": {part: round(value / max(tokens, 1), 2) for part, value in per.items()},
            "raw_bytes_per_token": raw,
            "times_smaller": round(raw * tokens / max(size, 1), 2),
            "codecs": self.manifest["codecs"],
            "identity": self.identity,
            "contract": self.contract,
            "shards": {"committed": len(records), "planned": self.manifest["units"]},
            "skipped": {reason: len(ids) for reason, ids in self.manifest["skipped"].items()},
            "shortened": len(self.manifest.get("shortened", ())),
            "notes": (self.complete or {}).get("notes", {}),
        }
        if corpus_tokens is not None:
            result["terabytes_at_corpus"] = round(size / max(tokens, 1) * corpus_tokens / 1e12, 4)
        return result

    def verify(self, *, workers: int = 1) -> list[Problem]:
        """Check every byte of every file; an empty list means that nothing is wrong."""
        return verify(self.folder.url, workers=workers)
