"""What losslessness is shown with: a small target, a deliberately bad drafter, every length policy, and wrong rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from table_models import TableProposer, TableTarget, chi_squared, exact_sequences

import dspark.decoding.sampling
from dspark.decoding.decoder import Decoder, Request
from dspark.decoding.sampling import SamplingConfig
from dspark.decoding.scheduling import (
    CostTable,
    FullBlock,
    LengthPolicy,
    Scheduler,
    StaticLength,
    Threshold,
    TwoStepsBehind,
    global_search,
)

TARGET = [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.45, 0.1, 0.45]]
# Bad on purpose: confident in what the target finds unlikely.
DRAFT = [[0.1, 0.2, 0.7], [0.7, 0.18, 0.12], [0.05, 0.9, 0.05]]
CONFIDENCE = [2.0, -1.0, 0.3]
JAGGED = CostTable((1, 40, 400, 500, 900), (10.0, 9.0, 5.0, 2.0, 1.9))
APPENDIX_A = CostTable((1, 2, 3), (1.0, 0.5, 0.45))

POLICIES: dict[str, Callable[[], LengthPolicy]] = {
    "full": FullBlock,
    "static": lambda: StaticLength(1),
    "threshold": lambda: Threshold(0.5),
    "scheduler": lambda: Scheduler(JAGGED),
    "two-steps-behind": lambda: TwoStepsBehind(JAGGED),
}


class PerRow(LengthPolicy):
    """A rule applied to every row by itself, as if it were alone in its batch."""

    name = "per-row"
    needs_confidence = True

    def __init__(self, rule: Any) -> None:
        self.rule = rule

    def lengths(self, survival: Any, rows: int, slots: int) -> Any:
        return np.array([self.rule(survival[row : row + 1], APPENDIX_A)[0] for row in range(rows)])


def outputs(
    target: Any, proposer: Any, policy: LengthPolicy | None, sampling: SamplingConfig, count: int, length: int
) -> Counter[tuple[int, ...]]:
    """How often each sequence of so many tokens is answered to the prompt [0]."""
    decoder = Decoder(target, proposer, sampling=sampling, max_rows=256, length_policy=policy)
    requests = [
        Request(request_id=str(seed), prompt_ids=[0], max_new_tokens=length, seed=seed) for seed in range(count)
    ]
    return Counter(tuple(completion.output_ids) for completion in decoder.generate(requests))


def against_enumeration(
    policy: LengthPolicy | None, sampling: SamplingConfig, count: int, length: int, *, drafting: bool
) -> tuple[float, int]:
    """Pearson's statistic against exact enumeration, and its degrees of freedom."""
    proposer = TableProposer(DRAFT, CONFIDENCE, block_size=3) if drafting else None
    counts = outputs(TableTarget(TARGET), proposer, policy, sampling, count, length)
    return chi_squared(counts, exact_sequences(TARGET, 0, length, sampling))


@contextmanager
def without_the_residual() -> Iterator[None]:
    """A wrong rule: a rejected draft is replaced by a token of the target's whole distribution."""
    with patch.object(dspark.decoding.sampling, "residual", lambda p_target, _: p_target):
        yield


class LookingBack(TableProposer):
    """Appendix A: the second confidence is 0.9 after token 0 and 0 after token 1; slot 1 survives with 0.8."""

    def __init__(self) -> None:
        self.first = float(np.log(0.8 / 0.2))
        super().__init__([[0.5, 0.5, 1e-9]] * 3, [np.log(0.9 / 0.1), -1e9, self.first], block_size=2)

    def propose(self, anchors: list[int], *rest: Any) -> Any:
        proposal = super().propose(anchors, *rest)
        assert proposal.confidence_logits is not None
        proposal.confidence_logits[:, 0] = self.first
        return proposal


APPENDIX_TARGET = [[0.7, 0.3, 1e-9]] * 3


def appendix_a(rule: Any, count: int) -> Counter[tuple[int, ...]]:
    """The tokens that follow the prompt's own, in Appendix A's setting, when `rule` chooses the lengths."""
    decoder = Decoder(
        TableTarget(APPENDIX_TARGET),
        LookingBack(),
        sampling=SamplingConfig(temperature=1.0),
        max_rows=256,
        length_policy=PerRow(rule),
    )
    requests = [Request(request_id=str(i), prompt_ids=[2], max_new_tokens=2, seed=i) for i in range(count)]
    # Output token 1 is the first of a round; token 0 comes from the prompt's pass.
    return Counter((completion.output_ids[1],) for completion in decoder.generate(requests))


def retrospective(count: int) -> tuple[float, int]:
    """Appendix A's wrong rule, a search over everything after the tokens are known, against the target."""
    expected = {(token,): chance for token, chance in enumerate(torch.tensor(APPENDIX_TARGET[0]).tolist())}
    return chi_squared(appendix_a(global_search, count), expected)
