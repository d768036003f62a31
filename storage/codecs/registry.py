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

EITHER, HIDDEN_STATES, TEACHER = "either part", "hidden states", "teacher"
BUILT_IN = {
    "projected": HIDDEN_STATES,
    "corrected": TEACHER,
    "recomputed": TEACHER,
    "sparse": TEACHER,
    "transform": EITHER,
    "int8": EITHER,
    "fp8": EITHER,
    "bf16-planes": EITHER,
    "bf16": EITHER,
}
"""What each codes; it is in the module of its name (`bf16-planes` in `storage/codecs/bf16_planes.py`)."""

Registered = TypeVar("Registered", bound="type[Codec]")
_registered: dict[str, type[Codec]] = {}


def register(codec: Registered) -> Registered:
    """A class decorator that makes the codec known by its `name`. ValueError for a name that is taken."""
    known = _registered.setdefault(codec.name, codec)
    if known is not codec:
        raise StorageError(f"the codec {codec.name!r} is taken by {known.__module__}: give yours another name")
    return codec


def codec_names(part: str | None = None) -> list[str]:
    """The built-in codecs, and those that were registered beside; with `part` those that code it."""
    added = {name: codec for name, codec in _registered.items() if name not in BUILT_IN}
    parts = BUILT_IN | {name: TEACHER if codec.teacher_only else EITHER for name, codec in added.items()}
    return [name for name, of in parts.items() if part is None or of in (part, EITHER)]


def codec_class(name: str) -> type[Codec]:
    """The codec of that name. ValueError lists the known ones."""
    if name in BUILT_IN:
        import_module(f"storage.codecs.{name.replace('-', '_')}")
    return _registered[known_codec(name)]


def known_codec(name: str, part: str | None = None) -> str:
    """The name itself. StorageError where there is no such codec, or none that codes the part."""
    known = codec_names(part)
    if name not in known:
        close = get_close_matches(str(name), known, n=1)
        raise StorageError(
            f"no codec{f' of the {part}' if part else ''} is named {name!r}; "
            f"{f'did you mean {close[0]}? ' if close else ''}choose one of {', '.join(known)} "
            "(a file named under `plugins` adds more)"
        )
    return name


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
