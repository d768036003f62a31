"""What an output's content depends on, as one hash, and the differences between two of them, field by field."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from storage.errors import StorageError

MISSING = "(missing)"


class IdentityMismatch(StorageError):
    """Something already stored was made from other inputs than those asked for."""

    def __init__(self, message: str, differences: Sequence[tuple[str, Any, Any]]) -> None:
        super().__init__(message)
        self.differences = list(differences)


def canonical_json(value: Any) -> bytes:
    """One byte string for equal values: sorted keys, no spaces, UTF-8; NaN and infinity are refused."""
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def plain(value: Any) -> Any:
    """The value as JSON would give it back: tuples become lists, keys become strings."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item) for item in value)
    return value


def identity_of(fields: Mapping[str, Any]) -> str:
    """First 32 hex digits of the SHA-256 of the fields' canonical JSON."""
    return hashlib.sha256(canonical_json(fields)).hexdigest()[:32]


def differences(ours: Any, theirs: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Every leaf in which the two differ, as (dotted path, ours, theirs); `MISSING` stands for an absent field."""
    ours, theirs = plain(ours), plain(theirs)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found: list[tuple[str, Any, Any]] = []
        for key in sorted(ours.keys() | theirs.keys()):
            inner = f"{path}.{key}" if path else key
            found += differences(ours.get(key, MISSING), theirs.get(key, MISSING), inner)
        return found
    same = ours == theirs and isinstance(ours, bool) == isinstance(theirs, bool)
    return [] if same else [(path or "(value)", ours, theirs)]


def require_same(asked: Mapping[str, Any], stored: Mapping[str, Any], *, what: str, cure: str) -> None:
    """Raise IdentityMismatch, naming each differing field, unless both have the same fields and values."""
    found = differences(asked, stored)
    if found:
        lines = "\n".join(f"  {path}: asked for {_short(a)}, stored {_short(b)}" for path, a, b in found)
        raise IdentityMismatch(f"{what} was made with other settings:\n{lines}\n{cure}", found)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 120 else text[:117] + "..."
