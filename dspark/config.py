"""The one configuration of every drafter, and its form in `config.json`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, Literal

from dspark.families import FAMILIES, as_dict, read_sizes
from dspark.registry import SettingError as SettingError
from dspark.registry import algorithms, sequential_heads

MAX_BLOCK_SIZE = 64

# The layers that the paper captures, by the target's number of layers.
_PAPER_LAYER_IDS = {36: (1, 9, 17, 25, 33), 40: (1, 10, 19, 28, 37), 48: (5, 17, 29, 41, 46)}

# What every drafter's config.json takes over from its target's as it stands; a family may take more.
_TOKENS = ("model_type", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
# What a config.json must say: a default would make another drafter of the weights.
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "max_position_embeddings", "attention_bias", "num_hidden_layers", "num_target_layers"),
)
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
        "attention_bias attention_k_eq_v enable_confidence_head confidence_head_with_markov context_residual",
    ),
    "a text": ((str,), "hidden_act hidden_activation markov_head_type rope_type"),
    "an object": ((dict,), "rope_parameters rope_scaling full_attention dflash_config dspark_options"),
    "a list": ((list,), "target_layer_ids architectures"),
}


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """The paper's layers for 36, 40 and 48 layers; otherwise five spread evenly from 1 to num_layers - 3."""
    if num_layers in _PAPER_LAYER_IDS:
        return _PAPER_LAYER_IDS[num_layers]
    first = min(1, num_layers - 2)
    last = max(num_layers - 3, first)
    return tuple(sorted({round(first + index * (last - first) / 4) for index in range(5)}))


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Sizes and parts of a drafter; the defaults of the parts are the paper's DSpark.

    `block_size` counts the draft tokens of a round, in either layout and for EAGLE-3's steps. `options` are settings of
    an algorithm's own.
    """

    algorithm: str = "dspark"
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
    num_draft_layers: int = 5
    block_size: int = 7
    mask_token_id: int | None
    num_anchors: int = field(default=512, compare=False)  # of its training
    block_layout: Literal["anchor-first", "mask-first"] = "anchor-first"
    markov_rank: int = 256
    markov_head_type: str | None = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    context_residual: bool = False  # slots start from the projected state before the anchor as well
    draft_vocab_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    position_decay: float | None = field(
        default=None, compare=False
    )  # of the loss that it was trained with, where the checkpoint says it
    attention_k_eq_v: bool = False
    final_logit_softcapping: float | None = None

    @property
    def hidden_states_size(self) -> int:
        """Width of the target's captured hidden states, m * d."""
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
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("target_layer_ids", tuple(int(layer) for layer in self.target_layer_ids))
        if self.markov_rank == 0:
            put("markov_head_type", None)
        if not self.enable_confidence_head:
            put("confidence_head_with_markov", False)
        put("algorithm", algorithms[self.algorithm].name_for(self))
        drafter = algorithms[self.algorithm]
        put("options", {**drafter.options, **self.options})
        if not drafter.needs_mask_token:
            put("mask_token_id", None)
        _check(self)

    @classmethod
    def for_target(
        cls,
        text_config: Any,
        *,
        mask_token_id: int | None,
        algorithm: str = "dspark",
        target_layer_ids: tuple[int, ...] | None = None,
        **overrides: Any,
    ) -> DrafterConfig:
        """The algorithm's own settings for a target; for DSpark the paper's.

        `text_config` is the target's config (object or dict); sizes, rotary settings and norm are carried over.
        Raises SettingError for a value that cannot work.
        """
        values = as_dict(text_config)
        drafter = algorithms[algorithm]
        family = drafter.family_for(values["model_type"])
        needed = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
        if missing := [key for key in needed if not values.get(key)]:
            raise SettingError(
                f"the target's config ({values['model_type']}) has no {', '.join(missing)}, from which draft layers "
                "take their sizes (option `target.model`)"
            )
        num_target_layers = values["num_hidden_layers"]
        known = {one.name for one in fields(cls)}
        settings: dict[str, Any] = read_sizes(values, family) | {
            "num_target_layers": num_target_layers,
            "target_layer_ids": (
                drafter.default_layer_ids(num_target_layers) if target_layer_ids is None else target_layer_ids
            ),
        }
        settings |= {name: value for name, value in drafter.settings.items() if name in known}
        settings |= {**drafter.fixed, **overrides}
        if settings.get("markov_rank") == 0 and "confidence_head_with_markov" not in overrides:
            settings["confidence_head_with_markov"] = False
        return cls(algorithm=algorithm, family=family, mask_token_id=mask_token_id, **settings)

    @classmethod
    def from_checkpoint(cls, config_json: Mapping[str, Any]) -> DrafterConfig:
        """Read a published `config.json` by its `architectures`. Raises SettingError for one that no algorithm has."""
        _check_kinds(config_json)
        _check_kinds(config_json.get("dflash_config") or {})
        architecture = str((config_json.get("architectures") or ["none"])[0])
        owners = {name: algorithm for algorithm in algorithms for name in algorithms[algorithm].architectures}
        if architecture not in owners:
            raise SettingError(
                f"config.json names the architecture {architecture!r}; this loader knows {', '.join(owners)} (import "
                "the file of a drafter of your own first)"
            )
        drafter = algorithms[owners[architecture]]
        family = drafter.architectures[architecture]
        _require_sizes(config_json, family)
        try:
            layout = drafter.read_layout(_present(config_json))
        except KeyError as missing:
            raise _lacks(str(missing.args[0])) from None
        return cls(
            **read_sizes(as_dict(config_json), family)
            | {
                "algorithm": owners[architecture],
                "family": family,
                "num_target_layers": config_json["num_target_layers"],
                "num_draft_layers": config_json["num_hidden_layers"],
                "draft_vocab_size": config_json.get("dspark_draft_vocab_size"),
                "options": config_json.get("dspark_options") or {},
                **drafter.fixed,
                **layout,
            }
        )

    def to_checkpoint(self, target_text_config: Any) -> dict[str, Any]:
        """The `config.json` of this drafter: every key that a drafter has, and none that is the target's alone."""
        target, family = as_dict(target_text_config), FAMILIES[self.family]
        values = {key: target[key] for key in (*_TOKENS, *family.of_the_target) if key in target}
        values |= family.not_in_a_drafter
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
        if self.options:
            values["dspark_options"] = self.options
        values |= {
            family.head_dim: self.head_dim,
            family.key_heads: self.num_key_value_heads,
            family.activation: self.hidden_act,
        }
        if family.keys_as_values:
            values["attention_k_eq_v"] = self.attention_k_eq_v
        if not family.rope_by_layer_type:
            values["rope_parameters"] = dict(self.rope_parameters)
        if self.final_logit_softcapping is not None:
            values["final_logit_softcapping"] = self.final_logit_softcapping
        return values | algorithms[self.algorithm].layout(self)


