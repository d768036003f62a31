"""DSpark: DFlash's parallel block from the anchor, with a sequential head and a confidence head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dspark.config import DrafterConfig
from dspark.families import FAMILIES, by_architecture, with_residual
from dspark.models.base import vllm_command
from dspark.models.dflash import DFlash
from dspark.models.heads import ConfidenceHead, build_head
from dspark.registry import algorithms, sequential_heads


@algorithms.register("dspark")
class DSpark(DFlash):
    """Defaults and loss are the settings' own: they are the paper's for this algorithm."""

    title = "DSpark"
    architectures: ClassVar[Mapping[str, str]] = {
        **by_architecture(FAMILIES),
        **{with_residual(name): family for name, family in by_architecture(FAMILIES).items()},
    }
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

    @classmethod
    def engine_notes(cls, config: DrafterConfig, *, speculators: bool) -> list[str]:
        if config.context_residual or not config.markov_rank:
            return super().engine_notes(config, speculators=speculators)
        kind = config.markov_head_type
        engines = sequential_heads[str(kind)].engines
        if not engines:
            return [f"Evaluation only: no engine has a {kind} sequential head."]
        if len(engines) == 1:
            return [f"{engines[0]} only: other engines have no {kind} sequential head."]
        notes = [f"{', '.join(engines[:-1])} and {engines[-1]} load this layout ({kind} sequential head)."]
        if config.enable_confidence_head and not config.confidence_head_with_markov:
            notes.append("llama.cpp refuses a confidence head without the Markov embedding.")
        return notes

    @classmethod
    def commands(cls, config: DrafterConfig, *, speculators: bool, temperatures: bool) -> dict[str, str]:
        if config.context_residual or not config.markov_rank:
            return {}
        table = " --speculative-dspark-confidence-sts-path sglang_temperatures.json" if temperatures else ""
        known = vllm_command("dspark", "…", config.block_size) | {
            "SGLang": f"--speculative-algorithm DSPARK --speculative-draft-model-path …{table}",
            "llama.cpp": f"--spec-type draft-dspark --spec-draft-n-max {config.block_size}",
        }
        return {engine: known[engine] for engine in sequential_heads[str(config.markov_head_type)].engines}
