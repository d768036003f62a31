"""Which directions of the captured states drafters look at. W captured width, d hidden size, C directions, R rows.

A drafter sees its features x only through its context projection F [d, W]. With S the covariance of the states, the
error that C coordinates leave in F x is least, over all linear ways to keep them, for the leading eigenvectors of
S^1/2 F^T F S^1/2. A fresh drafter will look a little elsewhere than the pilot did, and several pilots look at several
things, so the reader whose error counts is their sum, each by its share of what it reads, and a small part of one that
reads all channels alike:

    M = sum_i F_i^T F_i / tr(F_i S F_i^T)  +  prior * diag(1 / diag S) / W.

The prior also orders what is kept beyond the rank of the pilots' projections.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from storage.codecs.base import Sample

DEFAULT_PRIOR = 0.1


def reader_directions(
    projections: Sequence[torch.Tensor], sample: Sample, count: int, *, prior: float = DEFAULT_PRIOR
) -> tuple[torch.Tensor, torch.Tensor]:
    """P [C, W] and the share of the readers' variance that each of its coordinates carries [C], strongest first.

    `projections`: F_i [d, W] of trained pilots; `sample`: sequences of states [R, W], first tokens left out of all
    statistics. Coordinates P x are uncorrelated, of one variance, and together about as large in absolute value as the
    states, so that a learning rate keeps its meaning. Raises ValueError for a count outside 1..W.
    """
    states = torch.cat([values[1 if first else 0 :] for values, first in sample]).double()
    width = states.shape[1]
    if not 1 <= count <= width:
        raise ValueError(f"{count} directions asked for; the captured states have {width}")
    covariance = torch.cov(states.t(), correction=0)
    spread = covariance.diagonal().clamp_min(1e-12)
    metric = torch.diag(prior / spread / width)
    for projection in projections:
        f = projection.double().to(states.device)
        metric += f.t() @ f / torch.einsum("ij,jk,ik->", f, covariance, f).clamp_min(1e-12)
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp_min(1e-9 * values.max()).sqrt()
    root, inverse_root = vectors * values @ vectors.t(), vectors / values @ vectors.t()
    shares, directions = torch.linalg.eigh(root @ metric @ root)
    shares, directions = shares.flip(0)[:count], directions.flip(1)[:, :count].t()
    directions *= torch.sign(directions.gather(1, directions.abs().argmax(1, keepdim=True)))
    chosen = directions @ inverse_root
    scale = states.abs().sum(1).mean() / (states @ chosen.t()).abs().sum(1).mean()
    return (scale * chosen).float().contiguous(), (shares / (len(projections) + prior)).float()