def bad_setting(name: str, value: Any, allowed: str, option: str | None = None) -> SettingError:
    option = option or f"{'train' if name == 'num_anchors' else 'drafter'}.{name}"
    return SettingError(f"{name} is {value!r}; allowed: {allowed} (option `{option}`)")


def _lacks(names: str) -> SettingError:
    return SettingError(f"config.json lacks {names}; a checkpoint must write every layout key out")


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is null, which counts as missing."""
    shown = {key: _present(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    return {key: value for key, value in shown.items() if value is not None}


def _require_sizes(values: Mapping[str, Any], family: str) -> None:
    """Raises SettingError unless a `config.json` says every size, the norm's epsilon and the rotary settings."""
    of = FAMILIES[family]
    required = (*_SIZES, of.head_dim, of.activation, *(("attention_k_eq_v",) if of.keys_as_values else ()))
    if missing := [key for key in dict.fromkeys(required) if values.get(key) is None]:
        raise _lacks(", ".join(missing))
    rope = values.get("rope_parameters") or {}
    rope = rope.get("full_attention") or rope
    _check_kinds(rope)
    if (values.get("rope_theta") or rope.get("rope_theta")) is None:
        raise SettingError("config.json lacks rope_parameters with their rope_theta (or, as it was, rope_theta)")


def _check_kinds(values: Mapping[str, Any]) -> None:
    """Raises SettingError for a value that is not of its key's kind; null counts as missing."""
    for kind, (types, keys) in _KINDS.items():
        for key in keys.split():
            value = values.get(key)
            sound = isinstance(value, types) and isinstance(value, bool) == (bool in types)
            if value is not None and not (sound and (not isinstance(value, float) or isfinite(value))):
                raise SettingError(f"{key} is {str(value)[:80]!r} in config.json; expected {kind}")


