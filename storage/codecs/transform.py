"""Linear coordinates, uniform steps, entropy coding. R rows, W captured width, C coordinates.

y = P x; codes = round((y - mean) / step); decoded y = codes * step + mean. The mean is removed inside the quantiser
only, so a consumer that folds P or its inverse into its own first linear layer needs no bias.

- "transform": P decorrelates (a KLT over all captured layers jointly, or within each, or none). Decodes to states, or,
  with `output: "coordinates"`, to y.
- "projected": P is given from outside (the directions that a pilot drafter looks at). Decodes to y; `inverse` then is
  only the start of a reader: the states that fit the coordinates best on the sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import torch

from storage.codecs.base import LossyCodec, Sample, common_first_row, gather
from storage.codecs.symbols import choose_classes, pack, unpack


class Quantised(LossyCodec):
    """Codes coordinates whose `mean`, `step` [C] and optionally `forward` [C, W] and `inverse` [W, C] are fitted
    (or [k, W/k, W/k], the diagonal blocks of such a matrix)."""

    inline_dtype = torch.float32

    def __init__(
        self,
        *,
        width: int,
        settings: Mapping[str, Any] | None = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(width=width, settings=settings, tensors=tensors)
        if "classes" in self.tensors:
            self._classes = self.tensors["classes"].numpy()

    @property
    def out_width(self) -> int:
        forward = self.tensors.get("forward")
        return self.width if forward is None or self._restores or forward.ndim == 3 else len(forward)

    @property
    def projection(self) -> torch.Tensor | None:
        return None if self._restores else _dense(self.tensors.get("forward"))

    @property
    def lift(self) -> torch.Tensor | None:
        return None if self._restores else _dense(self.tensors.get("inverse"))

    @property
    def _restores(self) -> bool:
        return self.settings.get("output") == "states"

    def _forward(self, values: torch.Tensor) -> torch.Tensor:
        values = values.float()
        return _apply(self.tensor_on("forward", values.device), values) if "forward" in self.tensors else values

    def coordinates(self, values: torch.Tensor) -> torch.Tensor:
        return values.float() if self._restores else self._forward(values)

    def encode_rows(self, coordinates: torch.Tensor) -> bytes:
        values = self._forward(coordinates) if self._restores else coordinates
        mean, step = self.tensor_on("mean", values.device), self.tensor_on("step", values.device)
        codes = ((values - mean) / step).round_().clamp_(-(2**30), 2**30).to(torch.int32)
        return pack(codes.t().cpu().numpy(), self._classes, level=self.settings["level"])

    def decode_rows(self, payload: memoryview, rows: int, device: torch.device | str) -> torch.Tensor:
        codes = torch.from_numpy(unpack(payload, self._classes, rows)).to(device)
        mean, step = self.tensor_on("mean", device), self.tensor_on("step", device)
        if not self._restores or "inverse" not in self.tensors:
            return torch.addcmul(mean, codes.t().contiguous().to(torch.float32), step)
        inverse = self.tensor_on("inverse", device)
        if inverse.ndim == 3:
            return _apply(inverse, torch.addcmul(mean[:, None], codes.to(torch.float32), step[:, None]).t())
        return torch.addmm(inverse @ mean, codes.to(torch.float32).t(), (inverse * step).t())

    def fit_steps(self, coordinates: torch.Tensor, step: torch.Tensor | float) -> None:
        """Means, steps ([C] or one for all, in units of the coordinates) and packing classes from [R, C]."""
        mean = coordinates.mean(0)
        deviation = (coordinates - mean).square().mean(0).sqrt()
        steps = torch.as_tensor(step, dtype=torch.float32).expand(len(mean)).clamp_min(1e-12).clone()
        self.tensors["mean"], self.tensors["step"] = mean, steps
        self._classes = choose_classes((deviation / steps).numpy())
        self.tensors["classes"] = torch.from_numpy(self._classes)

    def fit_first_row(self, sample: Sample) -> None:
        firsts = [self.coordinates(values[:1])[0] for values, first in sample if first and len(values)]
        row = common_first_row(firsts)
        if row is not None:
            self.tensors["first_row"] = row


class Transform(Quantised):
    """Steps are `step` standard deviations of each channel (equal relative error in every captured channel).

    `decorrelate`: "none", "layer" or "joint". `metric`: "variance" (channels count by 1/variance), "raw" (by their
    energy), "given" (by the matrix M [W, W] handed to fit: the loss is e^T M e; one step serves all coordinates). To M
    the mean of its diagonal times `ridge` is added on the diagonal: a metric averaged over a sample is blind to what
    rare tokens need.
    """

    name = "transform"
    defaults: ClassVar[dict[str, Any]] = {
        "step": 0.25,
        "decorrelate": "joint",
        "metric": "variance",
        "ridge": 0.1,
        "output": "states",
        "level": 1,
    }

    @classmethod
    def complete(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        found = super().complete(settings)
        for option, allowed in (
            ("decorrelate", ("none", "layer", "joint")),
            ("metric", ("variance", "raw", "given")),
            ("output", ("states", "coordinates")),
        ):
            if found[option] not in allowed:
                raise ValueError(f"{option} = {found[option]!r}: choose one of {', '.join(allowed)}")
        return found

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
        states = gather([(values.float(), first) for values, first in sample], _Identity(width=width))
        centred = states - states.mean(0)
        deviation = centred.square().mean(0).sqrt().clamp_min(1e-6)
        step, metric, kind = codec.settings["step"], codec.settings["metric"], codec.settings["decorrelate"]
        if metric == "given":
            if not tensors or "metric" not in tensors:
                raise ValueError('metric = "given" needs the matrix: pass tensors={"metric": [W, W]} to fit_codec')
            root, inverse_root = _roots(tensors["metric"], codec.settings["ridge"])
        else:
            weight = (
                1 / deviation if metric == "variance" else torch.ones_like(deviation) / deviation.square().mean().sqrt()
            )
            root, inverse_root = torch.diag(weight), torch.diag(1 / weight)
        if kind == "none":
            if metric == "given":
                raise ValueError('metric = "given" needs decorrelate = "joint"')
            codec.fit_steps(states, step / torch.diagonal(root))
        else:
            blocks = 1 if kind == "joint" or metric == "given" else layers
            whitened = centred @ root.t()
            bases = torch.stack([_principal(part) for part in whitened.chunk(blocks, dim=1)])
            codec.tensors["forward"] = _squeeze(bases @ _diagonal_blocks(root, blocks))
            codec.tensors["inverse"] = _squeeze(_diagonal_blocks(inverse_root, blocks) @ bases.transpose(1, 2))
            codec.fit_steps(_apply(codec.tensors["forward"], states), step)
        codec.fit_first_row(sample)
        return codec


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
            raise ValueError('codec "projected" needs the pilot\'s directions: pass tensors={"projection": [C, W]}')
        projection = tensors["projection"].float()
        if projection.ndim != 2 or projection.shape[1] != width:
            raise ValueError(f"the projection is {tuple(projection.shape)}, expected [C, {width}]")
        directions = codec.settings["directions"] or len(projection)
        if directions > len(projection):
            raise ValueError(f"directions = {directions}, but the projection has {len(projection)} rows")
        codec.tensors["forward"] = projection[:directions].contiguous()
        coordinates = gather(sample, codec)
        codec.tensors["inverse"] = _least_squares(gather(sample, _Identity(width=width)), coordinates)
        relative = torch.ones(directions)
        if "shares" in tensors:
            shares = tensors["shares"].float()[:directions].clamp_min(1e-12)
            relative = (shares[min(directions, width // layers) - 1] / shares).pow(codec.settings["focus"])
        codec.fit_steps(coordinates, codec.settings["step"] * relative * coordinates.std(0, correction=0))
        codec.fit_first_row(sample)
        return codec


class _Identity(Transform):
    """States as they are, for gathering rows."""

    def coordinates(self, values: torch.Tensor) -> torch.Tensor:
        return values.float()


def _least_squares(states: torch.Tensor, coordinates: torch.Tensor) -> torch.Tensor:
    """L [W, C] bfloat16 that minimises the sum of |x - L y|² over rows x of [R, W], y of [R, C], with a small ridge."""
    y = coordinates.double()
    gram = y.t() @ y
    gram.diagonal().add_(1e-4 * gram.diagonal().mean())
    return torch.linalg.solve(gram, y.t() @ states.double()).t().to(torch.bfloat16).contiguous()


def _dense(matrix: torch.Tensor | None) -> torch.Tensor | None:
    """[C, W], of a matrix or its diagonal blocks; float32."""
    if matrix is None:
        return None
    return (torch.block_diag(*matrix) if matrix.ndim == 3 else matrix).float()


def _apply(matrix: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """values [R, W] times a matrix [C, W] or diagonal blocks [k, W/k, W/k] of one."""
    if matrix.ndim == 2:
        return values @ matrix.t()
    parts = values.reshape(len(values), len(matrix), matrix.shape[2]).transpose(0, 1)
    return torch.bmm(parts, matrix.transpose(1, 2)).transpose(0, 1).flatten(1)


def _diagonal_blocks(matrix: torch.Tensor, blocks: int) -> torch.Tensor:
    """[W, W] to its [k, W/k, W/k] diagonal blocks."""
    size = len(matrix) // blocks
    return torch.stack([matrix[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(blocks)])


def _squeeze(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[0].contiguous() if len(blocks) == 1 else blocks.contiguous()


def _principal(centred: torch.Tensor) -> torch.Tensor:
    """Principal directions of [R, n], strongest first, as rows [n, n]; signs fixed by the largest component."""
    covariance = (centred.double().t() @ centred.double()) / len(centred)
    vectors = torch.linalg.eigh(covariance).eigenvectors.flip(1).t()
    signs = torch.sign(vectors.gather(1, vectors.abs().argmax(1, keepdim=True)))
    return (vectors * signs).float().contiguous()


def _roots(metric: torch.Tensor, ridge: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric square root of a metric, lifted by `ridge` times its mean eigenvalue, and the root's inverse."""
    values, vectors = torch.linalg.eigh(metric.double())
    values = (values.clamp_min(0) + max(ridge, 1e-6) * values.mean()).sqrt()
    return (vectors * values @ vectors.t()).float(), (vectors / values @ vectors.t()).float()


