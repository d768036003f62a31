"""The layout of the vLLM project's `speculators` (0.9.0), for DSpark, DFlash and EAGLE-3 drafters.

1. The configuration: the draft layers as a Qwen3 configuration, and every key of the algorithm written out.
2. The weights under the same names. Embedding and head are the target's and are left out; a reduced draft vocabulary
   has its own rows of the head and of the Markov table, with `d2t` and `t2d` beside them.

Layer ids count the embedding's output as 0 here, so they are ours plus one.

V vocabulary, Vd draft vocabulary, d hidden size, r Markov rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dspark.config import DrafterConfig
from dspark.models.checkpoint import SHARED_TENSORS
from dspark.models.draft_vocabulary import engine_mapping
from dspark.registry import algorithms
from pipelines.errors import UserError

VERSION = "0.9.0"


class LayoutError(UserError):
    """This drafter has no form in the layout; the message names the option that asks for it."""


def require_form(config: DrafterConfig) -> None:
    """Raises LayoutError for a drafter that the layout has no form for."""
    if config.family != "qwen3":
        raise LayoutError(
            f"the speculators layout knows Qwen3-style draft layers, not {config.family}: set publish.speculators=false"
        )
    if algorithms[config.algorithm].speculators_layout(config, []) is None:
        raise LayoutError(f"{config.algorithm} has no form in the speculators layout: set publish.speculators=false")
    if min(config.target_layer_ids) < 0:
        raise LayoutError(
            f"target_layer_ids has {min(config.target_layer_ids)}, the embedding's output, which the speculators "
            "layout has no id for: set publish.speculators=false, or drafter.target_layer_ids to 0 and above"
        )


def speculators_config(config: DrafterConfig, *, target_name: str, architectures: Sequence[str]) -> dict[str, Any]:
    """`config.json` for a target of this name and `architectures`. Raises LayoutError (see `require_form`)."""
    require_form(config)
    layer = {
        "model_type": "qwen3",
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
        "speculators_config": {
            "algorithm": own["speculators_model_type"],
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size}],
            "verifier": {"name_or_path": target_name, "architectures": list(architectures)},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "tie_word_embeddings": False,
        **own,
    }


def speculators_tensors(drafter: Any) -> dict[str, Tensor]:
    """The weights by name; without the target's embedding and head unless the draft vocabulary is a part of it."""
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


def write_speculators(drafter: Any, folder: Path, *, target_name: str, architectures: Sequence[str]) -> dict[str, Any]:
    """Write `config.json` and `model.safetensors` into `folder`; returns the configuration."""
    from safetensors.torch import save_file

    values = speculators_config(drafter.config, target_name=target_name, architectures=architectures)
    dtype = str(drafter.dtype).removeprefix("torch.")
    values["dtype"] = values["transformer_layer_config"]["dtype"] = dtype
    folder.mkdir(parents=True)
    save_file(speculators_tensors(drafter), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)  # it was its owner's alone
    return values
