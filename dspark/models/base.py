"""What every drafter is: one class an algorithm, on this base.

A subclass in one file is the whole algorithm: what it is called, its own defaults and loss, what its settings must be,
how it computes states in training and drafts in decoding, where its weights start, and its keys in `config.json`.
`@algorithms.register("name")` above it makes the settings, training, decoding and publishing take it.

B rows, T packed context tokens, N blocks, G draft slots, M new tokens, V vocabulary, Vd draft vocabulary, d hidden,
m captured layers, r Markov rank.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from dspark.config import DrafterConfig, SettingError, bad_setting, check_layer_ids, default_layer_ids
from dspark.families import family_of
from dspark.losses.micro_batch import MicroBatch
from dspark.models.backbone import Rotary, initialise
from dspark.models.draft_cache import DraftCache
from dspark.models.heads import ConfidenceHead, SequentialHead
from dspark.models.kernels import Implementation

if TYPE_CHECKING:
    from dspark.decoding.target import Target

NO_HEADS = {
    "markov_rank": 0,
    "markov_head_type": None,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}  # of a drafter without a sequential and a confidence head

Choose = Callable[[Tensor], Tensor]  # logits [B, Vd] of the next slot -> the token ids [B] drawn from them


class OutputWeights(NamedTuple):
    """The rows that can be drafted, gathered once: row selection in every slot would cost more than the product."""

    head: Tensor  # [Vd, d]
    bias: Tensor | None  # [Vd, r] of the sequential head


def vllm_command(method: str, folder: str, tokens: int) -> dict[str, str]:
    asked = {"method": method, "model": folder, "num_speculative_tokens": tokens}
    return {"vLLM": f"--speculative-config '{json.dumps(asked, ensure_ascii=False)}'"}


class Drafter(nn.Module, ABC):
    """Context projection, layers of the algorithm, frozen embedding and head of the target.

    Parameter names are those of the published layout.
    """

    title: ClassVar[str]  # in reports and model cards
    architectures: ClassVar[Mapping[str, str]]  # its own in `config.json`, and the family that each means
    families: ClassVar[tuple[str, ...]] = ("qwen3",)  # of draft layers; the first serves every other target
    settings: ClassVar[Mapping[str, Any]] = {}  # the section `drafter` where a settings file leaves it open
    loss: ClassVar[Mapping[str, float]] = {}  # the section `train.loss`, likewise
    fixed: ClassVar[Mapping[str, Any]] = NO_HEADS  # what is so whatever the settings say: parts that it does not have
    options: ClassVar[Mapping[str, Any]] = {}  # settings of its own (`drafter.options`), with their defaults
    block_layouts: ClassVar[tuple[str, ...]] = ("anchor-first",)
    needs_mask_token: ClassVar[bool] = True
    reads_components: ClassVar[bool] = True  # of the hidden states, in their place: a projected cache serves it
    takes_context_residual: ClassVar[bool] = False  # whether `drafter.context_residual` may be set
    first_anchor: ClassVar[int] = 0  # the first position of a sequence at which a block may start

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.markov_head: SequentialHead | None = None
        self.confidence_head: ConfidenceHead | None = None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.fc: Any = nn.Linear(config.hidden_states_size, config.hidden_size, bias=False)
        self.layers: Any  # and the final norm: an algorithm's own
        self.norm: Any
        self.rotary = Rotary(config)
        self.attention: Implementation = "auto"
        self.gradient_checkpointing = False  # keep only what the layers are fed, and compute the rest again
        self.draft_token_ids: Tensor | None
        self.register_buffer("draft_token_ids", None, persistent=False)  # [Vd] ascending; None drafts all of V
        self.embed_tokens.requires_grad_(False)
        self.lm_head.requires_grad_(False)

    # What the algorithm asks of its settings, and how it stands in `config.json`

    @classmethod
    def name_for(cls, config: DrafterConfig) -> str:
        """The registered name of what these settings make."""
        return config.algorithm

    @classmethod
    def family_for(cls, model_type: str) -> str:
        """The family of draft layers for a target's `model_type`."""
        family = family_of(model_type)
        return family if family in cls.families else cls.families[0]

    @classmethod
    def default_layer_ids(cls, num_target_layers: int) -> tuple[int, ...]:
        """The layers of the target that it reads where the settings leave them open."""
        return default_layer_ids(num_target_layers)

    @classmethod
    def check_layer_ids(cls, layer_ids: Collection[int], num_target_layers: int) -> None:
        """Raises SettingError for layers that it cannot read."""
        check_layer_ids(layer_ids, num_target_layers)

    @classmethod
    def check(cls, config: DrafterConfig) -> None:
        """Raises SettingError for settings that cannot work, beyond what holds for every drafter (`dspark.config`)."""
        for name, value in cls.fixed.items():
            if getattr(config, name) != value:
                raise bad_setting(name, getattr(config, name), f"{value or 0} for {config.algorithm}")

    @classmethod
    def architecture(cls, config: DrafterConfig) -> str:
        """What `config.json` calls it."""
        return next(name for name, family in cls.architectures.items() if family == config.family)

    @classmethod
    def layout(cls, config: DrafterConfig) -> dict[str, Any]:
        """The keys of `config.json` that say what the algorithm is and how it drafts."""
        mask = {"mask_token_id": config.mask_token_id} if cls.needs_mask_token else {}
        return mask | {
            "architectures": [cls.architecture(config)],
            "block_size": config.block_size,
            "block_layout": config.block_layout,
            "num_anchors": config.num_anchors,
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head_type or "vanilla",
            "enable_confidence_head": config.enable_confidence_head,
            "confidence_head_with_markov": config.confidence_head_with_markov,
        }

    @classmethod
    def read_layout(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of DrafterConfig in what `layout` gave. A KeyError names a key that is missing."""
        rank, confidence = values["markov_rank"], values["enable_confidence_head"]
        return {
            "target_layer_ids": values["target_layer_ids"],
            "block_size": values["block_size"],
            "mask_token_id": values["mask_token_id"] if cls.needs_mask_token else None,
            "num_anchors": values.get("num_anchors", 512),
            "markov_rank": rank,
            "markov_head_type": values["markov_head_type"] if rank else None,
            "enable_confidence_head": confidence,
            "confidence_head_with_markov": bool(confidence and values["confidence_head_with_markov"]),
        }

    # Who can serve a published folder

    @classmethod
    def describe(cls, config: DrafterConfig) -> str:
        """How it drafts, for the model card."""
        return "Layout: anchor first"

    @classmethod
    def engine_notes(cls, config: DrafterConfig, *, speculators: bool) -> list[str]:
        """A line for each thing to know about engines; `speculators`: that layout is published too."""
        return [f"Evaluation only: no engine knows a {cls.title} drafter."]

    @classmethod
    def commands(cls, config: DrafterConfig, *, speculators: bool, temperatures: bool) -> dict[str, str]:
        """The arguments that start each engine with this folder (…). `temperatures`: a table for SGLang is there."""
        return {}

    @classmethod
    def speculators_layout(cls, config: DrafterConfig, layer_ids: list[int]) -> dict[str, Any] | None:
        """Its keys in the layout of `speculators` 0.9.0, which counts layers as `layer_ids`; None where it has none."""
        return None

    # Training

    @abstractmethod
    def block_states(self, batch: MicroBatch) -> Tensor:
        """Post-`norm` states [N, G, d] of all packed blocks; slot k is for the token at anchor + k + 1."""

    def forward(self, batch: MicroBatch) -> Tensor:
        """`block_states`: DeepSpeed and its like wrap `forward`."""
        return self.block_states(batch)

    # Drafting

    def new_cache(self, rows: int, capacity: int = 256) -> DraftCache:
        """An empty cache of context keys and values for `rows` requests."""
        config = self.config
        return DraftCache(
            layers=config.num_draft_layers,
            rows=rows,
            key_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=self.dtype,
            device=self.device,
            capacity=capacity,
        )

    @abstractmethod
    def write_context(
        self, cache: DraftCache, hidden_states: Tensor, token_rows: Tensor, positions: Tensor, next_ids: Tensor
    ) -> None:
        """Take in packed context tokens: the target's hidden_states [M, m*d] at cache rows token_rows [M], positions
        [M] ascending within a row.

        next_ids [M] are the tokens one to the right; a row's last one is the coming anchor.
        """

    @abstractmethod
    def draft(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        cache: DraftCache,
        slots: int,
        choose: Choose,
        weights: OutputWeights,
    ) -> Tensor | None:
        """Draft `slots` tokens after the anchors [B] at anchor_positions [B], for cache rows 0 to B-1.

        `choose` is called once a slot, in order. Gives the confidence logits [B, slots]; None without that head.
        """

    # Context and heads

    def project_context(self, hidden_states: Tensor) -> Tensor:
        """fc(hidden_states): [..., m*d] to [..., d].

        Raises SettingError when their width is not that of the configured layers.
        """
        if hidden_states.shape[-1] != self.fc.in_features:
            size, layers = self.config.hidden_size, len(self.config.target_layer_ids)
            raise SettingError(
                f"the hidden states are {hidden_states.shape[-1]} wide; this drafter reads {layers} layers of hidden "
                f"size {size}, {self.fc.in_features} values together (option `drafter.target_layer_ids`)"
            )
        projected: Tensor = self.fc(hidden_states.to(self.dtype))
        return projected

    def base_logits(self, states: Tensor, weight: Tensor | None = None) -> Tensor:
        """Head and soft cap, before a sequential bias: states [..., d] to [..., V], or to the rows of `weight`."""
        logits = nn.functional.linear(states, self.lm_head.weight if weight is None else weight)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def confidence_logits(self, states: Tensor, previous_ids: Tensor) -> Tensor | None:
        """Logits [..., G] of acceptance from states [..., G, d] and previous_ids [..., G]; None without the head."""
        if self.confidence_head is None:
            return None
        embedded = None
        if self.confidence_head.with_markov:
            assert self.markov_head is not None
            embedded = self.markov_head.embed(previous_ids)
        return self.confidence_head(states, embedded)

    def output_weights(self) -> OutputWeights:
        """The head's rows, and the sequential head's, of the tokens that can be drafted."""
        ids, head = self.draft_token_ids, self.lm_head.weight
        bias = None if self.markov_head is None else self.markov_head.markov_w2.weight
        if ids is None:
            return OutputWeights(head, bias)
        return OutputWeights(head[ids], None if bias is None else bias[ids])

    @property
    def sequential_head(self) -> SequentialHead | None:
        return self.markov_head

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def block_size(self) -> int:
        """Draft tokens a round, G."""
        return self.config.block_size

    # Weights

    def initialise_random(self, seed: int = 0) -> None:
        """Normal weights, standard deviation 0.02; a sequential head starts without an effect. Global state is kept."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name, module in self.named_children():
                if name not in ("embed_tokens", "lm_head"):
                    initialise(module)
            if self.markov_head is not None:
                nn.init.zeros_(self.markov_head.markov_w2.weight)

    @torch.no_grad()
    def start_from_target(self, target: Target) -> list[int]:
        """Begin with weights of the target's own; gives the ids of the layers that they come from.

        Here fc is the identity on the last captured layer and the final norm the target's; an algorithm adds to it what
        its layers can take.
        """
        size, layer_ids = self.config.hidden_size, self.config.target_layer_ids
        last = layer_ids.index(max(layer_ids))
        self.fc.weight.zero_()
        self.fc.weight[:, last * size : (last + 1) * size].fill_diagonal_(1.0)
        self.norm.weight.copy_(target.final_norm.weight.to(self.norm.weight))
        return []

    def share_target(self, embedding: Tensor, head: Tensor) -> None:
        """Take the target's embedding and head [V, d], frozen, without a copy where dtype and device agree.

        Raises SettingError for other shapes.
        """
        shape = (self.config.vocab_size, self.config.hidden_size)
        if tuple(embedding.shape) != shape or tuple(head.shape) != shape:
            raise SettingError(
                f"the target's embedding is {tuple(embedding.shape)} and its head {tuple(head.shape)}; "
                f"the drafter is configured for {shape} (option `target.model`)"
            )
        for module, weight in ((self.embed_tokens, embedding), (self.lm_head, head)):
            module.weight = nn.Parameter(weight.detach().to(self.device, self.dtype), requires_grad=False)

    def restrict_vocabulary(self, token_ids: Tensor) -> None:
        """Draft only `token_ids` [Vd], which must be as many as `draft_vocab_size` says.

        The checkpoint carries them in the last Markov rank column, or as `d2t` and `t2d` without a sequential head.
        """
        token_ids = torch.unique(token_ids.long())
        if len(token_ids) != self.config.draft_vocab_size:
            raise SettingError(
                f"{len(token_ids)} draft tokens given, draft_vocab_size is {self.config.draft_vocab_size} "
                "(option `drafter.draft_vocab_size`)"
            )
        self.draft_token_ids = token_ids.to(self.device)
        if self.markov_head is not None:
            self.markov_head.reserve_column(self.draft_token_ids)
