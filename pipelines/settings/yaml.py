"""YAML settings files: `extends:`, deep merge, dotted overrides, and the place where every value was written.

The dialect is YAML 1.2's: only `true` and `false` are booleans (so `thinking: off` is the word off), and `6e-4` is a
number. A key written twice is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from pipelines.errors import UserError

KeyPath = tuple[str | int, ...]
COMMAND_LINE = "command line ("  # how the place of an override begins
# No settings file comes near these. Aliases count as what they stand for.
MOST_BYTES, MOST_VALUES, DEEPEST, LONGEST_NUMBER = 500_000, 50_000, 40, 40
_TAG = "tag:yaml.org,2002:"
_TYPES: dict[
    str, tuple[str, list[str], Callable[[str], Any]]
] = {  # of an unquoted word: pattern, first characters, and how it is read
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""], lambda text: None),
    "bool": (r"true|false", list("tf"), "true".__eq__),
    "int": (r"[-+]?[0-9][0-9_]*", list("-+0123456789"), int),
    "float": (
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?",
        list("-+.0123456789"),
        float,
    ),
    "str": (r"(?!)", [], str),  # anything else
}


class _Loader(yaml.BaseLoader):
    """Tells the types above apart, and nothing else."""


for _name, (_pattern, _first, _) in _TYPES.items():
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), _first)


@dataclass
class Document:
    """Plain values, and for each key path the `file:line` (or command-line word) that set it last."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)
    source: str = "settings"

    def place_of(self, path: KeyPath) -> str:
        """The place of the key, or of the nearest enclosing one that was written down."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return self.source

    def forget(self, path: KeyPath) -> None:
        """Drop the places of the key and of all below it: another value takes theirs."""
        for stale in [known for known in self.places if known[: len(path)] == path]:
            del self.places[stale]


def read_document(path: Path) -> Document:
    """The file with everything it extends merged below it. Raises UserError.

    Where there is none, `configs/NAME` is the one of that name that comes with the package.
    """
    shipped = Path(str(files("pipelines") / "configs" / path.name))
    come_with = path.parent.name == "configs" and not os.path.exists(path) and os.path.exists(shipped)
    return _read(shipped if come_with else path, ())


def _read(path: Path, extended_by: tuple[Path, ...]) -> Document:
    own = parse_text(_text_of(path), str(path))
    resolved = path.resolve()
    if resolved in extended_by:
        chain = " -> ".join(str(file) for file in [*extended_by, resolved])
        raise UserError(f"{path}: `extends` goes round in a circle: {chain}")
    bases = own.values.pop("extends", [])
    place = own.places.pop(("extends",), str(path))
    if isinstance(bases, str):
        bases = [bases]
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(f"{place}: `extends` must be a file name or a list of file names, found {bases!r}")
    merged = Document(source=str(path))
    for base in bases:
        try:
            below = _read(path.parent / base, (*extended_by, resolved))
        except _NoFile as error:
            raise UserError(f"{place}: `extends` names {base!r}, but {error}") from None
        _merge(merged, below)
    _merge(merged, own)
    return merged


class _NoFile(UserError):
    """There is no such file, or it cannot be read."""


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise _NoFile(f"there is no settings file {path}{_nearest_file(path)}") from None
    except IsADirectoryError:
        raise _NoFile(
            f"{path} is a folder without a run (no run.json in it); expected a settings file such as "
            "configs/quickstart.yaml"
            if not (path / "run.json").exists()
            else f"{path} is a run's folder; this command wants a settings file such as configs/quickstart.yaml"
        ) from None
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: not UTF-8 text ({error.reason}); a settings file is YAML") from None
    except OSError as error:
        raise _NoFile(f"the settings file {path} cannot be read: {error.strerror}") from None
    if len(content) > MOST_BYTES:
        raise UserError(f"{path} is larger than {MOST_BYTES:,} bytes, which no settings file is")
    return text


def parse_text(text: str, source: str) -> Document:
    """Parse one document; places read `source:line`. Raises UserError."""
    node = _compose(text, source)
    document = Document(source=source)
    if node is None:
        return document
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{source}:{node.start_mark.line + 1}: expected sections such as `run:` and `target:`")
    document.values = _Reader(source, document.places).read(node, ())
    return document


def _compose(text: str, source: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, why = mark.line + 1 if mark else 1, error.problem or error.context
    except yaml.reader.ReaderError as error:
        line, why = text.count("\n", 0, error.position) + 1, f"the character #x{error.character:04x} is not allowed"
    except (ValueError, OverflowError) as error:  # of an escape such as \UFFFFFFFF
        line, why = 1, str(error)
    except RecursionError:
        line, why = 1, "it is nested too deeply"
    raise UserError(f"{_place(source, line)}: not valid YAML: {why}")


class _Reader:
    """Plain values of one document's nodes, and their places."""

    def __init__(self, source: str, places: dict[KeyPath, str]) -> None:
        self._source, self._places, self._count = source, places, 0

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        here = _place(self._source, node.start_mark.line + 1)
        self._count += 1
        if self._count > MOST_VALUES or len(path) > DEEPEST:
            limit = f"nested more than {DEEPEST} deep" if len(path) > DEEPEST else f"more than {MOST_VALUES:,} values"
            raise UserError(f"{here}: {limit}, aliases written out, which no settings are")
        if node.tag.removeprefix(_TAG) not in (_TYPES if isinstance(node, yaml.ScalarNode) else ("map", "seq")):
            tag = node.tag.replace(_TAG, "!!")
            raise UserError(f"{here}: the YAML tag {tag} is not allowed in settings; write the plain value")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._places[(*path, index)] = _place(self._source, item.start_mark.line + 1)
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return _scalar(node, here)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            here = _place(self._source, key_node.start_mark.line + 1)
            if not isinstance(key_node, yaml.ScalarNode):
                raise UserError(f"{here}: a key must be one word, not a list or a section")
            key = _checked(key_node.value, here)
            if key in values:
                raise UserError(f"{here}: `{key}` is written twice; the first is at {self._places[(*path, key)]}")
            self._places[(*path, key)] = here
            values[key] = self.read(value_node, (*path, key))
        return values


