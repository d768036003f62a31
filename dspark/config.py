"""The one configuration of every drafter, and its form in `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Literal

from dspark.families import FAMILIES, as_dict, family_of, read_sizes
from dspark.registry import SettingError as SettingError

Algorithm = Literal["dspark", "dflash", "eagle3"]
MAX_BLOCK_SIZE = 64
MASK_FIRST_ARCHITECTURE = "DFlashDraftModel"
EAGLE3_ARCHITECTURE = "Qwen3Eagle3Model"

# The layers that the paper captures, by the target's number of layers.
_PAPER_LAYER_IDS = {36: (1, 9, 17, 25, 33), 40: (1, 10, 19, 28, 37), 48: (5, 17, 29, 41, 46)}

# What a drafter's config.json takes over from its target's as it stands. Gemma-4's sizes of the sliding layers and
# rotary settings by kind of layer are part of its configuration even where no layer slides.
_TOKENS = ("model_type", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
_OF_THE_TARGET = {
    "qwen3": _TOKENS,
    "gemma4": (*_TOKENS, "rope_parameters", "head_dim", "num_key_value_heads", "sliding_window"),
}
# What readers would otherwise fill in by the target's kind.
_NOT_IN_A_DRAFTER: dict[str, dict[str, Any]] = {
    "qwen3": {"attention_dropout": 0.0, "sliding_window": None, "use_sliding_window": False},
    "gemma4": {
        "attention_dropout": 0.0,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "moe_intermediate_size": None,
        "num_experts": None,
        "num_kv_shared_layers": 0,
        "top_k_experts": None,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": False,
    },
}


def default_layer_ids(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """The paper's layers for 36, 40 and 48 layers; otherwise `count` spread evenly from 1 to num_layers - 3."""
    if count == 5 and num_layers in _PAPER_LAYER_IDS:
        return _PAPER_LAYER_IDS[num_layers]
    first = min(1, num_layers - 2)
    last = max(num_layers - 3, first)
    steps = max(count - 1, 1)
    return tuple(sorted({round(first + index * (last - first) / steps) for index in range(count)}))


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Sizes and parts of a drafter. `block_size` counts the draft tokens of a block, in either layout."""

    algorithm: Algorithm
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    rope_parameters: dict[str, Any] = field(hash=False)
    max_position_embeddings: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    num_draft_layers: int
    block_size: int
    mask_token_id: int | None
    num_anchors: int = 512
    block_layout: Literal["anchor-first", "mask-first"] = "anchor-first"
    markov_rank: int = 0
    markov_head_type: Literal["vanilla", "gated", "rnn"] | None = None
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    draft_vocab_size: int | None = None
    attention_k_eq_v: bool = False
    final_logit_softcapping: float | None = None
    ttt_length: int | None = None
    step_loss_decay: float | None = None

    @property
    def num_features(self) -> int:
        """Width of the captured features, m * d."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def input_slots(self) -> int:
        """Slots fed to the backbone a block; a mask-first block has an anchor slot that predicts nothing."""
        return self.block_size + (self.block_layout == "mask-first")

    @property
    def reserves_markov_column(self) -> bool:
        """Whether the last Markov rank column carries the reduced draft vocabulary; otherwise a `d2t` tensor does."""
        return self.draft_vocab_size is not None and self.markov_rank > 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(int(layer) for layer in self.target_layer_ids))
        if self.markov_rank == 0:
            object.__setattr__(self, "markov_head_type", None)
        if self.algorithm == "dspark" and not (self.markov_rank or self.enable_confidence_head):
            object.__setattr__(self, "algorithm", "dflash")  # which is what a checkpoint without heads says
        if self.algorithm == "eagle3":
            object.__setattr__(self, "mask_token_id", None)
            object.__setattr__(self, "block_layout", "anchor-first")
        _check(self)

    @classmethod
    def for_target(
        cls,
        text_config: Any,
        *,
        mask_token_id: int | None,
        algorithm: Algorithm = "dspark",
        target_layer_ids: tuple[int, ...] | None = None,
        **overrides: Any,
    ) -> DrafterConfig:
        """The paper's settings for a target: 5 draft layers, block 7, vanilla head of rank 256, confidence head.

        `text_config` is the target's config (object or dict); sizes, rotary settings and norm are carried over.
        Raises SettingError for a value that cannot work.
        """
        values = as_dict(text_config)
        family = family_of(values["model_type"])
        if algorithm == "eagle3":
            family = "qwen3"
        num_target_layers = values["num_hidden_layers"]
        settings: dict[str, Any] = read_sizes(values, family) | {
            "num_target_layers": num_target_layers,
            "target_layer_ids": default_layer_ids(num_target_layers) if target_layer_ids is None else target_layer_ids,
            "num_draft_layers": 5,
            "block_size": 7,
        }
        if algorithm == "dspark":
            settings |= {"markov_rank": 256, "markov_head_type": "vanilla"}
            settings |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
        if algorithm == "eagle3":
            settings |= {"num_draft_layers": 1, "ttt_length": 7, "step_loss_decay": 0.8}
        settings |= overrides
        if algorithm == "eagle3":
            settings["block_size"] = settings["ttt_length"]
        if settings.get("markov_rank") == 0 and "confidence_head_with_markov" not in overrides:
            settings["confidence_head_with_markov"] = False
        return cls(algorithm=algorithm, family=family, mask_token_id=mask_token_id, **settings)

    @classmethod
    def from_checkpoint(cls, config_json: Mapping[str, Any]) -> DrafterConfig:
        """Read a published `config.json` (DSpark, DFlash in either layout, EAGLE-3), by its `architectures`."""
        _check_kinds(config_json)
        _check_kinds(config_json.get("dflash_config") or {})
        architecture = str((config_json.get("architectures") or ["none"])[0])
        families = {family.dspark_architecture: family.name for family in FAMILIES.values()}
        if architecture in families:
            return cls(**_read_dspark(config_json, families[architecture]))
        if architecture == MASK_FIRST_ARCHITECTURE:
            return cls(**_read_mask_first(config_json))
        if architecture == EAGLE3_ARCHITECTURE:
            return cls(**_read_eagle3(config_json))
        known = ", ".join([*families, MASK_FIRST_ARCHITECTURE, EAGLE3_ARCHITECTURE])
        raise SettingError(f"config.json names the architecture {architecture!r}; this loader knows {known}")

    def to_checkpoint(self, target_text_config: Any) -> dict[str, Any]:
        """The `config.json` of this drafter: every key that a drafter has, and none that is the target's alone."""
        target = as_dict(target_text_config)
        values = {key: target[key] for key in _OF_THE_TARGET[self.family] if key in target}
        values |= _NOT_IN_A_DRAFTER[self.family]
        values |= {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "attention_bias": self.attention_bias,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "num_hidden_layers": self.num_draft_layers,
            "num_target_layers": self.num_target_layers,
            "target_layer_ids": list(self.target_layer_ids),
            "layer_types": ["full_attention"] * self.num_draft_layers,
            "tie_word_embeddings": False,
        }
        if self.draft_vocab_size is not None:
            values["dspark_draft_vocab_size"] = self.draft_vocab_size
        if self.family == "gemma4":
            values |= {
                "global_head_dim": self.head_dim,
                "num_global_key_value_heads": self.num_key_value_heads,
                "hidden_activation": self.hidden_act,
                "attention_k_eq_v": self.attention_k_eq_v,
                "final_logit_softcapping": self.final_logit_softcapping,
            }
        else:
            values |= {
                "head_dim": self.head_dim,
                "num_key_value_heads": self.num_key_value_heads,
                "hidden_act": self.hidden_act,
                "rope_parameters": dict(self.rope_parameters),
            }
            if self.final_logit_softcapping is not None:
                values["final_logit_softcapping"] = self.final_logit_softcapping
        if self.algorithm == "eagle3":
            return values | {
                "architectures": [EAGLE3_ARCHITECTURE],
                "draft_num_hidden_layers": self.num_draft_layers,
                "ttt_length": self.ttt_length,
                "step_loss_decay": self.step_loss_decay,
            }
        values |= {"mask_token_id": self.mask_token_id, "num_anchors": self.num_anchors}
        values |= {"block_layout": self.block_layout}
        if self.block_layout == "mask-first":
            return values | {
                "architectures": [MASK_FIRST_ARCHITECTURE],
                "block_size": self.input_slots,
                "dflash_config": {
                    "target_layer_ids": list(self.target_layer_ids),
                    "mask_token_id": self.mask_token_id,
                },
            }
        return values | {
            "architectures": [FAMILIES[self.family].dspark_architecture],
            "block_size": self.block_size,
            "markov_rank": self.markov_rank,
            "markov_head_type": self.markov_head_type or "vanilla",
            "enable_confidence_head": self.enable_confidence_head,
            "confidence_head_with_markov": self.confidence_head_with_markov,
        }

    def replace(self, **changes: Any) -> DrafterConfig:
        return replace(self, **changes)


