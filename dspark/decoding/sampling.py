"""Drawing tokens, and the rejection rule that keeps speculative decoding lossless. Pure functions.

B rows, G block slots, V vocabulary. Probabilities are float32; draws are uniform numbers in [0, 1) that depend
only on (request seed, token position, start of the round, purpose), never on what else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.errors import DsparkError

_TOP_CANDIDATES = 1024
MIN_TEMPERATURE = 1e-5  # below it, division leaves the range of float32; vLLM's bound


class SamplingError(DsparkError):
    """A sampling setting is out of range."""


class NonFiniteLogits(DsparkError):
    """Logits that hold NaN or infinity, or nothing above -infinity; `row` is the first such row."""

    def __init__(self, row: int) -> None:
        super().__init__(f"the logits of row {row} are not finite")
        self.row = row


def require_finite(logits: Tensor) -> None:
    """Raises NonFiniteLogits unless each row of logits [N, V] has a finite maximum."""
    bad = ~logits.amax(-1).isfinite()
    if bool(bad.any()):
        raise NonFiniteLogits(int(bad.nonzero()[0]))


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """temperature 0 is greedy; top_p 1.0 and top_k 0 leave the distribution whole. Top-k is applied before top-p."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < float("inf"):
            raise SamplingError(
                f"temperature is {self.temperature}; expected 0 (greedy), {MIN_TEMPERATURE:g} or more (`temperature`)"
            )
        if not 0 < self.top_p <= 1:
            raise SamplingError(f"top_p is {self.top_p}; expected above 0 and at most 1 (`top_p`)")
        if self.top_k < 0:
            raise SamplingError(f"top_k is {self.top_k}; expected 0 (off) or more (`top_k`)")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class Purpose(IntEnum):
    """What a uniform number is for; each purpose has its own stream."""

    TARGET = 1  # a token drawn from the target's distribution or from the residual
    DRAFT = 2
    ACCEPT = 3


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: Any, positions: Any, rounds: Any, purpose: Purpose) -> np.ndarray:
    """Counter-based uniform float64 numbers in [0, 1), broadcast over integer arrays.

    `rounds` is the position at which a round starts: a token drafted again after a rejection gets a fresh number, so
    nothing that was decided in an earlier round can be correlated with it.
    """
    with np.errstate(over="ignore"):
        state = _mix(np.asarray(seeds).astype(np.int64).view(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        for word in (positions, rounds, int(purpose)):
            step = np.asarray(word, dtype=np.int64).astype(np.uint64) + np.uint64(1)
            state = _mix(state + step * np.uint64(0x9E3779B97F4A7C15))
    return np.asarray((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def probabilities(logits: Tensor, config: SamplingConfig) -> Tensor:
    """Logits [..., V] to the float32 probabilities [..., V] that sampling uses (temperature, top-k, top-p)."""
    if config.greedy:
        raise SamplingError("greedy decoding has no probabilities; compare argmax tokens instead")
    scaled = _scaled(logits, config)
    vocabulary = scaled.shape[-1]
    if 0 < config.top_k < vocabulary:
        values, indices = scaled.topk(config.top_k, dim=-1)
        kept = _nucleus(values.softmax(-1), config.top_p)
        return torch.zeros_like(scaled).scatter_(-1, indices, kept)
    probs = scaled.softmax(-1)
    if config.top_p == 1:
        return probs
    count = min(_TOP_CANDIDATES, vocabulary)
    values, indices = probs.topk(count, dim=-1)
    if count < vocabulary and bool((values.sum(-1) < config.top_p).any()):
        values, indices = probs.sort(dim=-1, descending=True)
    return torch.zeros_like(probs).scatter_(-1, indices, _nucleus(values, config.top_p))


def _scaled(logits: Tensor, config: SamplingConfig) -> Tensor:
    """Logits over the temperature, less the highest of each row, which changes no probability and cannot overflow."""
    logits = logits.float()
    return (logits - logits.amax(-1, keepdim=True)) / config.temperature


def _nucleus(descending: Tensor, top_p: float) -> Tensor:
    """Keep the smallest head of descending probabilities whose mass reaches top_p, and renormalise."""
    if top_p < 1:
        before = descending.cumsum(-1) - descending
        descending = descending.masked_fill(before >= top_p, 0.0)
    return descending / descending.sum(-1, keepdim=True)


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF draws: probabilities [..., V] (need not sum to one) and uniforms [...] to token ids [...]."""
    cdf = probs.cumsum(-1, dtype=torch.float64)
    total = cdf[..., -1:]
    # Strictly below the total, so that a token of probability zero at the end can never be drawn.
    goal = torch.minimum(u.to(cdf)[..., None] * total, total * (1 - 1e-12))
    return torch.searchsorted(cdf, goal, right=True).squeeze(-1)


def sample(logits: Tensor, config: SamplingConfig, u: Tensor) -> Tensor:
    """Token ids [B] from logits [B, V]. With top-k only the candidates are looked at."""
    if config.greedy:
        return logits.argmax(-1)
    if not 0 < config.top_k < logits.shape[-1]:
        return draw(probabilities(logits, config), u)
    values, indices = _scaled(logits, config).topk(config.top_k, dim=-1)
    kept = _nucleus(values.softmax(-1), config.top_p)
    # In token order, as the whole vocabulary would be walked.
    indices, order = indices.sort(-1)
    return indices.gather(-1, draw(kept.gather(-1, order), u)[..., None]).squeeze(-1)


@dataclass(frozen=True)
class Verdict:
    """The outcome of one verification, before stop tokens and length limits. All lists have B entries."""

    draft_ids: list[list[int]]  # every proposed token
    accepted: list[int]  # leading scheduled drafts that the rule accepts
    next_ids: list[int]  # from the residual after a rejection, from the target otherwise
    rates: list[list[float]]  # per scheduled slot, sum of min(p_draft, p_target)


def verify(
    logits: Tensor,
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    lengths: Tensor,
    config: SamplingConfig,
    accept_u: Tensor | None = None,
    next_u: Tensor | None = None,
) -> Verdict:
    """Accept or reject drafts left to right and draw each row's next token.

    logits [B, W, V]: target logits after the anchor and after each verified draft (W = 1 + longest length).
    draft_ids [B, G]; draft_probs [B, G, V], the distributions they were drawn from (None when greedy);
    lengths [B] <= G: how many drafts of each row were verified. accept_u, next_u [B, W]: uniforms, unless greedy.
    """
    proposed = draft_ids.tolist()
    width = logits.shape[1] - 1
    drafts = draft_ids[:, :width]
    rows = torch.arange(len(draft_ids), device=logits.device)
    if width == 0:
        first = sample(logits[:, 0], config, next_u[:, 0] if next_u is not None else lengths)
        return Verdict(proposed, [0] * len(rows), first.tolist(), [[] for _ in proposed])
    scheduled = torch.arange(width, device=logits.device) < lengths[:, None]
    if config.greedy:
        best = logits.argmax(-1)
        agrees = (drafts == best[:, :-1]) & scheduled
        accepted = agrees.long().cumprod(-1).sum(-1)
        return Verdict(proposed, accepted.tolist(), best[rows, accepted].tolist(), agrees.float().tolist())
    if draft_probs is None or accept_u is None or next_u is None:
        raise SamplingError("sampled verification needs the draft's distributions and two sets of uniforms")
    p_draft = draft_probs[:, :width]
    p_target = probabilities(logits, config)
    of_draft = p_draft.gather(-1, drafts[..., None]).squeeze(-1)
    of_target = p_target[:, :-1].gather(-1, drafts[..., None]).squeeze(-1)
    passes = (accept_u[:, :width] * of_draft < of_target) & scheduled
    accepted = passes.long().cumprod(-1).sum(-1)
    rejected_at = accepted.clamp(max=width - 1)
    rejected = (accepted < lengths)[:, None]
    at_stop = p_target[rows, accepted]
    chosen = torch.where(rejected, residual(at_stop, p_draft[rows, rejected_at]), at_stop)
    next_ids = draw(chosen, next_u[rows, accepted])
    rates = torch.minimum(p_draft, p_target[:, :-1]).sum(-1)
    return Verdict(proposed, accepted.tolist(), next_ids.tolist(), rates.tolist())


def residual(p_target: Tensor, p_draft: Tensor) -> Tensor:
    """max(p_target - p_draft, 0), normalised: what a rejected draft is replaced from. [..., V]

    Where the two distributions are equal nothing can be rejected except by rounding; the target's own is returned.
    """
    excess = (p_target - p_draft).clamp(min=0)
    mass = excess.sum(-1, keepdim=True)
    return torch.where(mass > 0, excess / mass.clamp(min=torch.finfo(excess.dtype).tiny), p_target)