def _scalar(node: yaml.ScalarNode, place: str) -> Any:
    kind, text = node.tag.removeprefix(_TAG), _checked(node.value, place)
    if kind in ("int", "float") and len(text) > LONGEST_NUMBER:
        raise UserError(f"{place}: a number of {len(text)} characters; write no more than {LONGEST_NUMBER}")
    try:
        return _TYPES[kind][2](text)
    except ValueError as error:
        raise UserError(f"{place}: cannot read this value: {error}") from None


def _checked(text: str, place: str) -> str:
    """The text, unless it holds what no path, name or option can."""
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"{place}: {text[:80]!r} holds a NUL character, or bytes that are not UTF-8")
    return text


def _place(source: str, line: int) -> str:
    """`file:line`; a word of the command line is its own place."""
    return source if source.startswith(COMMAND_LINE) else f"{source}:{line}"


def _merge(below: Document, above: Document) -> None:
    """Lay `above` over `below`: mappings merge, anything else (lists too) replaces."""

    def lay(lower: dict[str, Any], upper: dict[str, Any], path: KeyPath) -> None:
        for key, value in upper.items():
            if isinstance(value, dict) and isinstance(lower.get(key), dict):
                lay(lower[key], value, (*path, key))
            else:
                below.forget((*path, key))
                lower[key] = value

    lay(below.values, above.values, ())
    below.places.update(above.places)


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Apply `dotted.key=value` words; the value is read as YAML, an index picks from a list (`data.train.0.limit`)."""
    for word in overrides:
        place = f"{COMMAND_LINE}{_shortened(word)})"
        dotted, equals, text = _checked(word, "command line").partition("=")
        parts = dotted.strip().split(".")
        path: KeyPath = tuple(int(part) if re.fullmatch("[0-9]{1,6}", part) else part for part in parts)
        if not equals or "" in path or len(path) > DEEPEST:
            raise UserError(
                f"cannot read {_shortened(word)!r} as a setting; expected key=value, for example train.num_workers=2"
            )
        if path[0] == "extends":
            raise UserError(f"{word!r}: `extends` is for settings files; on the command line, give single values")
        if not text.strip():
            raise UserError(f"{word!r} has no value; write {dotted}=VALUE, or {dotted}=null for none")
        try:
            node = _compose(text, place)
        except UserError:
            raise UserError(f"cannot read the value in {_shortened(word)!r} as YAML; put quotes round it") from None
        inner_places: dict[KeyPath, str] = {}
        value = None if node is None else _Reader(place, inner_places).read(node, path)
        _set(document, path, value, place)
        document.places.update(dict.fromkeys(inner_places, place))


def _shortened(word: str) -> str:
    return word if len(word) <= 200 else word[:197] + "..."


def _set(document: Document, path: KeyPath, value: Any, place: str) -> None:
    holder: Any = document.values
    for depth, part in enumerate(path[:-1]):
        if isinstance(part, int):
            if not isinstance(holder, list) or part >= len(holder):
                raise UserError(f"{place}: there is no item {part} in `{dotted_name(path[:depth])}`")
            holder = holder[part]
            continue
        if not isinstance(holder, dict):
            raise UserError(f"{place}: `{dotted_name(path[:depth])}` is a value and has no key `{part}`")
        if not isinstance(holder.get(part), (dict, list)):
            holder[part] = {}
            document.places[path[: depth + 1]] = place
        holder = holder[part]
    last = path[-1]
    if isinstance(holder, list):
        if not isinstance(last, int) or last >= len(holder):
            raise UserError(f"{place}: `{dotted_name(path[:-1])}` is a list of {len(holder)} items, numbered from 0")
        holder[last] = value
    elif isinstance(holder, dict):
        holder[str(last)] = value
    else:
        raise UserError(f"{place}: `{dotted_name(path[:-1])}` is a value and has no key `{last}`")
    document.forget(path)
    document.places[path] = place


def dotted_name(path: KeyPath) -> str:
    """`("train", "loss", "ce")` as `train.loss.ce`."""
    return ".".join(str(part) for part in path)


def _nearest_file(path: Path) -> str:
    folder = path.parent
    names = [file.name for file in folder.glob("*.yaml")] if folder.is_dir() else []
    close = get_close_matches(path.name, names, n=1, cutoff=0.75)
    return f"; did you mean {folder / close[0]}?" if close else ""