# Of which kind each key of a `config.json` is that decides anything.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "an integer": (
        (int,),
        "vocab_size hidden_size num_attention_heads num_key_value_heads head_dim max_position_embeddings block_size "
        "num_hidden_layers num_target_layers mask_token_id num_anchors markov_rank ttt_length dspark_draft_vocab_size "
        "global_head_dim num_global_key_value_heads",
    ),
    "a number": ((int, float), "rms_norm_eps rope_theta final_logit_softcapping step_loss_decay"),
    "true or false": (
        (bool,),
        "attention_bias attention_k_eq_v enable_confidence_head confidence_head_with_markov",
    ),
    "a text": ((str,), "hidden_act hidden_activation markov_head_type rope_type"),
    "an object": ((dict,), "rope_parameters rope_scaling full_attention dflash_config"),
    "a list": ((list,), "target_layer_ids architectures"),
}
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "max_position_embeddings", "attention_bias", "num_hidden_layers", "num_target_layers"),
)


def _read_common(values: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Sizes, norm and rotary settings: all must be there, since a default would make another drafter of the weights."""
    own = ("global_head_dim", "hidden_activation", "attention_k_eq_v") if family == "gemma4" else ("hidden_act",)
    _require(values, *_SIZES, *own)
    rope = values.get("rope_parameters") or {}
    rope = rope.get("full_attention") or rope
    _check_kinds(rope)
    if (values.get("rope_theta") or rope.get("rope_theta")) is None:
        raise SettingError("config.json lacks rope_parameters with their rope_theta (or, as it was, rope_theta)")
    return read_sizes(as_dict(values), family) | {
        "family": family,
        "num_target_layers": values["num_target_layers"],
        "num_draft_layers": values["num_hidden_layers"],
        "draft_vocab_size": values.get("dspark_draft_vocab_size"),
    }


def _read_dspark(values: Mapping[str, Any], family: str) -> dict[str, Any]:
    keys = ("target_layer_ids", "block_size", "mask_token_id", "markov_rank", "enable_confidence_head")
    _require(values, *keys)
    rank, confidence = values["markov_rank"], values["enable_confidence_head"]
    if rank:
        _require(values, "markov_head_type")
    if confidence:
        _require(values, "confidence_head_with_markov")
    return _read_common(values, family) | {
        "algorithm": "dspark" if rank or confidence else "dflash",
        "target_layer_ids": tuple(values["target_layer_ids"]),
        "block_size": values["block_size"],
        "mask_token_id": values["mask_token_id"],
        "num_anchors": values.get("num_anchors", 512),
        "markov_rank": rank,
        "markov_head_type": values["markov_head_type"] if rank else None,
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": bool(confidence and values["confidence_head_with_markov"]),
    }


def _read_mask_first(values: Mapping[str, Any]) -> dict[str, Any]:
    _require(values, "dflash_config", "block_size")
    inner = values["dflash_config"]
    _require(inner, "target_layer_ids", "mask_token_id")
    return _read_common(values, "qwen3") | {
        "algorithm": "dflash",
        "block_layout": "mask-first",
        "target_layer_ids": tuple(inner["target_layer_ids"]),
        "mask_token_id": inner["mask_token_id"],
        "block_size": values["block_size"] - 1,
        "num_anchors": values.get("num_anchors", 512),
    }


def _read_eagle3(values: Mapping[str, Any]) -> dict[str, Any]:
    _require(values, "target_layer_ids", "ttt_length", "step_loss_decay")
    return _read_common(values, "qwen3") | {
        "algorithm": "eagle3",
        "target_layer_ids": tuple(values["target_layer_ids"]),
        "mask_token_id": None,
        "block_size": values["ttt_length"],
        "ttt_length": values["ttt_length"],
        "step_loss_decay": values["step_loss_decay"],
    }


def _require(values: Mapping[str, Any], *keys: str) -> None:
    if missing := [key for key in keys if values.get(key) is None]:
        raise SettingError(f"config.json lacks {', '.join(missing)}; a checkpoint must write every layout key out")


def _check_kinds(values: Mapping[str, Any]) -> None:
    """Raises SettingError for a value that is not of its key's kind; null counts as missing."""
    for kind, (types, keys) in _KINDS.items():
        for key in keys.split():
            value = values.get(key)
            sound = isinstance(value, types) and isinstance(value, bool) == (bool in types)
            if value is not None and not (sound and (not isinstance(value, float) or isfinite(value))):
                raise SettingError(f"{key} is {str(value)[:80]!r} in config.json; expected {kind}")


def _check(config: DrafterConfig) -> None:
    """Raises SettingError naming the value, the allowed range and the option."""
    c = config
    if c.algorithm not in ("dspark", "dflash", "eagle3"):
        raise _bad("algorithm", c.algorithm, "dspark, dflash or eagle3")
    if c.family not in FAMILIES:
        raise _bad("family", c.family, " or ".join(FAMILIES))
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        _at_least(name, getattr(c, name), 1, "target.model")
    if c.head_dim < 2 or c.head_dim % 2:
        raise _bad("head_dim", c.head_dim, "an even number", "target.model")
    if c.rms_norm_eps <= 0 or not c.rope_parameters["rope_theta"] > 0:
        given = (c.rms_norm_eps, c.rope_parameters["rope_theta"])
        raise _bad("rms_norm_eps, rope_theta", given, "numbers above 0", "target.model")
    if not c.target_layer_ids or len(set(c.target_layer_ids)) != len(c.target_layer_ids):
        raise _bad("target_layer_ids", list(c.target_layer_ids), "one or more distinct layers")
    for layer in c.target_layer_ids:
        if not -1 <= layer <= c.num_target_layers - 2:
            why = " (the last layer says nothing that the final state does not)" * (layer == c.num_target_layers - 1)
            raise _bad(
                "target_layer_ids",
                layer,
                f"-1 (the embedding output) to {c.num_target_layers - 2} for a target of {c.num_target_layers} layers"
                + why,
            )
    turned = c.rope_parameters.get("partial_rotary_factor") or 1.0
    if c.rope_parameters["rope_type"] == "default" and turned != 1.0:
        raise SettingError(
            f"the target turns {turned:g} of each head by position; allowed: 1, whole heads (option `target.model`)"
        )
    if c.num_attention_heads % c.num_key_value_heads:
        raise _bad("num_key_value_heads", c.num_key_value_heads, f"a divisor of {c.num_attention_heads} heads")
    _at_least("num_draft_layers", c.num_draft_layers, 1)
    _at_least("num_anchors", c.num_anchors, 1)
    if not 1 <= c.block_size <= MAX_BLOCK_SIZE:
        raise _bad("block_size", c.block_size, f"1 to {MAX_BLOCK_SIZE}")
    if c.block_layout not in ("anchor-first", "mask-first"):
        raise _bad("block_layout", c.block_layout, "anchor-first or mask-first")
    if c.algorithm == "eagle3":
        if c.num_draft_layers != 1:
            raise _bad("num_draft_layers", c.num_draft_layers, "1 for eagle3")
        if c.ttt_length != c.block_size or c.step_loss_decay is None:
            raise _bad("ttt_length", c.ttt_length, "the block size, with step_loss_decay set")
    elif c.mask_token_id is None or not 0 <= c.mask_token_id < c.vocab_size:
        raise _bad("mask_token_id", c.mask_token_id, f"0 to {c.vocab_size - 1}, a row of the target's embedding")
    _check_heads(c)


def _check_heads(c: DrafterConfig) -> None:
    if c.markov_rank < 0:
        raise _bad("markov_rank", c.markov_rank, "0 (no sequential head) or more")
    if c.markov_rank > 0 and c.markov_head_type not in ("vanilla", "gated", "rnn"):
        raise _bad("markov_head_type", c.markov_head_type, "vanilla, gated or rnn")
    if c.confidence_head_with_markov and c.enable_confidence_head and c.markov_rank == 0:
        raise _bad("confidence_head_with_markov", True, "false while markov_rank is 0 (there is no Markov embedding)")
    if c.algorithm != "dspark" and (c.markov_rank or c.enable_confidence_head):
        raise _bad(
            "markov_rank" if c.markov_rank else "enable_confidence_head",
            c.markov_rank or True,
            f"0 / false for {c.algorithm} (set algorithm to dspark for a sequential or a confidence head)",
        )
    if c.block_layout == "mask-first" and (c.algorithm != "dflash" or c.family != "qwen3"):
        raise _bad("block_layout", c.block_layout, "anchor-first, except for dflash on a qwen3-family target")
    if c.draft_vocab_size is not None:
        if not 1 <= c.draft_vocab_size <= c.vocab_size:
            raise _bad("draft_vocab_size", c.draft_vocab_size, f"1 to {c.vocab_size}")
        if c.markov_rank == 1 or c.markov_head_type in ("gated", "rnn"):
            raise _bad(
                "draft_vocab_size",
                c.draft_vocab_size,
                f"unset with a {c.markov_head_type} head of rank {c.markov_rank}: set markov_head_type to vanilla and "
                "markov_rank to 2 or more (one rank column keeps other tokens out), or markov_rank to 0",
            )


def _at_least(name: str, value: int, least: int, option: str | None = None) -> None:
    if value < least:
        raise _bad(name, value, f"{least} or more", option)


def _bad(name: str, value: Any, allowed: str, option: str | None = None) -> SettingError:
    option = option or f"{'train' if name == 'num_anchors' else 'drafter'}.{name}"
    return SettingError(f"{name} is {value!r}; allowed: {allowed} (option `{option}`)")
