"""DSpark: DFlash's parallel block from the anchor, with a sequential head and a confidence head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dspark.config import DrafterConfig
from dspark.families import FAMILIES
from dspark.models.dflash import DFlash
from dspark.models.heads import ConfidenceHead, build_head
from dspark.registry import algorithms


@algorithms.register("dspark")
class DSpark(DFlash):
    """Defaults and loss are the settings' own: they are the paper's for this algorithm."""

    title = "DSpark"
    architectures: ClassVar[Mapping[str, str]] = {family.dspark_architecture: name for name, family in FAMILIES.items()}
    loss: ClassVar[Mapping[str, float]] = {}
    fixed: ClassVar[Mapping[str, Any]] = {}
    block_layouts: ClassVar[tuple[str, ...]] = ("anchor-first",)

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.markov_head = build_head(config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None

    @classmethod
    def name_for(cls, config: DrafterConfig) -> str:
        """Without its heads it is DFlash, and a checkpoint does not tell the two apart."""
        return "dspark" if config.markov_rank or config.enable_confidence_head else "dflash"
