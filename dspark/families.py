"""What differs between model families, in one place: field names of configs, norms, scales, block parts.

`qwen3` is the block for dense targets (Qwen2, Qwen3, Llama, Mistral, SmolLM and kin); `gemma4` has
scaled embeddings, four norms a layer, normalised values, keys as values and an attention scale of 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GEMMA4_MODEL_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")


@dataclass(frozen=True, kw_only=True)
class Family:
    """The parts that one backbone is composed of."""

    name: str
    dspark_architecture: str
    scaled_embedding: bool  # embeddings are multiplied by sqrt(d)
    unit_attention_scale: bool  # otherwise head_dim ** -0.5
    normalised_values: bool  # RMS norm without a weight
    sandwich_norms: bool  # a second norm on the output of attention and of the MLP
    layer_scalar: bool  # each layer's output is multiplied by a stored number


FAMILIES: dict[str, Family] = {
    "qwen3": Family(
        name="qwen3",
        dspark_architecture="Qwen3DSparkModel",
        scaled_embedding=False,
        unit_attention_scale=False,
        normalised_values=False,
        sandwich_norms=False,
        layer_scalar=False,
    ),
    "gemma4": Family(
        name="gemma4",
        dspark_architecture="Gemma4DSparkModel",
        scaled_embedding=True,
        unit_attention_scale=True,
        normalised_values=True,
        sandwich_norms=True,
        layer_scalar=True,
    ),
}


def family_of(model_type: str) -> str:
    """The drafter family for a target's `model_type`."""
    return "gemma4" if model_type in GEMMA4_MODEL_TYPES else "qwen3"


def as_dict(text_config: Any) -> dict[str, Any]:
    """A plain dict of a transformers config (its text part), or of a dict as read from config.json."""
    if isinstance(text_config, Mapping):
        nested = text_config.get("text_config")
        return dict(nested if isinstance(nested, Mapping) else text_config)
    if hasattr(text_config, "get_text_config"):
        text_config = text_config.get_text_config()
    values = dict(text_config.to_dict())
    values["model_type"] = text_config.model_type
    # Newer Gemma-4 configs keep the full-attention layers' sizes behind this accessor only.
    if family_of(text_config.model_type) == "gemma4" and hasattr(text_config, "per_layer_config"):
        full = text_config.per_layer_config["full_attention"]
        values["global_head_dim"] = full.head_dim
        values["num_global_key_value_heads"] = full.num_key_value_heads
    return values


def read_sizes(values: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The fields of `DrafterConfig` that a text config (a target's, or a checkpoint's config.json) determines."""
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    sizes = {
        "vocab_size": values["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": _first(values["intermediate_size"]),
        "num_attention_heads": heads,
        "rms_norm_eps": values.get("rms_norm_eps", 1e-6),
        "attention_bias": bool(values.get("attention_bias", False)),
        "max_position_embeddings": values.get("max_position_embeddings", 131072),
        "final_logit_softcapping": values.get("final_logit_softcapping"),
    }
    if family == "gemma4":
        shared = bool(values.get("attention_k_eq_v", False))
        global_heads = values.get("num_global_key_value_heads") if shared else None
        return sizes | {
            "num_key_value_heads": global_heads or values["num_key_value_heads"],
            "head_dim": values.get("global_head_dim") or values["head_dim"],
            "hidden_act": values.get("hidden_activation") or values.get("hidden_act") or "gelu_pytorch_tanh",
            "attention_k_eq_v": shared,
            "rope_parameters": _rope(values, default_theta=1e6),
        }
    return sizes | {
        "num_key_value_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim") or hidden // heads,
        "hidden_act": values.get("hidden_act", "silu"),
        "attention_k_eq_v": False,
        "rope_parameters": _rope(values, default_theta=1e4),
    }


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) else value


def _rope(values: Mapping[str, Any], *, default_theta: float) -> dict[str, Any]:
    """The rotary settings of the full-attention layers; older configs have `rope_theta` at the top."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    nested = given.get("full_attention")
    rope = dict(nested if isinstance(nested, Mapping) else given)
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    rope["rope_theta"] = rope.get("rope_theta") or values.get("rope_theta") or default_theta
    return rope
