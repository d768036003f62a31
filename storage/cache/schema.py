"""The JSON files of a cache: parsed, and refused with file and field where something else stands in them.

A seal shows that bytes changed; it does not say who wrote them. So every name, number and size in these files is
checked before it is used.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from storage.errors import CacheCorrupt, StorageError

MOST_LAYERS, MOST_HIDDEN = 4096, 1 << 20  # no model is near either; a row's memory follows from them
Count = Annotated[int, Field(ge=0, lt=1 << 62)]
Width = Annotated[int, Field(ge=1, le=MOST_LAYERS * MOST_HIDDEN)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
STRICT = ConfigDict(strict=True, extra="allow")


@with_config(STRICT)
class Batch(TypedDict):
    """A record batch of a shard."""

    offset: Count
    bytes: Count
    rows: Annotated[int, Field(ge=1, lt=1 << 31)]


@with_config(STRICT)
class Commit(TypedDict):
    """A commit record, and an entry of COMPLETE.json."""

    unit: Count
    shard: str
    manifest_sha256: Sha256
    bytes: Count
    sha256: Sha256
    rows: Count
    tokens: Count
    context_bytes: Count
    teacher_bytes: Count
    batches: list[Batch]


@with_config(STRICT)
class Complete(TypedDict):
    """COMPLETE.json."""

    identity: str
    files: dict[str, Sha256]
    rows: Count
    tokens: Count
    bytes: Count
    shards: list[Commit]
    notes: dict[str, Any]


@with_config(STRICT)
class StoredFile(TypedDict):
    file: str
    sha256: Sha256


@with_config(STRICT)
class Measured(TypedDict):
    bytes_per_token: NotRequired[Annotated[float, Field(ge=0, allow_inf_nan=False)]]


@with_config(STRICT)
class StoredCodec(StoredFile):
    """A fitted codec."""

    name: str
    settings: dict[str, Any]
    width: Width
    measured: Measured


@with_config(STRICT)
class Codecs(TypedDict):
    features: StoredCodec
    teacher: StoredCodec | None


@with_config(ConfigDict(strict=True, extra="forbid"))
class Spec(TypedDict):
    name: str
    settings: dict[str, Any]


@with_config(STRICT)
class Fields(TypedDict):
    contract: dict[str, Any]
    inputs: dict[str, Any]
    num_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    hidden_size: Annotated[int, Field(ge=1, le=MOST_HIDDEN)]
    features: Spec
    teacher: Spec | None
    teacher_scope: Annotated[str, StringConstraints(pattern="^(supervised|all)$")]
    unit_tokens: Annotated[int, Field(ge=1, lt=1 << 62)]


@with_config(STRICT)
class Manifest(TypedDict):
    """manifest.json."""

    identity: Annotated[str, StringConstraints(min_length=1)]
    fields: Fields
    codecs: Codecs
    samples: StoredFile
    units: Count
    skipped: dict[str, list[str]]
    shortened: NotRequired[list[str]]


def parse_json(data: bytes, name: str) -> Any:
    """The value of a JSON file. CacheCorrupt names the file and where in it the fault is."""
    try:
        value = json.loads(data, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise CacheCorrupt(f"{name}:{error.lineno}: not valid JSON ({error.msg}, column {error.colno})") from None
    except UnicodeDecodeError:
        raise CacheCorrupt(f"{name}: not valid JSON (it is not UTF-8)") from None
    except UnicodeEncodeError:
        raise CacheCorrupt(f"{name}: a text in it has half of a character (a lone surrogate)") from None
    except RecursionError:
        raise CacheCorrupt(f"{name}: not usable JSON, it is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits, NaN, Infinity
        raise CacheCorrupt(f"{name}: not usable JSON ({str(error).partition(';')[0]})") from None
    return value


def _refuse(constant: str) -> Any:
    raise StorageError(f"{constant} is no number in JSON")


def checked(kind: Any, value: Any, name: str, cure: str) -> dict[str, Any]:
    """`value` if it is of the kind (a TypedDict above). CacheCorrupt names file, field and what stands there."""
    try:
        _adapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        found = "" if first["type"] == "missing" else f", {str(first['input'])[:60]!r} stands there"
        raise CacheCorrupt(f"{name}: {place}: {first['msg'].lower()}{found}; {cure}") from None
    return dict(value)


_adapters: dict[Any, TypeAdapter[Any]] = {}


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]
