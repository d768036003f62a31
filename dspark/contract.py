"""How states and blocks are to be read: one value object, compared and never assumed.

It is written into the target cache, the checkpoint, the events and every export.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from dspark.errors import DsparkError
from dspark.manifest import AGAIN, CheckpointError, read_json, require_intact

FILE = "contract.json"

BlockLayout = Literal["anchor-first", "mask-first"]
Thinking = Literal["off", "on", "mixed"]

# A cache leaves these open: drafters of any block read the same states.
BLOCK_FIELDS = ("block_layout", "block_size", "mask_token_id")

# Where the target was found: the same weights may lie in a folder here and on the hub there.
PLACE_FIELDS = ("target_name", "target_revision")

_CURES = {
    "target_name": "use the target that the states were recorded from (`target.model`)",
    "target_revision": "set `target.revision` to the recorded one, or rebuild the cache",
    "weights_sha256": "the target's weights have changed: rebuild the cache",
    "tokenizer_sha256": "the tokenizer has changed: rebuild the conversations and the cache",
    "chat_template_sha256": "the chat template has changed: rebuild the conversations and the cache",
    "thinking": "set the same thinking mode (`target.thinking`), or rebuild the conversations",
    "target_layer_ids": "set `drafter.target_layer_ids` to the recorded layers, or rebuild the cache",
    "final_norm_applied": "last states must be stored after the target's final norm: rebuild the cache",
    "block_layout": "set `drafter.block_layout` to the checkpoint's",
    "block_size": "set `drafter.block_size` to the checkpoint's",
    "mask_token_id": "set `drafter.mask_token_id` to the checkpoint's",
}


class ContractMismatch(DsparkError):
    """Two parts of a run disagree on how states or blocks are to be read."""


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Layer ids are 0-based decoder layers whose *output* is captured; -1 is the embedding output."""

    target_name: str
    target_revision: str | None
    weights_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    thinking: Thinking
    target_layer_ids: tuple[int, ...]
    final_norm_applied: bool = True
    block_layout: BlockLayout | None = None
    block_size: int | None = None
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(int(layer) for layer in self.target_layer_ids))
        for name in ("target_name", "weights_sha256", "tokenizer_sha256", "chat_template_sha256"):
            if not isinstance(value := getattr(self, name), str):
                raise DsparkError(f"{name} is {value!r}, expected a text")
        if self.thinking not in ("off", "on", "mixed"):
            raise DsparkError(
                f"thinking mode {self.thinking!r} is not one of off, on, mixed (option `target.thinking`)"
            )
        if self.block_layout not in (None, "anchor-first", "mask-first"):
            raise DsparkError(
                f"block layout {self.block_layout!r} is not one of anchor-first, mask-first "
                "(option `drafter.block_layout`)"
            )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "target_layer_ids": list(self.target_layer_ids)}

    def write(self, folder: Path) -> None:
        """As `contract.json`."""
        (folder / FILE).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n")

    @classmethod
    def read(cls, folder: Path, cure: str = AGAIN) -> Contract | None:
        """Of a drafter's folder; None where there is none. Raises CheckpointError for one that was changed or cut."""
        if not os.path.lexists(folder / FILE):
            return None
        require_intact(folder, (FILE,), needs_manifest=False, cure=cure)
        try:
            return cls.from_dict(read_json(folder / FILE, cure))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{folder / FILE}: {error}: {cure}") from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Contract:
        """Raises DsparkError when a field is missing or unknown: nothing is filled in by a default."""
        names = {field.name for field in fields(cls)}
        if missing := sorted(names - set(values)):
            raise DsparkError(f"this contract lacks {', '.join(missing)}; it was written by another version or cut off")
        if unknown := sorted(set(values) - names):
            raise DsparkError(f"this contract has unknown fields {', '.join(unknown)}; known are {', '.join(names)}")
        return cls(**{name: values[name] for name in names})

    def differences(self, other: Contract) -> list[tuple[str, Any, Any]]:
        """(field, ours, theirs) for every field that differs.

        An open block field agrees with anything, and so does the place where the target was found if its weights are
        the same.
        """
        same_weights = self.weights_sha256 == other.weights_sha256
        found = []
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            left_open = field.name in BLOCK_FIELDS and (ours is None or theirs is None)
            elsewhere = same_weights and field.name in PLACE_FIELDS
            if ours != theirs and not left_open and not elsewhere:
                found.append((field.name, ours, theirs))
        return found

    def require_same(self, other: Contract, ours: str = "checkpoint", theirs: str = "cache") -> None:
        """Raises ContractMismatch naming every field that differs and what cures it."""
        if found := self.differences(other):
            lines = [
                f"  {name}: {ours} has {our!r}, {theirs} has {their!r} ({_CURES[name]})" for name, our, their in found
            ]
            raise ContractMismatch(f"{ours} and {theirs} do not belong together:\n" + "\n".join(lines))
