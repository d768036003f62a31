"""Rows of numbers by step in a file of JSON lines: complete whatever the network does."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any

from storage.files.filesystems import Folder

REMOTE_SECONDS = 30.0  # between two uploads of a log that lies on an object store


def parse_rows(data: bytes) -> list[dict[str, Any]]:
    """The rows of JSON lines, each with a `step` that is a whole number or null; damaged lines are left out."""
    rows = []
    for line in data.decode(errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and (row.setdefault("step", None) is None or type(row["step"]) is int):
            rows.append(row)
    return rows


class LocalLog:
    """Rows of JSON, one a line; appended on a local disk, rewritten now and then on an object store."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder, self._name = folder, name
        self.rewrite(parse_rows(folder.read(name)) if folder.exists(name) else [])

    def append(self, row: Mapping[str, Any]) -> None:
        known = {key: _json_value(value) for key, value in row.items()}
        if self._folder.is_local:
            with open(self._folder.local_path(self._name), "a", encoding="utf-8") as file:
                file.write(json.dumps(known) + "\n")
            return
        self._rows.append(known)
        if time.monotonic() - self._written > REMOTE_SECONDS:
            self.rewrite(self._rows)

    def rows(self) -> list[dict[str, Any]]:
        return parse_rows(self._folder.read(self._name)) if self._folder.is_local else self._rows

    def rewrite(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self._folder.write(self._name, "".join(json.dumps(row) + "\n" for row in rows).encode())
        self._written = time.monotonic()

    def close(self) -> None:
        if not self._folder.is_local:
            self.rewrite(self._rows)


def _json_value(value: Any) -> Any:
    """JSON has no NaN: a number that is not finite becomes its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
