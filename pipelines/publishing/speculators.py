"""The layout of the vLLM project's `speculators` (0.9.0), for DSpark, DFlash and EAGLE-3 drafters.

1. The configuration: the draft layers as a Qwen3 configuration, and every key of the algorithm written out.
2. The weights under the same names. Embedding and head are the target's and are left out; a reduced draft vocabulary
   has its own rows of the head and of the Markov table, with `d2t` and `t2d` beside them.

Layer ids count the embedding's output as 0 here, so they are ours plus one.

V vocabulary, Vd draft vocabulary, d hidden size, r Markov rank.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dspark.config import DrafterConfig, SettingError
from dspark.models.checkpoint import SHARED_TENSORS
from dspark.models.draft_vocabulary import engine_mapping
from dspark.registry import algorithms
from pipelines.publishing.layouts import Layout, layouts

VERSION = "0.9.0"


@layouts.register("speculators")
class Speculators(Layout):
    description = "the layout of `speculators`, without embedding and head"

    @classmethod
    def require_form(cls, config: DrafterConfig) -> None:
        if config.family != "qwen3":
            raise SettingError(f"speculators knows Qwen3-style draft layers, not {config.family}: leave it out")
        if algorithms[config.algorithm].speculators_layout(config, []) is None:
            raise SettingError(f"{config.algorithm} has no form in speculators: leave it out")
        if config.context_residual:
            raise SettingError(
                "speculators has no form for drafter.context_residual, and would draft without it: leave the layout "
                "out, or train with drafter.context_residual=false"
            )
        if min(config.target_layer_ids) < 0:
            raise SettingError(
                f"target_layer_ids has {min(config.target_layer_ids)}, the embedding's output, which speculators has "
                "no id for: leave it out, or set drafter.target_layer_ids to 0 and above"
            )

    @classmethod
    def config(cls, config: DrafterConfig, *, target_name: str, architectures: list[str], dtype: str) -> dict[str, Any]:
        layer = {
            "model_type": "qwen3",
            "dtype": dtype,
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_draft_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "hidden_act": config.hidden_act,
            "attention_bias": config.attention_bias,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_parameters": dict(config.rope_parameters),
            "max_position_embeddings": config.max_position_embeddings,
            "layer_types": ["full_attention"] * config.num_draft_layers,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
        }
        if config.final_logit_softcapping is not None:
            layer["final_logit_softcapping"] = config.final_logit_softcapping
        layer_ids = [layer_id + 1 for layer_id in config.target_layer_ids]
        own = algorithms[config.algorithm].speculators_layout(config, layer_ids)
        assert own is not None
        return {
            "speculators_version": VERSION,
            "dtype": dtype,
            "speculators_config": {
                "algorithm": own["speculators_model_type"],
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size}],
                "verifier": {"name_or_path": target_name, "architectures": architectures},
            },
            "transformer_layer_config": layer,
            "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
            "target_hidden_size": config.hidden_size,
            "tie_word_embeddings": False,
            **own,
        }

    @classmethod
    def tensors(cls, drafter: Any) -> dict[str, Tensor]:
        """Without the target's embedding and head, unless the draft vocabulary is a part of it."""
        config: DrafterConfig = drafter.config
        tensors = {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in drafter.state_dict().items()
            if name not in SHARED_TENSORS
        }
        ids = drafter.draft_token_ids
        if ids is not None:
            ids = ids.cpu()
            tensors["lm_head.weight"] = drafter.lm_head.weight.detach().cpu()[ids].contiguous()
            if config.markov_rank:
                name = "markov_head.markov_w2.weight"
                tensors[name] = tensors[name][ids].contiguous()
            tensors["d2t"], tensors["t2d"] = engine_mapping(ids, config.vocab_size)
        return tensors