def head_metric(
    head: torch.Tensor,
    states: torch.Tensor,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    chunk: int = 256,
) -> torch.Tensor:
    """M [d, d] such that e^T M e is the mean over tokens of the variance, under the teacher, of the logit error W e.

    head W [V, d], states [P, d]. To second order the divergence between teacher and coded teacher is half of it. The
    slope of a soft cap is left out of the error: it is near 1 where the probable tokens are.
    """
    head, states = head.float(), states.to(head.device)
    metric = torch.zeros(head.shape[1], head.shape[1], dtype=torch.float64, device=head.device)
    weight = torch.zeros(head.shape[0], dtype=torch.float64, device=head.device)
    for start in range(0, len(states), chunk):
        logits = states[start : start + chunk].float() @ head.t()
        if soft_cap is not None:
            logits = torch.tanh(logits / soft_cap) * soft_cap
        p = torch.softmax(logits / temperature, dim=-1)
        mean = p @ head
        metric -= (mean.t() @ mean).double()
        weight += p.sum(0).double()
    metric += (head.t() @ (head * weight.float()[:, None])).double()
    return (metric / len(states) / temperature**2).float().cpu()


def classes_of(codec: Quantised) -> np.ndarray:
    """Packing class of each coordinate [C]."""
    return codec._classes
