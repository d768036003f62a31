"""Small random targets of each family, for tests."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dspark.config import DrafterConfig
from dspark.decoding.target import Target
from dspark.registry import algorithms

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


def a_drafter(target: Any, kind: str) -> Any:
    settings: dict[str, dict[str, Any]] = {
        "vanilla": {},
        "gated": {"markov_head_type": "gated"},
        "rnn": {"markov_head_type": "rnn"},
        "dflash": {"algorithm": "dflash"},
        "context-residual": {"context_residual": True},
        "mask-first": {"algorithm": "dflash", "block_layout": "mask-first"},
        "reduced": {"draft_vocab_size": 40},
        "eagle3": {"algorithm": "eagle3", "num_draft_layers": 1, "block_size": 7},
        "mtp": {"algorithm": "mtp", "num_draft_layers": 1, "block_size": 3, "target_layer_ids": target.layer_ids},
    }
    config = config_for(target, **settings[kind])
    drafter: Any = algorithms[config.algorithm](config)
    drafter.initialise_random(3)
    drafter.share_target(target.embed_tokens.weight, target.lm_head.weight)
    if drafter.markov_head is not None:
        torch.nn.init.normal_(drafter.markov_head.markov_w2.weight, std=0.3)
    if kind == "reduced":
        drafter.restrict_vocabulary(torch.arange(7, 47))
    return drafter.eval()


def extend_context(
    drafter: Any, cache: Any, hidden_states: Any, lengths: list[int], rows: list[int], next_ids: Any = None
) -> None:
    """Append the first lengths[b] of hidden_states [B, S, m*d], with next_ids [B, S], where cache row rows[b] ends."""
    for states, count, row, following in zip(
        hidden_states, lengths, rows, [None] * len(rows) if next_ids is None else next_ids, strict=True
    ):
        positions = torch.arange(count) + cache.lengths[row]
        following = torch.zeros(count, dtype=torch.long) if following is None else following[:count]
        drafter.write_context(cache, states[:count], torch.full((count,), row), positions, following)
        cache.lengths[row] += count
