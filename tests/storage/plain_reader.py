"""A reader of finished target caches, written from docs/cache-format.md by somebody who had not seen our own.

Plain and slow: it says what the page says, and the tests hold the two readers against each other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
import zstandard

INTEGERS, BINARY = pa.list_(pa.int32()), pa.large_binary()
COLUMNS = {"sample_id": pa.string(), "input_ids": INTEGERS, "spans": INTEGERS, "context": BINARY, "teacher": BINARY}
COLUMNS |= {"extra": pa.string(), "checksum": pa.uint64()}
SCHEMA = pa.schema([pa.field(name, kind, nullable=False) for name, kind in COLUMNS.items()])
CODECS = ("bf16", "bf16-planes", "int8", "fp8", "transform", "projected", "corrected", "recomputed", "sparse")


def check(condition: bool, message: str) -> None:
    """Raise ValueError unless the condition holds."""
    if not condition:
        raise ValueError(message)


@dataclass
class Cursor:
    """A place in a byte string that moves on with every read."""

    data: bytes
    place: int = 0

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        check(self.place + size <= len(self.data), "payload is short")
        self.place += size
        return self.data[self.place - size : self.place]

    def varint(self) -> int:
        """An unsigned LEB128 integer."""
        value, shift, byte = 0, 0, 0x80
        while byte & 0x80:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            shift += 7
        return value

    def array(self, dtype: str, *shape: int) -> np.ndarray:
        """A row-major array of the next bytes."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(self.take(size), dtype).reshape(shape)

    def end(self) -> None:
        """Check that nothing is left."""
        check(self.place == len(self.data), "payload is long")


