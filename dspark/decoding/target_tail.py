"""The target's layers above its last captured one: from that layer's outputs to last states.

S sequence, d hidden size. A teacher that is recomputed instead of stored needs them (and nothing below) in training.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dspark.decoding.target import Target, TargetError


class TargetTail:
    """Holds references to the target's upper layers and final norm; pickles without the rest of the target."""

    def __init__(self, target: Target) -> None:
        """Raises TargetError when the layers above do not reproduce the target's own last states."""
        decoder = target.decoder
        self.first_layer = max(target.layer_ids) + 1
        tail: Any = copy.copy(decoder)
        tail._modules = {**decoder._modules, "embed_tokens": None}
        tail.layers = nn.ModuleList(target.layers[self.first_layer :])
        tail.config = copy.deepcopy(decoder.config)
        tail.config.num_hidden_layers = len(tail.layers)
        if getattr(tail.config, "layer_types", None):
            tail.config.layer_types = tail.config.layer_types[self.first_layer :]
        self._decoder = tail
        self._dtype, self._device = target.dtype, target.device
        self._check(target)

    @torch.no_grad()
    def __call__(self, states: Tensor) -> Tensor:
        """Outputs of the last captured layer of one sequence from its first token on, [S, d], to last states [S, d].

        Where the last hidden state is what was captured there is nothing to compute.
        """
        if not len(self._decoder.layers):
            return states
        inputs = states.to(self._device, self._dtype)[None]
        return self._decoder(inputs_embeds=inputs, use_cache=False).last_hidden_state[0].to(states.device)

    def __getstate__(self) -> dict[str, Any]:
        # A deep copy without hooks: those of the target's layers belong to the target.
        decoder = copy.copy(self._decoder)
        decoder._modules = {**self._decoder._modules, "layers": nn.ModuleList(map(_bare, self._decoder.layers))}
        return {**self.__dict__, "_decoder": decoder}

    def _check(self, target: Target) -> None:
        ids = (torch.arange(16) * 7919 % min(target.vocab_size, 30000))[None]
        captured = target.capture(ids)
        place = target.layer_ids.index(self.first_layer - 1) * target.hidden_size
        try:
            again = self(captured.hidden_states[0, :, place : place + target.hidden_size])
        except (TypeError, AttributeError, RuntimeError, IndexError, KeyError) as error:
            raise TargetError(f"{target.name}: its upper layers do not run alone ({error}); {_CURE}") from error
        difference = (again.float() - captured.last_hidden_state[0].float()).abs().max().item()
        bound = 2e-2 * captured.last_hidden_state.float().abs().max().item()
        if not difference <= bound:
            raise TargetError(
                f"{target.name}: last states from layer {self.first_layer - 1} on differ from the target's own by "
                f"{difference:.3g} (allowed {bound:.3g}); {_CURE}"
            )


_CURE = "choose another cache.teacher_codec than recomputed"


def _bare(layer: nn.Module) -> nn.Module:
    plain = copy.copy(layer)
    plain._forward_hooks = type(layer._forward_hooks)()
    plain._forward_pre_hooks = type(layer._forward_pre_hooks)()
    return plain
