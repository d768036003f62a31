"""Components P x of the states that a pilot drafter looks at, P given from outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch

from storage.codecs.base import Sample, gather
from storage.codecs.quantised import Quantised
from storage.codecs.registry import register
from storage.errors import StorageError


@register
class Projected(Quantised):
    """Coordinates P x for a given `projection` P [C, W], strongest first, and the `shares` [C] of what is read of the
    states that each carries (equal if they are not given).

    The step of coordinate c is `step` * (s_d / s_c) ** `focus` of its standard deviations, s_d the share of the d-th
    coordinate (d hidden size). With a focus of 1/2 all coordinates leave the same error in what is read, which is the
    least error for the bits that it takes (reverse water-filling); with 0 each is kept alike, read or not.
    """

    name = "projected"
    defaults: ClassVar[dict[str, Any]] = {"step": 0.5, "focus": 0.5, "level": 1, "directions": None}

    @classmethod
    def fit(
        cls,
        sample: Sample,
        *,
        width: int,
        layers: int = 1,
        tensors: Mapping[str, torch.Tensor] | None = None,
        **settings: Any,
    ) -> Self:
        codec = cls(width=width, settings=settings)
        if not tensors or "projection" not in tensors:
            raise StorageError('codec "projected" needs the pilot\'s directions: pass tensors={"projection": [C, W]}')
        projection = tensors["projection"].float()
        if projection.ndim != 2 or projection.shape[1] != width:
            raise StorageError(f"the projection is {tuple(projection.shape)}, expected [C, {width}]")
        directions = codec.settings["directions"] or len(projection)
        if directions > len(projection):
            raise StorageError(f"directions = {directions}, but the projection has {len(projection)} rows")
        codec.tensors["forward"] = projection[:directions].contiguous()
        coordinates = gather(sample, codec.coordinates)
        codec.tensors["inverse"] = _least_squares(gather(sample), coordinates)
        relative = torch.ones(directions)
        if "shares" in tensors:
            shares = tensors["shares"].float()[:directions].clamp_min(1e-12)
            relative = (shares[min(directions, width // layers) - 1] / shares).pow(codec.settings["focus"])
        codec.fit_steps(coordinates, codec.settings["step"] * relative * coordinates.std(0, correction=0))
        codec.fit_first_row(sample)
        return codec


def _least_squares(states: torch.Tensor, coordinates: torch.Tensor) -> torch.Tensor:
    """L [W, C] bfloat16 that minimises the sum of |x - L y|² over rows x of [R, W], y of [R, C], with a small ridge."""
    y = coordinates.double()
    gram = y.t() @ y
    gram.diagonal().add_(1e-4 * gram.diagonal().mean())
    return torch.linalg.solve(gram, y.t() @ states.double()).t().to(torch.bfloat16).contiguous()
