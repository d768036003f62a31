"""`docs/settings.md`: every setting with its type, default and meaning, made from the schema (`make docs`).

A setting's meaning is the comment beside it in `schema.py`, or above it where it is longer.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from pipelines.settings.errors import model_in
from pipelines.settings.schema import Settings

HEAD = """# Settings

Made from `pipelines/settings/schema.py` by `make docs`; a test compares. A settings file has these sections; what it
leaves out keeps its default. On the command line a setting is `section.name=value`, an item of a list
`data.train.0.limit=10`. What an algorithm sets by itself is in [drafters.md](drafters.md); `dspark settings CONFIG`
prints all values of a run.
"""


def reference() -> str:
    """The page."""
    return "\n".join([HEAD, *_section(Settings, "")]).rstrip() + "\n"


def _section(model: type[BaseModel], name: str) -> Iterator[str]:
    schema, comments = model.model_json_schema(), _comments(model)
    inner: dict[type[BaseModel], list[str]] = {}
    rows = []
    for key, field in model.model_fields.items():
        below = model_in(field.annotation)
        if below is not None:
            inner.setdefault(below, []).append(f"{name}{key}")
        if below is None or "[" in str(field.annotation):
            form = schema["properties"][key]
            default = "(required)" if field.is_required() else f"`{json.dumps(form.get('default'))}`"
            default = "" if below is not None else default
            rows.append(f"| `{key}` | {_kind(form, schema)} | {default} | {comments.get(key, '')} |")
    if name:
        yield f"## {name.rstrip('.')}\n\n{inspect.getdoc(model)}\n"
    if rows:
        yield from ["| name | value | default | meaning |", "| --- | --- | --- | --- |", *rows, ""]
    for below, paths in inner.items():
        yield from _section(below, f"{', '.join(paths)}.")


def _comments(model: type[BaseModel]) -> dict[str, str]:
    """The comment beside each field, after those above it; the description of one that stands in no source."""
    found = {name: field.description for name, field in model.model_fields.items() if field.description}
    above: list[str] = []
    try:
        source = inspect.getsource(model)
    except OSError:  # made of a registry's parts
        source = inspect.getsource(model.__bases__[0])
    for line in source.splitlines():
        if comment := re.fullmatch(r"    # (.*)", line):
            above.append(comment[1])
        elif field := re.match(r"    (\w+): [^#]*(?:# (.*))?", line):
            text = " ".join([*above, *filter(None, [field[2]])])
            found[field[1]] = text.replace("|", "\\|")
            above = []
        else:
            above = []
    return found


def _kind(form: dict[str, Any], schema: dict[str, Any]) -> str:
    """What a value may be, in words."""
    if "$ref" in form:
        return "section"
    if "anyOf" in form:
        return " or ".join(_kind(option, schema) for option in form["anyOf"])
    if "enum" in form or "const" in form:
        return ", ".join(f"`{value}`" for value in form.get("enum", [form.get("const")]))
    kind = form.get("type", "anything")
    if kind == "array":
        return f"list of {_kind(form['items'], schema)}".replace("list of section", "list of sections, below")
    if kind == "object":
        return "mapping"
    words = {"integer": "whole number", "boolean": "`true`, `false`", "string": "text", "null": "`null`"}
    return " ".join([words.get(kind, kind), *_bounds(form)])


def _bounds(form: dict[str, Any]) -> Iterator[str]:
    for name, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<")):
        if name in form and abs(form[name]) < 2**53:
            yield f"{sign} {form[name]:g}"


if __name__ == "__main__":
    print(reference(), end="")
