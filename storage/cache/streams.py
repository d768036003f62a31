"""Arrow IPC messages from files that somebody else may have written.

Only what this format writes is read: no compression and no dictionaries, so that what is read is a view of the file's
own bytes, and no size that a message declares takes memory.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import pyarrow as pa

from storage.errors import StorageError

_HEADER, _COMPRESSION = 8, 10  # fields of the flatbuffers tables Message and RecordBatch, as places in their vtables


def read_batch(message: pa.Message, schema: pa.Schema) -> pa.RecordBatch:
    """The record batch of a message. ValueError for another kind of message, compression, nulls, or broken columns."""
    if message.type != "record batch":
        raise StorageError(f"a message of the kind {message.type!r} stands where a record batch should be")
    if _is_compressed(message.metadata):
        raise StorageError("it is compressed, which this format is not")
    batch = pa.ipc.read_record_batch(message, schema)
    batch.validate(full=True)
    for column in batch.columns:
        if column.null_count or (pa.types.is_list(column.type) and column.values.null_count):
            raise StorageError("a value is missing")
    return batch


def read_stream(data: bytes, kinds: Mapping[str, pa.DataType]) -> pa.Table:
    """A whole IPC stream of columns that are of these kinds. ValueError or pa.ArrowException for anything else."""
    messages = pa.ipc.MessageReader.open_stream(data)
    try:
        schema = pa.ipc.read_schema(messages.read_next_message())
    except StopIteration:
        raise StorageError("it is empty") from None
    for field in schema:
        if kinds.get(field.name) != field.type:
            raise StorageError(f"its column {field.name[:40]!r} is {field.type}, expected {kinds.get(field.name)}")
    batches: list[pa.RecordBatch] = []
    while True:
        try:
            message = messages.read_next_message()
        except StopIteration:
            return pa.Table.from_batches(batches, schema)
        batches.append(read_batch(message, schema))


def _is_compressed(metadata: pa.Buffer) -> bool:
    """Whether the table RecordBatch of a message, which Arrow has verified, has the field `compression`."""
    data = memoryview(metadata)
    message = struct.unpack_from("<I", data, 0)[0]
    header = message + _field(data, message, _HEADER)
    return _field(data, header + struct.unpack_from("<I", data, header)[0], _COMPRESSION) != 0


def _field(data: memoryview, table: int, place: int) -> int:
    """Offset of a field from the begin of its table; 0 if the table has it not."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    size = struct.unpack_from("<H", data, vtable)[0]
    return int(struct.unpack_from("<H", data, vtable + place)[0]) if size > place else 0
