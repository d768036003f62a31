"""Layouts in which a drafter is published beside the native one, by name: `publish.layouts`.

A layout is a class in one file, with `@layouts.register("name")` above it: its configuration and its tensors. The
folder `published/NAME/` gets both, and is compared with what was meant before it is published.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from dspark.config import DrafterConfig, SettingError
from dspark.contract import Contract
from dspark.models.checkpoint import CONFIG, WEIGHTS, save_tensors
from dspark.registry import Registry
from pipelines.publishing.checks import CheckFailed, stored_alike


class Layout(ABC):
    """One layout. `description` is its line in the model card."""

    description: ClassVar[str]

    @classmethod
    @abstractmethod
    def require_form(cls, config: DrafterConfig) -> None:
        """Raises SettingError for a drafter that the layout has no form for."""

    @classmethod
    @abstractmethod
    def config(cls, config: DrafterConfig, *, target_name: str, architectures: list[str], dtype: str) -> dict[str, Any]:
        """`config.json`; `target_name` and `architectures` are the target's, `dtype` that of the weights."""

    @classmethod
    @abstractmethod
    def tensors(cls, drafter: Any) -> Mapping[str, Tensor]:
        """The weights by name, on the CPU."""

    @classmethod
    def write(cls, drafter: Any, folder: Path, contract: Contract, architectures: list[str]) -> dict[str, Any]:
        """Write the folder; what was compared. Raises SettingError for a drafter without a form, CheckFailed."""
        cls.require_form(drafter.config)
        dtype = str(drafter.dtype).removeprefix("torch.")
        name = contract.target_name
        values = cls.config(drafter.config, target_name=name, architectures=architectures, dtype=dtype)
        tensors = cls.tensors(drafter)
        folder.mkdir(parents=True)
        save_tensors(tensors, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
        if json.loads((folder / CONFIG).read_text()) != values:
            raise CheckFailed(f"{folder / CONFIG} does not read back as it was meant: its values are not plain JSON")
        return stored_alike(folder / WEIGHTS, tensors)


layouts: Registry[type[Layout]] = Registry(
    "layout", option="publish.layouts", modules=("pipelines.publishing.speculators",)
)


def require_forms(names: tuple[str, ...], config: DrafterConfig) -> None:
    """Raises SettingError for a name that no layout has, and a drafter that one of them has no form for."""
    for name in names:
        try:
            layouts[name].require_form(config)
        except SettingError as error:
            raise SettingError(f"publish.layouts: {error}") from error
