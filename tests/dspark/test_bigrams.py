"""The bigram start of the Markov head against counted bigrams."""

import torch
from torch import nn

from dspark.models.starting_weights import association, bigram_counts, initialize_from_bigrams, unigram


def text(length: int = 4000, vocab_size: int = 20) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    table = torch.rand(vocab_size, vocab_size, generator=generator).pow(6)
    table[:, -3:] = 0  # tokens that never occur
    ids = [0]
    for _ in range(length):
        ids.append(int(torch.multinomial(table[ids[-1]], 1, generator=generator)))
    return torch.tensor(ids)


def test_counts_are_those_of_a_slow_loop() -> None:
    ids = text(500)
    pairs, counts = bigram_counts(ids[:-1], ids[1:], 20)
    slow: dict[tuple[int, int], int] = {}
    for previous, following in zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True):
        slow[previous, following] = slow.get((previous, following), 0) + 1
    assert {(int(x), int(y)): int(n) for x, y, n in zip(*pairs, counts, strict=True)} == slow


def test_the_head_starts_as_the_smoothed_bigram_distribution() -> None:
    ids, vocab_size, rank = text(), 20, 24
    pairs, counts = bigram_counts(ids[:-1], ids[1:], vocab_size)
    w1, w2 = nn.Embedding(vocab_size, rank), nn.Linear(rank, vocab_size, bias=False)
    initialize_from_bigrams(w1, w2, pairs, counts, columns=rank)
    bias = w1.weight @ w2.weight.T  # full rank: nothing is lost
    occurring, first = torch.unique(pairs[1]), int(pairs[0, 0])
    share = unigram(pairs, counts, vocab_size)
    expected = torch.zeros(vocab_size, vocab_size, dtype=torch.float64)
    expected[pairs[0], pairs[1]] = association(pairs, counts, share)
    expected = (expected + share.clamp(min=1e-30).log())[:, occurring].log_softmax(-1)
    torch.testing.assert_close(bias[first, occurring].log_softmax(-1).double(), expected[first], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(bias[5, occurring].log_softmax(-1).double(), expected[5], atol=1e-3, rtol=1e-3)


def test_a_column_kept_for_the_draft_vocabulary_stays() -> None:
    ids = text(300)
    w1, w2 = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
    with torch.no_grad():
        w1.weight[:, -1], w2.weight[:, -1] = 1.0, -7.0
    initialize_from_bigrams(w1, w2, *bigram_counts(ids[:-1], ids[1:], 20), columns=7)
    assert bool((w1.weight[:, -1] == 1).all())
    assert bool((w2.weight[:, -1] == -7).all())
