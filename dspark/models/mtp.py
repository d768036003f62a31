"""MTP-1: one next-token module on the target's last hidden state, as DeepSeek-V3 trains it beside its target.

B rows, N blocks of G steps, V vocabulary, d hidden, L layers of the target.

With h_t the target's last hidden state (after its final norm) and x_{t+1} the token that follows,

    h' = Block(M [RMSNorm(emb(x_{t+1})); RMSNorm(h_t)]),   logits of x_{t+2} = head(RMSNorm(h')),

M [d, 2d], embedding and head the target's (section 2.2 of arXiv 2412.19437; the order within M's input is that of its
published code). With more than one draft token a round the module is applied again to its own h' and the drafted token,
with the same weights, as FastMTP does (arXiv 2509.18362), and step k weighs 0.6^(k-1).

That is EAGLE-3's unrolled course, whose blocks, cache and rounds are taken from there, with another layer around it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from dspark.config import DrafterConfig, SettingError, bad_setting
from dspark.models.backbone import DraftLayer, RMSNorm
from dspark.models.eagle3 import Eagle3
from dspark.models.starting_weights import copy_layer, scale_projections, source_layers
from dspark.registry import algorithms

if TYPE_CHECKING:
    from dspark.decoding.target import Target


@algorithms.register("mtp")
class Mtp(Eagle3):
    """`fc` is M; the other parameters have the names of Qwen3-Next's module.

    The id L of `target_layer_ids`, one above the last layer's, is the last hidden state.
    """

    title = "MTP"
    architectures: ClassVar[Mapping[str, str]] = {"Qwen3MtpModel": "qwen3"}
    settings: ClassVar[Mapping[str, Any]] = {"num_draft_layers": 1, "block_size": 1}
    loss: ClassVar[Mapping[str, float]] = {"ce": 1.0, "l1": 0.0, "position_decay": -1 / math.log(0.6)}
    reads_components = False

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = RMSNorm(size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(size, config.rms_norm_eps)

    @classmethod
    def make_layer(cls, config: DrafterConfig) -> nn.Module:
        return DraftLayer(config)

    @classmethod
    def default_layer_ids(cls, num_target_layers: int) -> tuple[int, ...]:
        return (num_target_layers,)

    @classmethod
    def check_layer_ids(cls, layer_ids: Collection[int], num_target_layers: int) -> None:
        if tuple(layer_ids) != (num_target_layers,):
            allowed = f"null or [{num_target_layers}] for mtp, which reads the last hidden state alone"
            raise bad_setting("target_layer_ids", list(layer_ids), allowed)

    @classmethod
    def describe(cls, config: DrafterConfig) -> str:
        again = ", again on its own output for each further token" * (config.block_size > 1)
        return f"A next-token module on the target's last hidden state{again}"

    @classmethod
    def engine_notes(cls, config: DrafterConfig, *, speculators: bool) -> list[str]:
        return [
            "Evaluation only: vLLM and SGLang load such a module only as a part of a target that was made with one "
            "(DeepSeek-V3, MiMo, Qwen3-Next), and their EAGLE has no norms before its projection."
        ]

    @classmethod
    def commands(cls, config: DrafterConfig, *, speculators: bool, temperatures: bool) -> dict[str, str]:
        return {}

    @classmethod
    def speculators_layout(cls, config: DrafterConfig, layer_ids: list[int]) -> None:
        return None

    def project_context(self, hidden_states: Tensor) -> Tensor:
        """The last hidden states [..., d] as they are. Raises SettingError for another width."""
        if hidden_states.shape[-1] != self.config.hidden_size:
            raise SettingError(
                f"the hidden states are {hidden_states.shape[-1]} wide; this drafter reads the last hidden state, "
                f"{self.config.hidden_size} values (option `drafter.target_layer_ids`, which null leaves to it)"
            )
        return hidden_states.to(self.dtype)

    def joined(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        merged = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(state)], dim=-1))
        return self.layer.input_layernorm(merged), merged

    @torch.no_grad()
    def start_from_target(self, target: Target) -> list[int]:
        """The layer as the target's top layer, on the state before the target's final norm.

        The state's half of M is the identity, after a norm that undoes the weights of the target's final norm; the
        embedding's half stays random. The final norm is the target's.
        """
        sources = source_layers(self, target)
        copy_layer(self.layer, target.layers[sources[0]])
        final = target.final_norm.weight
        self.norm.weight.copy_(final.to(self.norm.weight))
        undone = torch.where(final.abs() < 1e-3, torch.ones_like(final), 1 / final)
        self.pre_fc_norm_hidden.weight.copy_(undone.to(self.norm.weight))
        self.fc.weight[:, self.config.hidden_size :].zero_().fill_diagonal_(1.0)
        scale_projections(self.layers, target, sources)
        return sources