def frame_array(data: bytes, dtype: str, *shape: int) -> np.ndarray:
    """The array that fills a zstd frame; no bytes stand for an empty one."""
    decoder = zstandard.ZstdDecompressor().decompressobj()
    content = Cursor(decoder.decompress(data) if data else b"")
    check(not data or (decoder.eof and not decoder.unused_data), "not one whole zstd frame")
    array = content.array(dtype, *shape)
    content.end()
    return array


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """float32 values of bfloat16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 values rounded to the nearest bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return from_bfloat16(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))


def from_float8(codes: np.ndarray) -> np.ndarray:
    """float32 values of float8 e4m3 bit patterns: no infinities, NaN with all bits but the sign."""
    exponent, fraction = ((codes >> 3) & 15).astype(int), (codes & 7).astype(float)
    size = np.where(exponent > 0, np.ldexp(8 + fraction, exponent - 10), np.ldexp(fraction, -9))
    size[(codes & 127) == 127] = np.nan
    return np.where(codes > 127, -size, size).astype(np.float32)


def read_safetensors(data: bytes) -> dict[str, np.ndarray]:
    """Tensors of a safetensors file, bfloat16 widened to float32."""
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            dtype = {"F32": "<f4", "BF16": "<u2", "U8": "u1"}[entry["dtype"]]
            values = np.frombuffer(data[start + begin : start + end], dtype).reshape(entry["shape"])
            tensors[name] = from_bfloat16(values) if entry["dtype"] == "BF16" else values
    return tensors


def unpack_codes(section: bytes, coordinates: int, rows: int, bits: int) -> np.ndarray:
    """Two's-complement codes [coordinates, rows], the earliest row in the lowest bits."""
    per_byte = 8 // bits
    packed = frame_array(section, "u1", coordinates, -(-rows // per_byte), 1)
    codes = (packed >> (np.arange(per_byte) * bits)) & ((1 << bits) - 1)
    codes = codes.reshape(coordinates, packed.shape[1] * per_byte)[:, :rows]
    return np.where(codes >> (bits - 1), codes - (1 << bits), codes)


def read_integers(cursor: Cursor, classes: np.ndarray) -> np.ndarray:
    """Quantised coordinates [C, R]."""
    rows, *sizes = (cursor.varint() for _ in range(6))
    sections = [cursor.take(size) for size in sizes]
    result = np.zeros((len(classes), rows), np.int64)
    for number, bits in enumerate((8, 4, 2)):
        members = classes == number
        result[members] = unpack_codes(sections[number], int(members.sum()), rows, bits)
    of_class = classes[:, None]
    by_row = [np.argwhere((of_class == number) & (result == low)) for number, low in ((0, -128), (1, -8), (2, -2))]
    middle = frame_array(sections[3], "i1", len(by_row[1]) + len(by_row[2])).astype(np.int64)
    again = middle == -128
    wide = frame_array(sections[4], "<i4", len(by_row[0]) + int(again.sum()))
    middle[again] = wide[len(by_row[0]) :]
    places = np.concatenate(by_row)
    result[places[:, 0], places[:, 1]] = np.concatenate([wide[: len(by_row[0])], middle])
    return result


def read_top_tokens(cursor: Cursor, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and signed codes, both [P, K]."""
    top, id_bytes = cursor.varint(), cursor.take(1)[0]
    check(id_bytes in (2, 3), f"{id_bytes} bytes an id")
    *planes, codes = [cursor.take(size) for size in [cursor.varint() for _ in range(id_bytes + 1)]]
    cursor.end()
    steps = sum(frame_array(plane, "u1", top, positions).astype(int) << (8 * i) for i, plane in enumerate(planes))
    return (np.cumsum(steps + 1, axis=0) - 1).T, frame_array(codes, "i1", top, positions).T


@dataclass
class Codec:
    """One codec of the manifest with its fitted tensors."""

    name: str
    settings: dict[str, Any]
    width: int
    out_width: int
    tensors: dict[str, np.ndarray]

    def states(self, cursor: Cursor, rows: int) -> np.ndarray:
        """Decode the cursor's bytes, all one payload of states or coordinates: [rows, C] float32."""
        if self.name == "bf16":
            result = from_bfloat16(cursor.array("<u2", rows, self.width))
        elif self.name == "bf16-planes":
            upper = frame_array(cursor.take(int.from_bytes(cursor.take(4), "little")), "u1", self.width, rows)
            result = from_bfloat16((upper.T.astype(np.uint16) << 8) | cursor.array("u1", rows, self.width))
        else:
            flag, grouped = cursor.take(1)[0], self.name in ("int8", "fp8")
            check(flag in (0, 1, 2), f"flag {flag}")
            first = np.empty((0, self.out_width), np.float32)
            if flag == 1:
                first = self.tensors["first_row"][None]
            elif flag == 2 and grouped:
                first = from_bfloat16(cursor.array("<u2", 1, self.out_width))
            elif flag == 2:
                first = cursor.array("<f4", 1, self.out_width)
            body = (self._grouped if grouped else self._transformed)(cursor, rows - len(first))
            result = np.concatenate([first, body])
        cursor.end()
        return result

    def _grouped(self, cursor: Cursor, rows: int) -> np.ndarray:
        group = self.settings["group"]
        scales = from_bfloat16(cursor.array("<u2", rows, self.width // group))
        codes = cursor.array("i1" if self.name == "int8" else "u1", rows, self.width)
        values = codes.astype(np.float32) if self.name == "int8" else from_float8(codes)
        return rounded_to_bfloat16(values * np.repeat(scales, group, axis=1))

    def _transformed(self, cursor: Cursor, rows: int) -> np.ndarray:
        integers = read_integers(cursor, self.tensors["classes"])
        check(integers.shape[1] == rows, "number of coded rows")
        coordinates = integers.T.astype(np.float32) * self.tensors["step"] + self.tensors["mean"]
        inverse = self.tensors.get("inverse")
        if inverse is None or self.name == "projected" or self.settings.get("output") == "coordinates":
            return coordinates
        if inverse.ndim == 2:
            return coordinates @ inverse.T
        blocks = coordinates.reshape(rows, inverse.shape[0], inverse.shape[2])
        return np.einsum("rkc,kwc->rkw", blocks, inverse).reshape(rows, self.width)

    def teacher(self, payload: bytes, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Decode a teacher payload; the keys depend on the codec."""
        cursor, count = Cursor(payload), len(positions)
        if count == 0:
            cursor.end()
            return {}
        if self.name not in ("corrected", "recomputed", "sparse"):
            return {"states": self.states(cursor, count)}
        part = Cursor(cursor.take(cursor.varint()))
        if self.name == "sparse":
            ids, codes = read_top_tokens(part, count)
            tail = frame_array(payload[cursor.place :], "i1", count)
            mass = np.exp((np.column_stack([codes, tail]).astype(np.float32) - 127) / 16)
            mass /= mass.sum(axis=1, keepdims=True)
            return {"top_ids": ids, "top_probabilities": mass[:, :-1], "tail": mass[:, -1]}
        if self.name == "corrected":
            result = {"states": self.states(part, count)}
        else:
            result = {"source": self.states(part, int(positions[-1]) + 1)}
        if self.settings["top"]:
            result["top_ids"], codes = read_top_tokens(cursor, count)
            result["top_offsets"] = codes.astype(np.float32) / self.settings["resolution"]
        cursor.end()
        return result


def sha256(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def read_sealed(path: Path) -> dict[str, Any]:
    """A sealed record without its seal; the seal and the exact form of the file are checked."""
    record = json.loads(data := path.read_bytes())
    form = {"sort_keys": True, "indent": 1, "ensure_ascii": False}
    check(data == (json.dumps(record, **form) + "\n").encode(), f"{path.name}: form")
    check(record.pop("seal") == sha256((json.dumps(record, **form) + "\n").encode()), f"{path.name}: seal")
    return record


@dataclass
class Row:
    """One sequence, decoded."""

    sample_id: str
    input_ids: np.ndarray
    spans: np.ndarray
    extra: dict[str, Any]
    checksum: int
    hidden_states: np.ndarray
    positions: np.ndarray
    teacher: dict[str, np.ndarray]


class PlainReader:
    """A finished target cache; its records and files are checked when it is opened."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest = read_sealed(self.path / "manifest.json")
        self.complete = read_sealed(self.path / "COMPLETE.json")
        self.fields, self.commits = self.manifest["fields"], self.complete["shards"]
        self._check_records()
        samples = pa.ipc.open_stream((self.path / self.manifest["samples"]["file"]).read_bytes()).read_all()
        self.sample_ids: list[str] = samples["sample_id"].to_pylist()
        self.lengths: list[int] = samples["length"].to_pylist()
        self.spans: list[list[int]] | None = samples["spans"].to_pylist() if "spans" in samples.column_names else None
        self._check_samples()
        self.hidden_states = self._codec("features")
        self.teacher = self._codec("teacher") if self.manifest["codecs"]["teacher"] else None

    def __len__(self) -> int:
        return len(self.sample_ids)

    def rows(self) -> Iterator[Row]:
        """All rows in order, from the shards as Arrow streams."""
        names = {name: str(self.manifest[name]) for name in ("format", "version", "identity")}
        index = 0
        for commit in self.commits:
            stream = pa.ipc.open_stream((self.path / commit["shard"]).read_bytes())
            schema = SCHEMA.with_metadata(names | {"unit": str(commit["unit"])})
            check(stream.schema.equals(schema, check_metadata=True), f"{commit['shard']}: schema")
            for batch in stream:
                for place in range(batch.num_rows):
                    yield self._row(batch, place, index)
                    index += 1
        check(index == len(self), "number of rows")

    def row(self, index: int) -> Row:
        """One row, from the bytes of its record batch alone."""
        check(0 <= index < len(self), "row index")
        place = index
        for shard, batch in ((commit["shard"], batch) for commit in self.commits for batch in commit["batches"]):
            if place < batch["rows"]:
                with (self.path / shard).open("rb") as file:
                    file.seek(batch["offset"])
                    message = pa.py_buffer(file.read(batch["bytes"]))
                return self._row(pa.ipc.read_record_batch(message, SCHEMA), place, index)
            place -= batch["rows"]
        raise ValueError(f"row {index} is in no batch")

    def _check_records(self) -> None:
        manifest, complete, files = self.manifest, self.complete, self.complete["files"]
        check((manifest["format"], manifest["version"]) == ("dspark-target-cache", 1), "format")
        text = json.dumps(self.fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        check(sha256(text.encode())[:32] == manifest["identity"] == complete["identity"], "identity")
        for name, digest in files.items():
            check(sha256((self.path / name).read_bytes()) == digest, f"{name}: SHA-256")
        for entry in (manifest["samples"], *filter(None, manifest["codecs"].values())):
            check(entry["sha256"] == files[entry["file"]], f"{entry['file']}: SHA-256 in the manifest")
        check([commit["unit"] for commit in self.commits] == list(range(manifest["units"])), "units")
        for unit, commit in enumerate(self.commits):
            check(read_sealed(self.path / f"commits/unit-{unit:06d}.json") == commit, f"commit {unit}")
            check(commit["manifest_sha256"] == files["manifest.json"], f"commit {unit}: manifest")
            shard = (self.path / commit["shard"]).read_bytes()
            check((len(shard), sha256(shard)) == (commit["bytes"], commit["sha256"]), f"shard {unit}: SHA-256")
            check(sum(batch["rows"] for batch in commit["batches"]) == commit["rows"], f"commit {unit}: rows")
        for name in ("rows", "tokens", "bytes"):
            check(sum(commit[name] for commit in self.commits) == complete[name], f"sum of {name}")

    def _check_samples(self) -> None:
        expected, totals = self.fields["samples"], (len(self), sum(self.lengths))
        check(totals == (expected["count"], expected["tokens"]), "samples: count, tokens")
        check(totals == (self.complete["rows"], self.complete["tokens"]), "COMPLETE.json: rows, tokens")
        order = "".join(f"{name}\t{length}\n" for name, length in zip(self.sample_ids, self.lengths, strict=True))
        check(sha256(order.encode()) == expected["order_sha256"], "order_sha256")
        digest = None
        if self.spans is not None:
            lines = (",".join(f"{a}-{b}" for a, b in zip(line[::2], line[1::2], strict=True)) for line in self.spans)
            digest = sha256("".join(f"{line}\n" for line in lines).encode())
        check(digest == expected["spans_sha256"], "spans_sha256")

    def _codec(self, role: str) -> Codec:
        entry = self.manifest["codecs"][role]
        check(entry["name"] in CODECS, f"codec {entry['name']}")
        tensors = read_safetensors((self.path / entry["file"]).read_bytes())
        return Codec(entry["name"], entry["settings"], entry["width"], entry["out_width"], tensors)

    def _row(self, batch: pa.RecordBatch, place: int, index: int) -> Row:
        sample_id, ids, spans, context, payload, extra, checksum = (column[place].as_py() for column in batch.columns)
        input_ids, pairs = np.array(ids, "<i4"), np.array(spans, "<i4").reshape(-1, 2)
        digest = xxhash.xxh3_64(seed=0)
        for part in (sample_id.encode(), input_ids.tobytes(), pairs.tobytes(), context, payload, extra.encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
        check(digest.intdigest() == checksum, f"row {index}: checksum")
        check((sample_id, len(ids)) == (self.sample_ids[index], self.lengths[index]), f"row {index}: sample")
        check(self.spans is None or spans == self.spans[index], f"row {index}: spans")
        hidden_states = self.hidden_states.states(Cursor(context), len(ids))
        positions = np.arange(len(ids))
        if self.teacher is None:
            positions = positions[:0]
        elif self.fields["teacher_scope"] == "supervised":
            ranges = [np.arange(max(start - 1, 0), end - 1) for start, end in pairs]
            positions = np.concatenate([positions[:0], *ranges])
        check(self.teacher is not None or payload == b"", f"row {index}: a teacher without a codec")
        teacher = self.teacher.teacher(payload, positions) if self.teacher else {}
        return Row(sample_id, input_ids, pairs, json.loads(extra), checksum, hidden_states, positions, teacher)
