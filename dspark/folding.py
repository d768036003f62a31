"""A drafter that reads linear coordinates of the features in place of the features, and its way back.

W = m*d feature width, C coordinates, d hidden size. Coordinates are y = P x for features x. A context projection F_y on
them is F_y P on the features: exactly, and without a bias, because P acts on the features as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dspark.config import SettingError


@torch.no_grad()
def read_coordinates(drafter: Any, projection: Tensor, lift: Tensor) -> None:
    """Make the drafter's `fc` one on coordinates, with what it has learnt: fc becomes fc @ lift.

    `projection` P [C, W]; `lift` [W, C] gives back the features from their coordinates as well as these know them.
    Raises SettingError when the projection is not one of this drafter's features.
    """
    width = drafter.config.num_features
    if projection.shape[1] != width or tuple(lift.shape) != (width, len(projection)):
        layers, size = len(drafter.config.target_layer_ids), drafter.config.hidden_size
        raise SettingError(
            f"the cache keeps coordinates of {projection.shape[1]} features; this drafter reads {layers} layers of "
            f"hidden size {size}, {width} together (option `drafter.target_layer_ids`)"
        )
    weight = drafter.fc.weight
    fc = nn.Linear(len(projection), weight.shape[0], bias=False, device=weight.device, dtype=weight.dtype)
    fc.weight.copy_((weight.double() @ lift.to(weight.device, torch.float64)).to(weight.dtype))
    drafter.fc = fc
    drafter.register_buffer("feature_projection", projection.to(weight.device, torch.float32), persistent=False)


def features_read(drafter: Any) -> Tensor:
    """`fc.weight` [d, W] as one on the features, whichever the drafter reads; in the weight's dtype."""
    weight: Tensor = drafter.fc.weight.detach()
    projection = getattr(drafter, "feature_projection", None)
    if projection is None:
        return weight
    return (weight.double() @ projection.to(weight.device, torch.float64)).to(weight.dtype)
