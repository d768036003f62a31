"""YAML settings files: `extends:`, deep merge, dotted overrides, and the place where every value was written.

The dialect is YAML 1.2's: only `true` and `false` are booleans (so `thinking: off` is the word off), and `6e-4` is a
number. A key written twice is an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pipelines.errors import UserError

KeyPath = tuple[str | int, ...]
COMMAND_LINE = "command line ("  # how the place of an override begins
_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's booleans and numbers."""


_RESOLVED = {
    "tag:yaml.org,2002:bool",
    "tag:yaml.org,2002:int",
    "tag:yaml.org,2002:float",
    "tag:yaml.org,2002:timestamp",
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _RESOLVED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9][0-9_]*$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(str(node.value).replace("_", "")))
_Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(str(node.value).replace("_", "")))


@dataclass
class Document:
    """Plain values, and for each key path the `file:line` (or command-line word) that set it last."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place_of(self, path: KeyPath) -> str:
        """The place of the key, or of the nearest enclosing one that was written down."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return "settings"


def read_document(path: Path) -> Document:
    """The file with everything it extends merged below it. Raises UserError."""
    return _read(path, ())


def _read(path: Path, extended_by: tuple[Path, ...]) -> Document:
    resolved = path.resolve()
    if resolved in extended_by:
        chain = " -> ".join(str(file) for file in [*extended_by, resolved])
        raise UserError(f"{path}: `extends` goes round in a circle: {chain}")
    own = _parse_file(path, extended_by)
    bases = own.values.pop("extends", [])
    place = own.places.pop(("extends",), str(path))
    if isinstance(bases, str):
        bases = [bases]
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(f"{place}: `extends` must be a file name or a list of file names, found {bases!r}")
    merged = Document()
    for base in bases:
        base_path = path.parent / base
        if not base_path.is_file():
            raise UserError(f"{place}: `extends` names {base!r}, but there is no {base_path}{_nearest_file(base_path)}")
        _merge(merged, _read(base_path, (*extended_by, resolved)))
    _merge(merged, own)
    return merged


def _parse_file(path: Path, extended_by: tuple[Path, ...]) -> Document:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no settings file {path}{_nearest_file(path)}") from None
    except IsADirectoryError:
        raise UserError(
            f"{path} is a folder without a run (no run.json in it); expected a settings file such as "
            "configs/quickstart.yaml"
            if not (path / "run.json").exists()
            else f"{path} is a run's folder; this command wants a settings file such as configs/quickstart.yaml"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from None
    return parse_text(text, str(path))


def parse_text(text: str, source: str) -> Document:
    """Parse one document; places read `source:line`."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        raise UserError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    document = Document()
    if node is None:
        return document
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{source}:{node.start_mark.line + 1}: expected sections such as `run:` and `target:`")
    document.values = _plain(node, (), source, document.places)
    return document


def _plain(node: yaml.Node, path: KeyPath, source: str, places: dict[KeyPath, str]) -> Any:
    if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN_TAGS:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise UserError(f"{_place(source, node)}: the YAML tag {tag} is not allowed in settings; write the plain value")
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            here = _place(source, key_node)
            if key in values:
                raise UserError(f"{here}: `{key}` is written twice; the first is at {places[(*path, key)]}")
            places[(*path, key)] = here
            values[key] = _plain(value_node, (*path, key), source, places)
        return values
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            places[(*path, index)] = _place(source, item)
            items.append(_plain(item, (*path, index), source, places))
        return items
    return _construct(node, source)


def _construct(node: yaml.Node, source: str) -> Any:
    loader = _Loader("")
    try:
        return loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{_place(source, node)}: cannot read this value: {error}") from None
    finally:
        loader.dispose()


def _place(source: str, node: yaml.Node) -> str:
    """`file:line`; a word of the command line is its own place."""
    return source if source.startswith(COMMAND_LINE) else f"{source}:{node.start_mark.line + 1}"


def _merge(below: Document, above: Document) -> None:
    """Lay `above` over `below`: mappings merge, anything else (lists too) replaces."""
    _merge_values(below.values, above.values, (), below.places)
    below.places.update(above.places)


def _merge_values(below: dict[str, Any], above: dict[str, Any], path: KeyPath, places: dict[KeyPath, str]) -> None:
    for key, value in above.items():
        here = (*path, key)
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _merge_values(below[key], value, here, places)
            continue
        for stale in [place for place in places if place[: len(here)] == here]:
            del places[stale]
        below[key] = value


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Apply `dotted.key=value` words; the value is read as YAML, an index picks from a list (`data.train.0.limit`)."""
    for word in overrides:
        dotted, equals, text = word.partition("=")
        path: KeyPath = tuple(int(part) if part.isdigit() else part for part in dotted.strip().split("."))
        if not equals or "" in path:
            raise UserError(
                f"cannot read {word!r} as a setting; expected key=value, for example train.num_train_epochs=2"
            )
        if path[0] == "extends":
            raise UserError(f"{word!r}: `extends` is for settings files; on the command line, give single values")
        if not text.strip():
            raise UserError(f"{word!r} has no value; write {dotted}=VALUE, or {dotted}=null for none")
        place = f"{COMMAND_LINE}{word})"
        try:
            node = yaml.compose(text, Loader=_Loader)
        except yaml.YAMLError:
            raise UserError(f"cannot read the value in {word!r} as YAML; put quotes round it") from None
        inner_places: dict[KeyPath, str] = {}
        value = None if node is None else _plain(node, path, place, inner_places)
        _set(document, path, value, place)
        document.places.update(dict.fromkeys(inner_places, place))


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
    for stale in [known for known in document.places if known[: len(path)] == path]:
        del document.places[stale]
    document.places[path] = place


def dotted_name(path: KeyPath) -> str:
    """`("train", "loss", "ce")` as `train.loss.ce`."""
    return ".".join(str(part) for part in path)


def _nearest_file(path: Path) -> str:
    from difflib import get_close_matches

    folder = path.parent
    names = [file.name for file in folder.glob("*.yaml")] if folder.is_dir() else []
    close = get_close_matches(path.name, names, n=1, cutoff=0.75)
    return f"; did you mean {folder / close[0]}?" if close else ""
