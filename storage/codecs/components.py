"""Which components of the captured states drafters look at. W captured width, d hidden size, C components, R rows.

A drafter sees hidden states x only through its context projection F [d, W]. With S the covariance of the states, the
error that C components leave in F x is least, over all linear ways to keep them, for the leading eigenvectors of
S^1/2 F^T F S^1/2. A fresh drafter will look a little elsewhere than the pilot did, and several pilots look at several
things, so the reader whose error counts is their sum, each by its share of what it reads, and a small part of one that
reads all channels alike:

    M = sum_i F_i^T F_i / tr(F_i S F_i^T)  +  prior * diag(1 / diag S) / W.

The prior also orders what is kept beyond the rank of the pilots' projections. S is the sample's covariance, shrunk
towards its diagonal by W / (W + R), as if R rows had been seen after W of uncorrelated channels: few rows know little
of what varies little, and what they take for constant would be amplified without bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from storage.codecs.base import Sample
from storage.errors import StorageError

DEFAULT_PRIOR = 0.1


def leading_components(
    projections: Sequence[torch.Tensor], sample: Sample, count: int, *, prior: float = DEFAULT_PRIOR
) -> tuple[torch.Tensor, torch.Tensor]:
    """P [C, W] and the share of the readers' variance that each of its components carries [C], strongest first.

    `projections`: F_i [d, W] of trained pilots, on the device that does the work; `sample`: sequences of states [R, W],
    read several times, first tokens left out of all statistics. Components P x are uncorrelated, of one variance (as
    far as the sample knows), and together about as large in absolute value as the states.

    Raises ValueError for a count outside 1..W.
    """
    device = projections[0].device if projections else torch.device("cpu")
    mean, covariance, magnitude = _moments(sample, device)
    width = len(mean)
    unseen = torch.diag(covariance.diagonal()) - covariance
    covariance += unseen * (width / (width + _count(sample)))
    if not 1 <= count <= width:
        raise StorageError(f"{count} components asked for; the captured states have {width}")
    spread = covariance.diagonal().clamp_min(1e-12)
    metric = torch.diag(prior / spread / width)
    for projection in projections:
        f = projection.double().to(device)
        metric += f.t() @ f / ((f @ covariance) * f).sum().clamp_min(1e-12)
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp_min(1e-9 * values.max()).sqrt()
    root, inverse_root = vectors * values @ vectors.t(), vectors / values @ vectors.t()
    shares, components = torch.linalg.eigh(root @ metric @ root)
    shares, components = shares.flip(0)[:count], components.flip(1)[:, :count].t()
    components *= torch.sign(components.gather(1, components.abs().argmax(1, keepdim=True)))
    chosen = components @ inverse_root
    total = sum((x @ chosen.t()).abs().sum() for x in _rows(sample, device))
    scale = magnitude / (total / _count(sample))
    return (scale * chosen).float().cpu().contiguous(), (shares / (len(projections) + prior)).float().cpu()


def _rows(sample: Sample, device: torch.device) -> Iterator[torch.Tensor]:
    """The sample's states but first tokens, a sequence at a time, float64."""
    for values, first in sample:
        yield values[1 if first else 0 :].to(device, torch.float64)


def _count(sample: Sample) -> int:
    return sum(len(values) - first for values, first in sample)


def _moments(sample: Sample, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean [W], covariance [W, W] and mean sum of absolute values; the states are never all in memory."""
    count, width = _count(sample), sample[0][0].shape[1]
    mean = torch.zeros(width, dtype=torch.float64, device=device)
    magnitude = torch.zeros((), dtype=torch.float64, device=device)
    for x in _rows(sample, device):
        mean += x.sum(0) / count
        magnitude += x.abs().sum() / count
    covariance = torch.zeros(width, width, dtype=torch.float64, device=device)
    for x in _rows(sample, device):
        centred = x - mean
        covariance.addmm_(centred.t(), centred, alpha=1 / count)
    return mean, covariance, magnitude
