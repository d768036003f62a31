"""A drafter that reads components of the target's hidden states in place of the hidden states, and its way back.

W = m*d width of the captured hidden states, C components, d hidden size. Components are y = P x for hidden states x,
and U y are the hidden states as well as y knows them (U, the unprojection). The drafter keeps its context projection
F [d, W] and reads F U y: its weights, their start and the steps of the optimizer are those of training on hidden
states. (A free projection G [d, C] on the components could do the same, and learns worse: Adam moves every entry
alike, and components are not alike as channels are.) On hidden states it is F U P: exactly, and without a bias, because
P acts on the hidden states as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.registry import SettingError

if TYPE_CHECKING:
    from dspark.models.base import Drafter


class MergedProjection(nn.Module):
    """A context projection on components: `weight` F [d, W], a parameter; `unprojection` U [W, C]; `projection` P."""

    unprojection: Tensor

    def __init__(self, weight: nn.Parameter, projection: Tensor, unprojection: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("unprojection", unprojection.to(weight.device, weight.dtype), persistent=False)
        self._exact = projection.cpu(), unprojection.cpu()  # whatever dtype an engine gives the module's tensors

    @property
    def in_features(self) -> int:
        return self.unprojection.shape[1]

    def forward(self, components: Tensor) -> Tensor:
        """[..., C] to [..., d]; F U is made once a call, which is cheaper than unprojecting every token."""
        return F.linear(components, self.weight @ self.unprojection.to(self.weight.dtype))

    def on_hidden_states(self) -> Tensor:
        """F U P [d, W], in the weight's dtype."""
        weight = self.weight.detach()
        projection, unprojection = (part.to(weight.device, torch.float64) for part in self._exact)
        return (weight.double() @ unprojection @ projection).to(weight.dtype)


def merge_projection(drafter: Drafter, projection: Tensor, unprojection: Tensor) -> None:
    """Let the drafter read components; its weights stay.

    `projection` P [C, W]; `unprojection` U [W, C] gives back the hidden states as well as their components know them.
    Raises SettingError when the projection is not one of this drafter's hidden states, or it reads no components.
    """
    if not drafter.reads_components:
        raise SettingError(
            f"the cache keeps components, and {drafter.config.algorithm} reads whole states: set "
            "cache.hidden_states_codec to int8 or transform and build the cache again"
        )
    width = drafter.config.hidden_states_size
    if projection.shape[1] != width or tuple(unprojection.shape) != (width, len(projection)):
        layers, size = len(drafter.config.target_layer_ids), drafter.config.hidden_size
        raise SettingError(
            f"the cache keeps components of {projection.shape[1]} values a token; this drafter reads {layers} layers "
            f"of hidden size {size}, {width} together (option `drafter.target_layer_ids`)"
        )
    drafter.fc = MergedProjection(drafter.fc.weight, projection, unprojection)


def context_projection(drafter: Drafter) -> Tensor:
    """The weight [d, W] of the context projection on hidden states, whichever the drafter reads."""
    if isinstance(drafter.fc, MergedProjection):
        return drafter.fc.on_hidden_states()
    weight: Tensor = drafter.fc.weight.detach()
    return weight
