"""Small integers to bytes: packed to suit their spread, then zstd.

zstd's Huffman stage codes whole bytes and so cannot go below one bit for each: components whose integers are small
are packed two or four to a byte first, which brings the stage within a few hundredths of a bit of the entropy.
C components, R rows. Codes are component-major, so that neighbours in the stream have the same distribution.

Stream: R and five section sizes as LEB128, then the sections, each a zstd frame (or nothing):
wide codes (i8, escape -128), nibble codes (two a byte, low half first, -7..7, escape -8), pair codes (four a byte,
lowest first, -1..1, escape -2), first escapes (i8, for nibble and pair codes in that order; -128 escapes again),
second escapes (i32, for wide codes, then for first escapes).
"""

from __future__ import annotations

import numpy as np
import zstandard

from storage.errors import StorageError

WIDE, NIBBLE, PAIR = 0, 1, 2
PER_BYTE = {WIDE: 1, NIBBLE: 2, PAIR: 4}
LARGEST = {WIDE: 127, NIBBLE: 7, PAIR: 1}


def _unpacking_table(per_byte: int) -> np.ndarray:
    bits = 8 // per_byte
    codes = (np.arange(256)[:, None] >> (bits * np.arange(per_byte))) & ((1 << bits) - 1)
    signed = np.where(codes >= 1 << (bits - 1), codes - (1 << bits), codes).astype(np.int8)
    return np.ascontiguousarray(signed).view(f"<u{per_byte}").reshape(256)


TABLES = {NIBBLE: _unpacking_table(2), PAIR: _unpacking_table(4)}


def choose_classes(deviation_in_steps: np.ndarray) -> np.ndarray:
    """A packing class for each component [C] by its standard deviation in steps; sorted only if the input is."""
    return np.where(deviation_in_steps > 2.4, WIDE, np.where(deviation_in_steps > 0.42, NIBBLE, PAIR)).astype(np.uint8)


def pack(codes: np.ndarray, classes: np.ndarray, *, level: int = 1) -> bytes:
    """Integers [C, R] int32 to bytes."""
    narrow: dict[int, np.ndarray] = {}
    escaped: dict[int, np.ndarray] = {}
    for kind in (WIDE, NIBBLE, PAIR):
        part = codes[classes == kind]
        outside = np.abs(part) > LARGEST[kind]
        escaped[kind] = part[outside]
        narrow[kind] = np.where(outside, -LARGEST[kind] - 1, part).astype(np.int8)
    first = np.concatenate([escaped[NIBBLE], escaped[PAIR]])
    outside = np.abs(first) > 127
    second = np.concatenate([escaped[WIDE], first[outside]]).astype("<i4")
    first = np.where(outside, -128, first).astype(np.int8)
    sections = [
        narrow[WIDE].tobytes(),
        _join(narrow[NIBBLE], 2),
        _join(narrow[PAIR], 4),
        first.tobytes(),
        second.tobytes(),
    ]
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True)
    frames = [compressor.compress(section) if section else b"" for section in sections]
    return b"".join(map(leb128, [codes.shape[1], *map(len, frames)])) + b"".join(frames)


