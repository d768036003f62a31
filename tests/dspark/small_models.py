"""Small random targets of each family, for tests."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dspark.config import DrafterConfig
from dspark.target import Target

LAYERS = (0, 2, 4)
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_target(kind: str = "llama", *, tied: bool = True, seed: int = 0) -> Target:
    """A random target; weights larger than at a usual start, so that its layers matter."""
    torch.manual_seed(seed)
    model: Any
    if kind == "gemma4":
        from transformers import Gemma4ForCausalLM, Gemma4TextConfig

        model = Gemma4ForCausalLM(
            Gemma4TextConfig(
                **SIZES,
                global_head_dim=16,
                attention_k_eq_v=True,
                num_global_key_value_heads=2,
                hidden_size_per_layer_input=0,
                vocab_size_per_layer_input=97,
                layer_types=["sliding_attention", "full_attention"] * 3,
                sliding_window=16,
                tie_word_embeddings=tied,
            )
        )
    else:
        cls, config = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}[kind]
        model = cls(config(**SIZES, tie_word_embeddings=tied))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return Target(model, target_layer_ids=LAYERS, name=f"tiny {kind}")


def config_for(target: Target, **overrides: Any) -> DrafterConfig:
    settings: dict[str, Any] = {"num_draft_layers": 2, "block_size": 4, "target_layer_ids": LAYERS}
    if overrides.get("algorithm", "dspark") == "dspark":
        settings["markov_rank"] = 8
    return DrafterConfig.for_target(target.text_config, mask_token_id=96, **(settings | overrides))
