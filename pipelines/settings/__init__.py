"""Settings of a run, out of a YAML file with what it extends and `key=value` words.

`schema` has the sections and their defaults, `yaml` reads files, `recipes` is what an algorithm sets, and `errors` says
what is wrong, and where.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipelines.plugins import load_plugins
from pipelines.settings.errors import explain, refuse_secrets
from pipelines.settings.recipes import with_recipe
from pipelines.settings.schema import Settings
from pipelines.settings.yaml import Document, apply_overrides, read_document

__all__ = ["Settings", "check_settings", "load_settings", "settings_from_dict"]


def load_settings(path: str | Path, overrides: Sequence[str] = ()) -> Settings:
    """Settings out of a YAML file and `key=value` words. Raises UserError with the place of what is wrong."""
    document = read_document(Path(path))
    apply_overrides(document, overrides)
    return check_settings(document)


def settings_from_dict(values: dict[str, Any], source: str = "run.json") -> Settings:
    """Settings out of what `to_dict` gave."""
    return check_settings(Document(values, source=source))


def check_settings(document: Document) -> Settings:
    """Validate; raises UserError naming for each fault the place, the nearest valid key or what was expected."""
    refuse_secrets(document)
    plugins = document.values.get("plugins")
    if isinstance(plugins, list) and all(isinstance(plugin, str) for plugin in plugins):
        load_plugins(plugins)
    try:
        # JSON mode: strict about types, while a YAML list is a tuple.
        return Settings.model_validate_json(json.dumps(with_recipe(document.values)))
    except ValidationError as error:
        raise explain(error, document, Settings) from None
