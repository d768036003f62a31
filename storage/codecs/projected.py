"""Components P x of the states that a pilot drafter looks at, P given from outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from storage.codecs.base import Sample, gather
from storage.codecs.quantised import Quantised
from storage.codecs.registry import register
from storage.errors import StorageError


@register
class Projected(Quantised):
    """Components P x for a given `projection` P [C, W], strongest first, and the `shares` [C] of what is read of the
    states that each carries (equal if they are not given).

    The step of component c is `step` * (s_d / s_c) ** `focus` of its standard deviations, s_d the share of the d-th
    component (d hidden size). With a focus of 1/2 all components leave the same error in what is read, which is the
    least error for the bits that it takes (reverse water-filling); with 0 each is kept alike, read or not.
    """

    name = "projected"
    defaults: ClassVar[dict[str, Any]] = {"step": 0.5, "focus": 0.5, "level": 1, "directions": None}

    def learn(self, sample: Sample, layers: int, tensors: Mapping[str, torch.Tensor]) -> None:
        if "projection" not in tensors:
            raise StorageError('codec "projected" needs the pilot\'s components: pass tensors={"projection": [C, W]}')
        projection = tensors["projection"].float()
        if projection.ndim != 2 or projection.shape[1] != self.width:
            raise StorageError(f"the projection is {tuple(projection.shape)}, expected [C, {self.width}]")
        count = self.settings["directions"] or len(projection)
        if count > len(projection):
            raise StorageError(f"directions = {count}, but the projection has {len(projection)} rows")
        self.tensors["forward"] = projection[:count].contiguous()
        components = gather(sample, self.components)
        self.tensors["inverse"] = _least_squares(gather(sample), components)
        relative = torch.ones(count)
        if "shares" in tensors:
            shares = tensors["shares"].float()[:count].clamp_min(1e-12)
            relative = (shares[min(count, self.width // layers) - 1] / shares).pow(self.settings["focus"])
        self.fit_steps(components, self.settings["step"] * relative * components.std(0, correction=0))
        self.fit_first_row(sample)


def _least_squares(states: torch.Tensor, components: torch.Tensor) -> torch.Tensor:
    """L [W, C] bfloat16 that minimises the sum of |x - L y|² over rows x of [R, W], y of [R, C], with a small ridge."""
    y = components.double()
    gram = y.t() @ y
    gram.diagonal().add_(1e-4 * gram.diagonal().mean())
    return torch.linalg.solve(gram, y.t() @ states.double()).t().to(torch.bfloat16).contiguous()