def unpack(payload: bytes | memoryview, classes: np.ndarray, rows: int) -> np.ndarray:
    """Bytes to integers [C, R]: int8 where nothing lies outside ±127, else int32."""
    view = memoryview(payload).cast("B")
    stored_rows, view = read_leb128(view)
    if stored_rows != rows:
        raise StorageError(f"the payload holds {stored_rows} rows, {rows} were expected")
    sizes = []
    for _ in range(5):
        size, view = read_leb128(view)
        sizes.append(size)
    if sum(sizes) != len(view):
        raise StorageError(f"sections of {sum(sizes)} bytes announced, {len(view)} bytes found")
    counts = {kind: int((classes == kind).sum()) for kind in (WIDE, NIBBLE, PAIR)}
    most = [counts[kind] * -(-rows // PER_BYTE[kind]) for kind in (WIDE, NIBBLE, PAIR)]
    most += [(counts[NIBBLE] + counts[PAIR]) * rows, 4 * len(classes) * rows]  # if every code escapes
    sections = []
    for size, most_bytes in zip(sizes, most, strict=True):
        sections.append(decompressed(view[:size], most_bytes) if size else b"")
        view = view[size:]
    parts = {
        kind: _split(sections[kind], counts[kind], rows, PER_BYTE[kind])
        for kind in (WIDE, NIBBLE, PAIR)
        if counts[kind]
    }
    first = np.frombuffer(sections[3], np.int8)
    second = np.frombuffer(sections[4], "<i4")
    if len(second):
        parts = {kind: part.astype(np.int32) for kind, part in parts.items()}
        first = first.astype(np.int32)
        wide = int((parts[WIDE] == -128).sum()) if WIDE in parts else 0
        if wide + int((first == -128).sum()) != len(second):
            raise StorageError(f"{len(second)} large codes found, others were announced")
        if wide:
            parts[WIDE][parts[WIDE] == -128] = second[:wide]
        first[first == -128] = second[wide:]
    taken = 0
    for kind in (NIBBLE, PAIR):
        if kind in parts and len(first):
            holes = parts[kind] == -LARGEST[kind] - 1
            count = int(holes.sum())
            if taken + count > len(first):
                raise StorageError(f"{len(first)} escaped codes found, more were announced")
            parts[kind][holes] = first[taken : taken + count]
            taken += count
    if len(parts) == 1:
        return next(iter(parts.values()))
    codes = np.empty((len(classes), rows), np.result_type(*parts.values()))
    for kind, part in parts.items():
        codes[classes == kind] = part
    return codes


def _join(codes: np.ndarray, per_byte: int) -> bytes:
    count, rows = codes.shape
    padded = np.zeros((count, -(-rows // per_byte) * per_byte), np.uint8)
    bits = 8 // per_byte
    padded[:, :rows] = codes.view(np.uint8) & ((1 << bits) - 1)
    groups = padded.reshape(count, padded.shape[1] // per_byte, per_byte)
    joined = groups[..., 0].copy()
    for place in range(1, per_byte):
        joined |= groups[..., place] << (bits * place)
    return joined.tobytes()


def _split(section: bytes, count: int, rows: int, per_byte: int) -> np.ndarray:
    columns = -(-rows // per_byte)
    packed = np.frombuffer(section, np.uint8)
    if len(packed) != count * columns:
        raise StorageError(f"{count} components of {rows} rows take {count * columns} bytes, {len(packed)} found")
    if per_byte == 1:
        return packed.view(np.int8).reshape(count, rows).copy()
    kind = NIBBLE if per_byte == 2 else PAIR
    codes = TABLES[kind][packed].view(np.int8).reshape(count, columns * per_byte)
    return codes[:, :rows]


def decompressed(frame: memoryview, most: int) -> bytes:
    """The content of a zstd frame of at most so many bytes. StorageError for one that announces more, or not how many.

    zstd takes the memory that a frame announces before it looks at the frame's content.
    """
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= most:
            announced = "does not say how many" if size < 0 else f"announces {size:,}"
            raise StorageError(f"a zstd frame {announced} bytes, and at most {most:,} can be in it")
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise StorageError(f"not a zstd frame: {error}") from error


def leb128(value: int) -> bytes:
    data = bytearray()
    while value >= 128:
        data.append(value & 127 | 128)
        value >>= 7
    data.append(value)
    return bytes(data)


def read_leb128(view: memoryview) -> tuple[int, memoryview]:
    value = shift = index = 0
    while True:
        if index >= len(view) or shift > 56:
            raise StorageError("the payload ends inside a size, or the size has no end")
        byte = view[index]
        value |= (byte & 127) << shift
        shift, index = shift + 7, index + 1
        if byte < 128:
            return value, view[index:]
