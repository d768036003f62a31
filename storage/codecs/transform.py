"""States decorrelated (a KLT over all captured layers jointly, or within each, or none), quantised, entropy-coded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from storage.codecs.base import Sample, gather
from storage.codecs.quantised import Quantised, apply
from storage.codecs.registry import register
from storage.errors import StorageError

METRIC_CHUNK = 256  # states whose logits exist at once


@register
class Transform(Quantised):
    """Steps are `step` standard deviations of each channel (equal relative error in every captured channel).

    `decorrelate`: "none", "layer" or "joint". `metric`: "variance" (channels count by 1/variance), "raw" (by their
    energy), "given" (by the matrix M [W, W] handed to fit: the loss is e^T M e; one step serves all components). To M
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
                raise StorageError(f"{option} = {found[option]!r}: choose one of {', '.join(allowed)}")
        return found

    def learn(self, sample: Sample, layers: int, tensors: Mapping[str, torch.Tensor]) -> None:
        states = gather(sample)
        centred = states - states.mean(0)
        deviation = centred.square().mean(0).sqrt().clamp_min(1e-6)
        step, metric, kind = self.settings["step"], self.settings["metric"], self.settings["decorrelate"]
        if metric == "given":
            if "metric" not in tensors:
                raise StorageError('metric = "given" needs the matrix: pass tensors={"metric": [W, W]} to fit_codec')
            root, inverse_root = _roots(tensors["metric"], self.settings["ridge"])
        else:
            weight = (
                1 / deviation if metric == "variance" else torch.ones_like(deviation) / deviation.square().mean().sqrt()
            )
            root, inverse_root = torch.diag(weight), torch.diag(1 / weight)
        if kind == "none":
            if metric == "given":
                raise StorageError('metric = "given" needs decorrelate = "joint"')
            self.fit_steps(states, step / torch.diagonal(root))
        else:
            blocks = 1 if kind == "joint" or metric == "given" else layers
            whitened = centred @ root.t()
            bases = torch.stack([_principal(part) for part in whitened.chunk(blocks, dim=1)])
            self.tensors["forward"] = _squeeze(bases @ _diagonal_blocks(root, blocks))
            self.tensors["inverse"] = _squeeze(_diagonal_blocks(inverse_root, blocks) @ bases.transpose(1, 2))
            self.fit_steps(apply(self.tensors["forward"], states), step)
        self.fit_first_row(sample)


def _diagonal_blocks(matrix: torch.Tensor, blocks: int) -> torch.Tensor:
    """[W, W] to its [k, W/k, W/k] diagonal blocks."""
    size = len(matrix) // blocks
    return torch.stack([matrix[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(blocks)])


def _squeeze(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[0].contiguous() if len(blocks) == 1 else blocks.contiguous()


def _principal(centred: torch.Tensor) -> torch.Tensor:
    """Principal components of [R, n], strongest first, as rows [n, n]; signs fixed by the largest component."""
    covariance = (centred.double().t() @ centred.double()) / len(centred)
    vectors = torch.linalg.eigh(covariance).eigenvectors.flip(1).t()
    signs = torch.sign(vectors.gather(1, vectors.abs().argmax(1, keepdim=True)))
    return (vectors * signs).float().contiguous()


def _roots(metric: torch.Tensor, ridge: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric square root of a metric, raised by `ridge` times its mean eigenvalue, and the root's inverse."""
    values, vectors = torch.linalg.eigh(metric.double())
    values = (values.clamp_min(0) + max(ridge, 1e-6) * values.mean()).sqrt()
    return (vectors * values @ vectors.t()).float(), (vectors / values @ vectors.t()).float()


def head_metric(head: torch.Tensor, states: torch.Tensor, *, soft_cap: float | None = None) -> torch.Tensor:
    """M [d, d] such that e^T M e is the mean over tokens of the variance, under the teacher, of the logit error W e.

    head W [V, d], states [P, d]. To second order the divergence between teacher and coded teacher is half of it. The
    slope of a soft cap is left out of the error: it is near 1 where the probable tokens are.
    """
    head, states = head.float(), states.to(head.device)
    metric = torch.zeros(head.shape[1], head.shape[1], dtype=torch.float64, device=head.device)
    weight = torch.zeros(head.shape[0], dtype=torch.float64, device=head.device)
    for start in range(0, len(states), METRIC_CHUNK):
        logits = states[start : start + METRIC_CHUNK].float() @ head.t()
        if soft_cap is not None:
            logits = torch.tanh(logits / soft_cap) * soft_cap
        p = torch.softmax(logits, dim=-1)
        mean = p @ head
        metric -= (mean.t() @ mean).double()
        weight += p.sum(0).double()
    metric += (head.t() @ (head * weight.float()[:, None])).double()
    return (metric / len(states)).float().cpu()
