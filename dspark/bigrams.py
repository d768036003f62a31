"""A start for the Markov head: the bigrams of the text that it will draft.

The head's bias is a matrix over (previous token, next token) of rank r. Counted bigrams give that matrix a good first
value at the cost of one pass over the training text, where gradient steps would need many thousands.

V vocabulary, r rank, E distinct pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

PSEUDO_COUNTS = 0.1


def bigram_counts(previous_ids: Tensor, next_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Distinct pairs [2, E] of (previous, next) token, ascending, and how often each occurs [E]."""
    pairs, counts = torch.unique(previous_ids * vocab_size + next_ids, return_counts=True)
    return torch.stack([pairs // vocab_size, pairs % vocab_size]), counts


def unigram(pairs: Tensor, counts: Tensor, vocab_size: int) -> Tensor:
    """The share [V] of each token among next tokens, with one pseudo-count for each token that occurs at all."""
    total = torch.zeros(vocab_size, dtype=torch.float64).index_add_(0, pairs[1], counts.double())
    occurs = total > 0
    return (total + occurs) / (total + occurs).sum()


def association(pairs: Tensor, counts: Tensor, share: Tensor) -> Tensor:
    """log(1 + n(x, y) / (c p(y))) for each pair [E], with `share` p(y) [V] and c pseudo-counts a row, spread like p.

    Up to a constant of the row x this is log(p(y | x) / p(y)): a softmax does not see the constant, and pairs that
    never occur have the value 0, so the matrix is sparse.
    """
    return torch.log1p(counts.double() / (PSEUDO_COUNTS * share[pairs[1]]))


@torch.no_grad()
def initialize_from_bigrams(
    w1: nn.Embedding, w2: nn.Linear, pairs: Tensor, counts: Tensor, *, columns: int, seed: int = 0
) -> None:
    """Set the first `columns` of W1 [V, r] and W2 [V, r] so that the head's bias is log p(next | previous), nearly.

    The first column carries log p(next) (1 in W1), the others the best approximation of `association`, with rows
    weighted by the square root of how often their token precedes another: rank is spent where text is. Tokens that
    occur in no pair get zeros in W2 and stay as they are in W1. W1 and W2 share the scale evenly.
    """
    vocab_size = w1.weight.shape[0]
    share = unigram(pairs, counts, vocab_size)
    values = association(pairs, counts, share)
    rows, row_of = torch.unique(pairs[0], return_inverse=True)
    names, name_of = torch.unique(pairs[1], return_inverse=True)
    weight = torch.zeros(len(rows), dtype=torch.float64).index_add_(0, row_of, counts.double()).sqrt()
    matrix = torch.sparse_coo_tensor(
        torch.stack([row_of, name_of]), (values * weight[row_of]).float(), (len(rows), len(names))
    ).coalesce()
    kept = min(columns - 1, *matrix.shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        u, s, v = torch.svd_lowrank(matrix, q=kept, niter=4)
    left, right = u * s.sqrt() / weight.float()[:, None], v * s.sqrt()
    even = (right.pow(2).mean() / left.pow(2).mean().clamp(min=1e-12)).pow(0.25)
    first = torch.zeros(len(rows), columns)
    first[:, 0] = 1.0
    first[:, 1 : kept + 1] = left * even
    second = torch.zeros(len(names), columns)
    second[:, 1 : kept + 1] = right / even
    logs = share[names].log().float()
    second[:, 0] = logs - logs.mean()
    w1.weight[:, 0] = 1.0
    w1.weight[rows.to(w1.weight.device), :columns] = first.to(w1.weight)
    w2.weight[:, :columns] = 0.0
    w2.weight[names.to(w2.weight.device), :columns] = second.to(w2.weight)
