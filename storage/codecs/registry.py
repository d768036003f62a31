"""Codecs by name: the one list of them, to which a plugin adds its own. Needs no torch until a codec is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from storage.errors import StorageError

if TYPE_CHECKING:
    from storage.codecs.base import Codec

BUILT_IN = ("bf16", "bf16-planes", "int8", "fp8", "transform", "projected", "corrected", "recomputed", "sparse")
"""Each in the module of its name (`bf16-planes` in `storage/codecs/bf16_planes.py`)."""

Registered = TypeVar("Registered", bound="type[Codec]")
_registered: dict[str, type[Codec]] = {}


def register(codec: Registered) -> Registered:
    """A class decorator that makes the codec known by its `name`. ValueError for a name that is taken."""
    known = _registered.setdefault(codec.name, codec)
    if known is not codec:
        raise StorageError(f"the codec {codec.name!r} is taken by {known.__module__}: give yours another name")
    return codec


def codec_names() -> list[str]:
    """The built-in codecs, and those that were registered beside."""
    return [*BUILT_IN, *(name for name in _registered if name not in BUILT_IN)]


def codec_class(name: str) -> type[Codec]:
    """The codec of that name. ValueError lists the known ones."""
    if name in BUILT_IN:
        import_module(f"storage.codecs.{name.replace('-', '_')}")
    if name not in _registered:
        close = get_close_matches(str(name), codec_names(), n=1)
        raise StorageError(
            f"no codec is named {name!r}; {f'did you mean {close[0]}? ' if close else ''}choose one of "
            f"{', '.join(codec_names())} (a file named under `plugins` adds more)"
        )
    return _registered[name]


@dataclass(frozen=True, kw_only=True)
class CodecSpec:
    """A codec asked for: its name and settings. Part of the cache's identity; what was fitted is not.

    ValueError for a name that there is not, and a setting or value that the codec does not have.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        codec_class(self.name).complete(self.settings)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "settings": codec_class(self.name).complete(self.settings)}
