"""Speculative decoding has the target's distribution, exactly enumerated; and the test would notice if it had not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lossless_cases import POLICIES, against_enumeration, appendix_a, retrospective, without_the_residual
from table_models import chi_squared, chi_squared_limit

import dspark.decoding.sampling
from dspark.decoding.sampling import SamplingConfig, draw, probabilities, residual, sample, uniforms, verify
from dspark.decoding.scheduling import FullBlock, algorithm_1, global_search

# A short form of benchmarks/evidence/losslessness.py, which has 200,000 sequences a case.
SEQUENCES = 12_000


@pytest.mark.parametrize("policy", [*POLICIES, None])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_output_has_the_target_distribution(policy: str | None, temperature: float) -> None:
    chosen = None if policy is None else POLICIES[policy]()
    sampling = SamplingConfig(temperature=temperature)
    statistic, freedom = against_enumeration(chosen, sampling, SEQUENCES, 3, drafting=policy is not None)
    assert statistic < chi_squared_limit(freedom)


@pytest.mark.parametrize("cut", [{"top_p": 0.8}, {"top_k": 2}, {"top_p": 0.75, "top_k": 2}])
def test_output_has_the_cut_distribution(cut: dict[str, Any]) -> None:
    sampling = SamplingConfig(temperature=0.9, **cut)
    statistic, freedom = against_enumeration(FullBlock(), sampling, SEQUENCES, 3, drafting=True)
    assert statistic < chi_squared_limit(freedom)


def test_accepting_without_the_residual_is_noticed() -> None:
    with without_the_residual():
        statistic, freedom = against_enumeration(
            FullBlock(), SamplingConfig(temperature=1.0), SEQUENCES, 4, drafting=True
        )
    assert statistic > chi_squared_limit(freedom)


@pytest.mark.parametrize(("rule", "first_token"), [(algorithm_1, 0.70), (global_search, 0.85)])
def test_appendix_a(rule: Any, first_token: float) -> None:
    """Looking ahead shifts the output from (0.70, 0.30) to (0.85, 0.15), and the test rejects it."""
    count = 6000
    share = appendix_a(rule, count)[0,] / count
    error = (first_token * (1 - first_token) / count) ** 0.5
    assert abs(share - first_token) < 4 * error
    if rule is global_search:
        assert abs(share - 0.70) > 20 * error
        statistic, freedom = retrospective(count)
        assert statistic > chi_squared_limit(freedom)


def test_toy_values_of_the_rejection_rule() -> None:
    p_target, p_draft = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.7, 0.18, 0.12])
    assert torch.minimum(p_target, p_draft).sum().item() == pytest.approx(0.80)
    assert residual(p_target, p_draft).tolist() == pytest.approx([0.0, 0.6, 0.4])
    assert residual(p_target, p_target).tolist() == pytest.approx(p_target.tolist())


def test_a_million_single_drafts() -> None:
    """Draft, accept or replace, on a three-token toy: the target's distribution, and the analytic acceptance rate."""
    count, sampling = 1_000_000, SamplingConfig(temperature=1.0)
    p_target, p_draft = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.7, 0.18, 0.12])
    seeds = np.arange(count)
    u = [torch.from_numpy(uniforms(seeds, 0, 0, purpose)) for purpose in dspark.decoding.sampling.Purpose]
    drafts = draw(p_draft.expand(count, 3), u[1])
    logits = p_target.log().expand(count, 2, 3)
    verdict = verify(
        logits, drafts[:, None], p_draft.expand(count, 1, 3), torch.ones(count, dtype=torch.long), sampling,
        u[2][:, None].expand(count, 2), u[0][:, None].expand(count, 2),
    )  # fmt: skip
    accepted = np.array(verdict.accepted)
    first = np.where(accepted == 1, drafts.numpy(), np.array(verdict.next_ids))
    counts = {(token,): int(n) for token, n in enumerate(np.bincount(first, minlength=3))}
    statistic, freedom = chi_squared(counts, {(token,): p for token, p in enumerate(p_target.tolist())})
    assert statistic < chi_squared_limit(freedom)
    assert accepted.mean() == pytest.approx(0.80, abs=4 * (0.16 / count) ** 0.5)
    assert verdict.rates[0] == pytest.approx([0.80])


def test_uniforms_are_even_and_uncorrelated() -> None:
    u = uniforms(np.arange(400)[:, None], np.arange(500), 7, dspark.decoding.sampling.Purpose.DRAFT)
    assert u.shape == (400, 500)
    assert u.min() >= 0
    assert u.max() < 1
    counts = {(int(k),): int(n) for k, n in enumerate(np.histogram(u, bins=100, range=(0, 1))[0])}
    statistic, freedom = chi_squared(counts, {(k,): 0.01 for k in range(100)})
    assert statistic < chi_squared_limit(freedom)
    others = [
        uniforms(np.arange(400)[:, None], np.arange(500), 8, dspark.decoding.sampling.Purpose.DRAFT),
        uniforms(np.arange(400)[:, None], np.arange(500), 7, dspark.decoding.sampling.Purpose.ACCEPT),
        np.roll(u, 1, axis=0),
        np.roll(u, 1, axis=1),
    ]
    for other in others:
        assert abs(np.corrcoef(u.ravel(), other.ravel())[0, 1]) < 0.012


def test_sampling_settings_restated() -> None:
    """probabilities() and sample() against a slow restatement, on a vocabulary larger than the candidate list."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3000, generator=generator) * torch.tensor([[0.1], [1.0], [3.0], [8.0]])
    u = torch.rand(4, generator=generator, dtype=torch.float64)
    for settings in ({}, {"top_p": 0.9}, {"top_k": 20}, {"top_k": 50, "top_p": 0.8}, {"top_k": 5000}):
        config = SamplingConfig(temperature=0.7, **settings)
        probs = probabilities(logits, config)
        for row in range(4):
            expected = (logits[row].double() / 0.7).softmax(-1).numpy()
            order = np.argsort(-expected, kind="stable")
            if 0 < config.top_k < 3000:
                expected[order[config.top_k :]] = 0
                expected /= expected.sum()
            ahead = np.cumsum(expected[order]) - expected[order]
            expected[order[ahead >= config.top_p]] = 0
            expected /= expected.sum()
            assert probs[row].numpy() == pytest.approx(expected, abs=2e-5)
        assert sample(logits, config, u).tolist() == draw(probs, u).tolist()
    assert sample(logits, SamplingConfig(), u).tolist() == logits.argmax(-1).tolist()
    # A token of probability zero is never drawn, not even at the very end.
    assert draw(torch.tensor([0.0, 1.0, 0.0]), torch.tensor(1.0 - 1e-16)).item() == 1
    assert draw(torch.tensor([0.0, 1.0, 0.0]), torch.tensor(0.0)).item() == 1
    for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}):
        with pytest.raises(dspark.decoding.sampling.SamplingError):
            SamplingConfig(**wrong)
