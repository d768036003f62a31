"""A few tokens of every teacher row with a number each, as bytes. P rows, K tokens a row, V vocabulary.

Token ids ascend within a row and are stored as differences less one, so that their order costs nothing. They are stored
at all because two machines rank near-ties differently: a reader never has to repeat the writer's ranking.

Stream: LEB128 K, bytes an id (2, or 3 above 65,536 tokens), LEB128 sizes of the sections that follow; then for each
byte of the differences, lowest first, a zstd frame of [K, P] bytes, and one of the values [K, P], a signed byte each.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import zstandard

from storage.codecs.symbols import decompressed, leb128, read_leb128
from storage.errors import StorageError

LARGEST = 127
CHUNK = 128  # positions whose logits exist at once


def chunks(states: torch.Tensor) -> Iterator[torch.Tensor]:
    """[P, d] in pieces of CHUNK positions."""
    return iter(states.split(CHUNK))


def pack_top(token_ids: torch.Tensor, codes: torch.Tensor, vocabulary: int, *, level: int) -> bytes:
    """Ascending ids [P, K] and codes [P, K], -127..127, to bytes."""
    rows, count = token_ids.shape
    width = 2 if vocabulary <= 1 << 16 else 3
    ids = token_ids.cpu().numpy().astype(np.int64)
    steps = np.diff(ids, axis=1, prepend=-1) - 1
    if rows and (int(steps.min()) < 0 or int(ids.max()) >= vocabulary):
        raise StorageError(f"top token ids must ascend within a row and lie in 0..{vocabulary - 1}")
    planes = np.ascontiguousarray(steps.T).astype("<u4").reshape(count, rows, 1).view(np.uint8)
    values = np.ascontiguousarray(codes.cpu().numpy().T.astype(np.int8))
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True)
    sections = [compressor.compress(np.ascontiguousarray(planes[..., place]).tobytes()) for place in range(width)]
    sections.append(compressor.compress(values.tobytes()))
    head = leb128(count) + bytes([width])
    return head + b"".join(leb128(len(section)) for section in sections) + b"".join(sections)


def unpack_top(payload: bytes | memoryview, rows: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to ids [P, K] int64 and codes [P, K] int8. StorageError unless they are of `rows` rows and K <= `most`."""
    count, view = read_leb128(memoryview(payload).cast("B"))
    if not (1 <= count <= most and len(view) and view[0] in (2, 3)):
        raise StorageError(f"top tokens: {count} a row found, 1 to {most} were expected")
    width, view = view[0], view[1:]
    sizes = []
    for _ in range(width + 1):
        size, view = read_leb128(view)
        sizes.append(size)
    if sum(sizes) != len(view):
        raise StorageError(f"top tokens: sections of {sum(sizes)} bytes announced, {len(view)} bytes found")
    sections = []
    for size in sizes:
        sections.append(np.frombuffer(decompressed(view[:size], count * rows), np.uint8))
        view = view[size:]
        if sections[-1].size != count * rows:
            raise StorageError(f"top tokens of {sections[-1].size // count} rows found, {rows} rows were expected")
    steps = np.zeros((count, rows), np.int64)
    for place, section in enumerate(sections):
        if place < width:
            steps += section.reshape(count, rows).astype(np.int64) << (8 * place)
    codes = torch.from_numpy(section.view(np.int8).reshape(count, rows).copy())
    ids = torch.from_numpy(np.cumsum(steps + 1, axis=0) - 1)
    return ids.t(), codes.t()
