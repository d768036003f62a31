"""What differs between model families, in one place: an entry of FAMILIES is a family.

`qwen3` is the block for dense targets (Qwen2, Qwen3, Llama, Mistral, SmolLM and kin); `gemma4` has
scaled embeddings, four norms a layer, normalised values, keys as values and an attention scale of 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark.errors import DsparkError


@dataclass(frozen=True, kw_only=True)
class Family:
    """The parts that one backbone is composed of, and where a text config keeps their sizes."""

    dspark_architecture: str
    model_types: tuple[str, ...] = ()  # of the targets that are read this way; qwen3 takes all others
    scaled_embedding: bool = False  # embeddings are multiplied by sqrt(d)
    unit_attention_scale: bool = False  # otherwise head_dim ** -0.5
    normalised_values: bool = False  # RMS norm without a weight
    sandwich_norms: bool = False  # a second norm on the output of attention and of the MLP
    layer_scalar: bool = False  # each layer's output is multiplied by a stored number
    keys_as_values: bool = False  # where the config says `attention_k_eq_v`
    rope_by_layer_type: bool = False  # rotary settings of the full-attention layers stand under `full_attention`
    head_dim: str = "head_dim"  # the config's name for the size of a full-attention head
    key_heads: str = "num_key_value_heads"  # and for their number, where keys are values or it is the usual name
    activation: str = "hidden_act"
    default_activation: str = "silu"
    default_theta: float = 1e4
    of_the_target: tuple[str, ...] = ()  # what a drafter's config.json takes over from its target's as it stands
    not_in_a_drafter: Mapping[str, Any]  # what readers would otherwise fill in by the target's kind


FAMILIES: dict[str, Family] = {
    "qwen3": Family(
        dspark_architecture="Qwen3DSparkModel",
        not_in_a_drafter={"attention_dropout": 0.0, "sliding_window": None, "use_sliding_window": False},
    ),
    "gemma4": Family(
        dspark_architecture="Gemma4DSparkModel",
        model_types=("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
        scaled_embedding=True,
        unit_attention_scale=True,
        normalised_values=True,
        sandwich_norms=True,
        layer_scalar=True,
        keys_as_values=True,
        rope_by_layer_type=True,
        head_dim="global_head_dim",
        key_heads="num_global_key_value_heads",
        activation="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        default_theta=1e6,
        # Sizes of the sliding layers and rotary settings by kind of layer, which it has even where no layer slides.
        of_the_target=("rope_parameters", "head_dim", "num_key_value_heads", "sliding_window"),
        not_in_a_drafter={
            "attention_dropout": 0.0,
            "final_logit_softcapping": None,
            "enable_moe_block": False,
            "hidden_size_per_layer_input": 0,
            "moe_intermediate_size": None,
            "num_experts": None,
            "num_kv_shared_layers": 0,
            "top_k_experts": None,
            "use_bidirectional_attention": None,
            "use_double_wide_mlp": False,
        },
    ),
}

# A token that never stands in text, by the target's `model_type`: the paper's choice.
MASK_TOKEN_IDS = {"qwen3": 151669, **dict.fromkeys(FAMILIES["gemma4"].model_types, 4)}


def family_of(model_type: str) -> str:
    """The drafter family for a target's `model_type`."""
    return next((name for name, family in FAMILIES.items() if model_type in family.model_types), "qwen3")


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
    family = FAMILIES[family_of(text_config.model_type)]
    if family.rope_by_layer_type and hasattr(text_config, "per_layer_config"):
        full = text_config.per_layer_config["full_attention"]
        values[family.head_dim] = full.head_dim
        values[family.key_heads] = full.num_key_value_heads
    return values


def read_sizes(values: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The fields of `DrafterConfig` that a text config (a target's, or a checkpoint's config.json) determines."""
    of = FAMILIES[family]
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    keys_as_values = of.keys_as_values and bool(values.get("attention_k_eq_v", False))
    global_key_heads = values.get(of.key_heads) if keys_as_values else None
    return {
        "vocab_size": values["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": _first(values["intermediate_size"]),
        "num_attention_heads": heads,
        "num_key_value_heads": global_key_heads or values.get("num_key_value_heads") or heads,
        "head_dim": values.get(of.head_dim) or values.get("head_dim") or hidden // heads,
        "hidden_act": values.get(of.activation) or values.get("hidden_act") or of.default_activation,
        "rms_norm_eps": values.get("rms_norm_eps") or 1e-6,
        "attention_bias": bool(values.get("attention_bias", False)),
        "attention_k_eq_v": keys_as_values,
        "rope_parameters": _rope(values, default_theta=of.default_theta),
        "max_position_embeddings": values.get("max_position_embeddings") or 131072,
        "final_logit_softcapping": values.get("final_logit_softcapping"),
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


def by_architecture(families: Mapping[str, Family]) -> dict[str, str]:
    """Family names by the architecture that a checkpoint of theirs names. Raises DsparkError for one that two share."""
    found: dict[str, str] = {}
    for name, family in families.items():
        if (other := found.setdefault(family.dspark_architecture, name)) != name:
            raise DsparkError(
                f"the families {other} and {name} share the architecture {family.dspark_architecture}: a checkpoint "
                "could not tell them apart; give one of them a name of its own"
            )
    return found


def with_residual(architecture: str) -> str:
    """What a checkpoint with the context residual names: engines do not know it, and so refuse it."""
    return architecture.removesuffix("Model") + "ContextResidualModel"
