"""A drafter that reads linear coordinates of the features in place of the features, and its way back.

W = m*d feature width, C coordinates, d hidden size. Coordinates are y = P x for features x, and L y are the features as
well as y knows them. The drafter keeps its context projection F [d, W] and reads F L y: its weights, their start and
the steps of the optimizer are those of training on features. (A free projection G [d, C] on the coordinates could do
the same, and learns worse: Adam moves every entry alike, and coordinates are not alike as channels are.) On features it
is F L P: exactly, and without a bias, because P acts on the features as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.config import SettingError


class CoordinateProjection(nn.Module):
    """A context projection on coordinates: `weight` F [d, W], a parameter; `lift` L [W, C]; `projection` P [C, W]."""

    lift: Tensor

    def __init__(self, weight: nn.Parameter, projection: Tensor, lift: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("lift", lift.to(weight.device, weight.dtype), persistent=False)
        self._exact = projection.cpu(), lift.cpu()  # whatever dtype an engine gives the module's tensors

    @property
    def in_features(self) -> int:
        return self.lift.shape[1]

    def forward(self, coordinates: Tensor) -> Tensor:
        """[..., C] to [..., d]; F L is made once a call, which is cheaper than lifting every token."""
        return F.linear(coordinates, self.weight @ self.lift)

    def on_features(self) -> Tensor:
        """F L P [d, W], in the weight's dtype."""
        weight = self.weight.detach()
        projection, lift = (part.to(weight.device, torch.float64) for part in self._exact)
        return (weight.double() @ lift @ projection).to(weight.dtype)


def read_coordinates(drafter: Any, projection: Tensor, lift: Tensor) -> None:
    """Let the drafter read coordinates; its weights stay.

    `projection` P [C, W]; `lift` L [W, C] gives back the features from their coordinates as well as these know them.
    Raises SettingError when the projection is not one of this drafter's features.
    """
    width = drafter.config.num_features
    if projection.shape[1] != width or tuple(lift.shape) != (width, len(projection)):
        layers, size = len(drafter.config.target_layer_ids), drafter.config.hidden_size
        raise SettingError(
            f"the cache keeps coordinates of {projection.shape[1]} features; this drafter reads {layers} layers of "
            f"hidden size {size}, {width} together (option `drafter.target_layer_ids`)"
        )
    drafter.fc = CoordinateProjection(drafter.fc.weight, projection, lift)


def features_read(drafter: Any) -> Tensor:
    """The context projection [d, W] as one on the features, whichever the drafter reads; in the weight's dtype."""
    if isinstance(drafter.fc, CoordinateProjection):
        return drafter.fc.on_features()
    weight: Tensor = drafter.fc.weight.detach()
    return weight
