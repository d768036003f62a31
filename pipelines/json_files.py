"""JSON and JSON-lines files as people and stopped processes leave them: read, or refused with file and line."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from pipelines.errors import UserError
from storage.files.filesystems import Folder

BYTE_ORDER_MARK, GZIP = b"\xef\xbb\xbf", b"\x1f\x8b"
_SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)


def parse_json(data: bytes, file: str, line: int | None = None) -> Any:
    """The value of a whole file, or of its one `line`. Raises UserError that begins with `file:line`."""
    first = line or 1
    if first == 1:
        data = data.removeprefix(BYTE_ORDER_MARK)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        column = error.start - before.rfind(b"\n")
        raise UserError(
            f"{file}:{first + before.count(10)}: not UTF-8 (byte {data[error.start]:#04x} at position {column} of the "
            "line); save the file as UTF-8"
        ) from None
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        at = f"{file}:{first + error.lineno - 1}"
        raise UserError(f"{at}: not valid JSON: {error.msg} (column {error.colno})") from None
    except UnicodeEncodeError:
        raise UserError(f"{file}:{first}: a text has half a character (a lone surrogate, \\ud800 to \\udfff)") from None
    except RecursionError:
        raise UserError(f"{file}:{first}: not usable JSON: it is nested too deeply") from None
    except ValueError as error:  # a whole number of thousands of digits
        raise UserError(f"{file}:{first}: not usable JSON: {str(error).partition(';')[0]}") from None
    return value


def parse_row(data: bytes, file: str, line: int) -> dict[str, Any]:
    """The object in one line of a JSON-lines file. Raises UserError that begins with `file:line`."""
    row = parse_json(data, file, line)
    if not isinstance(row, dict):
        raise UserError(f"{file}:{line}: expected a JSON object, found {str(row)[:60]!r}")
    return row


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) for each line of a file that is not blank; gzip is unpacked. Raises UserError if that fails."""
    number = 0
    try:
        with open(path, "rb") as stored:
            packed = stored.read(2) == GZIP
            stored.seek(0)
            with cast(IO[bytes], gzip.open(stored)) if packed else stored as file:
                for number, line in enumerate(file, start=1):
                    if line.removeprefix(BYTE_ORDER_MARK if number == 1 else b"").strip():
                        yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}:{number + 1}: the gzip file is cut off or damaged ({error})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, object) for each line that is not blank. Raises UserError at a line that is no JSON object."""
    for number, line in read_lines(path):
        yield f"{path}:{number}", parse_row(line, str(path), number)


def write_json(folder: Folder, name: str, value: Any) -> None:
    """Write the file whole, or, if that is interrupted, not at all."""
    folder.write(name, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_jsonl(folder: Folder, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write all rows, or, if that is interrupted, none."""
    with folder.writer(name) as stream:
        for row in rows:
            stream.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