def check_layer_ids(layer_ids: Collection[int], num_target_layers: int) -> None:
    """Raises SettingError unless they are distinct layers below the last; -1 is the embedding's output."""
    if not layer_ids or len(set(layer_ids)) != len(layer_ids):
        raise bad_setting("target_layer_ids", list(layer_ids), "one or more distinct layers")
    for layer in layer_ids:
        if not -1 <= layer <= num_target_layers - 2:
            why = " (the last layer says nothing that the final state does not)" * (layer == num_target_layers - 1)
            raise bad_setting(
                "target_layer_ids",
                layer,
                f"-1 (the embedding output) to {num_target_layers - 2} for a target of {num_target_layers} layers{why}",
            )


def check_heads(c: Any) -> None:
    """Raises SettingError for sequential and confidence heads that cannot work; `c` has the fields of a drafter."""
    if c.markov_rank < 0:
        raise bad_setting("markov_rank", c.markov_rank, "0 (no sequential head) or more")
    if c.confidence_head_with_markov and c.enable_confidence_head and c.markov_rank == 0:
        raise bad_setting(
            "confidence_head_with_markov",
            True,
            "false while markov_rank is 0, since it needs a Markov embedding: set "
            "drafter.confidence_head_with_markov=false or drafter.markov_rank to 1 or more",
        )
    if c.markov_rank == 0:
        return
    head = sequential_heads[c.markov_head_type]
    if c.draft_vocab_size is not None and (c.markov_rank == 1 or not head.reserves_column):
        raise bad_setting(
            "draft_vocab_size",
            c.draft_vocab_size,
            f"unset with a {c.markov_head_type} head of rank {c.markov_rank}: set markov_head_type to vanilla and "
            "markov_rank to 2 or more (one rank column keeps other tokens out), or markov_rank to 0",
        )


def _check(c: DrafterConfig) -> None:
    """Raises SettingError naming the value, the allowed range and the option."""
    drafter = algorithms[c.algorithm]
    if c.family not in FAMILIES:
        raise bad_setting("family", c.family, " or ".join(FAMILIES))
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        if getattr(c, name) < 1:
            raise bad_setting(name, getattr(c, name), "1 or more", "target.model")
    if c.head_dim < 2 or c.head_dim % 2:
        raise bad_setting("head_dim", c.head_dim, "an even number", "target.model")
    if c.rms_norm_eps <= 0 or not c.rope_parameters["rope_theta"] > 0:
        given = (c.rms_norm_eps, c.rope_parameters["rope_theta"])
        raise bad_setting("rms_norm_eps, rope_theta", given, "numbers above 0", "target.model")
    drafter.check_layer_ids(c.target_layer_ids, c.num_target_layers)
    turned = c.rope_parameters.get("partial_rotary_factor") or 1.0
    if c.rope_parameters["rope_type"] == "default" and turned != 1.0:
        raise SettingError(
            f"the target turns {turned:g} of each head by position; allowed: 1, whole heads (option `target.model`)"
        )
    if c.num_attention_heads % c.num_key_value_heads:
        raise bad_setting("num_key_value_heads", c.num_key_value_heads, f"a divisor of {c.num_attention_heads} heads")
    for option in ("num_draft_layers", "num_anchors"):
        if getattr(c, option) < 1:
            raise bad_setting(option, getattr(c, option), "1 or more")
    if not 1 <= c.block_size <= MAX_BLOCK_SIZE:
        raise bad_setting("block_size", c.block_size, f"1 to {MAX_BLOCK_SIZE}")
    if c.block_layout not in drafter.block_layouts:
        raise bad_setting("block_layout", c.block_layout, f"{' or '.join(drafter.block_layouts)} for {c.algorithm}")
    if c.context_residual and not drafter.takes_context_residual:
        raise bad_setting("context_residual", True, f"false for {c.algorithm}")
    if drafter.needs_mask_token and (c.mask_token_id is None or not 0 <= c.mask_token_id < c.vocab_size):
        raise bad_setting("mask_token_id", c.mask_token_id, f"0 to {c.vocab_size - 1}, a row of the target's embedding")
    if c.draft_vocab_size is not None and not 1 <= c.draft_vocab_size <= c.vocab_size:
        raise bad_setting("draft_vocab_size", c.draft_vocab_size, f"1 to {c.vocab_size}")
    if unknown := sorted(set(c.options) - set(drafter.options)):
        raise bad_setting("options", unknown[0], f"of {c.algorithm}: {', '.join(drafter.options) or 'none'}")
    check_heads(c)
    drafter.check(c)
