"""vLLM drafts from what we publish, on a CPU: DFlash in its own layout, and EAGLE-3.

Each drafter is overfitted on a small random target's answers to a few prompts, published through the publisher and its
checks, and served from that folder. No run is needed.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from llamacpp.comparison import Round, RoundAgreement, compare_rounds, first_difference
from llamacpp.results import record
from overfitted import contract_of, decode, overfit, samples_of, small_target
from vllm_cpu.toolchain import Generated, VllmCpu, prepare

from dspark.decoding.decoder import Completion
from dspark.decoding.target import Target
from pipelines.publishing.publication import Publication, publish
from storage.cache.shards import StoredRow

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("DSPARK_ENGINES_CACHE", ROOT / ".engines"))
STEPS, TOKENS = 150, 64
PROMPTS = ([1, 409, 198, 195, 2], [44, 8, 4, 15, 16, 2, 9], [3, 100, 200, 300, 400, 500])


@dataclass(frozen=True, kw_only=True)
class Kind:
    """`folder` is what vLLM opens, below the published one."""

    parts: dict[str, Any]
    method: str
    folder: str = "."
    draft_vocabulary: int | None = None


EAGLE = {"algorithm": "eagle3"}
DFLASH = {"algorithm": "dflash", "num_draft_layers": 1}
KINDS = {
    "DFlash, its own layout": Kind(parts={**DFLASH, "block_layout": "mask-first"}, method="dflash"),
    "DFlash, speculators layout, reduced vocabulary": Kind(
        parts={**DFLASH, "block_layout": "mask-first"}, method="dflash", folder="speculators", draft_vocabulary=256
    ),
    "EAGLE-3, speculators layout": Kind(parts=EAGLE, method="eagle3", folder="speculators"),
    "EAGLE-3, speculators layout, reduced vocabulary": Kind(
        parts=EAGLE, method="eagle3", folder="speculators", draft_vocabulary=256
    ),
}


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """The target, what it was asked, what it answered, and what it thought."""

    folder: Path
    target: Target
    prompts: list[list[int]]
    plain: list[Completion]
    samples: list[StoredRow]


@pytest.fixture(scope="module")
def engine() -> VllmCpu:
    return prepare(CACHE)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Learnt:
    torch.set_num_threads(1)  # models this small only lose time to threads
    folder = tmp_path_factory.mktemp("target")
    target, prompts = small_target(folder), [list(prompt) for prompt in PROMPTS]
    plain = decode(target, None, prompts, TOKENS)
    # The last answer is not learnt: there drafts are right for a token or two.
    samples = samples_of(target, prompts[:-1], [completion.output_ids for completion in plain[:-1]])
    return Learnt(folder=folder, target=target, prompts=prompts, plain=plain, samples=samples)


def draft_tokens(learnt: Learnt, size: int) -> torch.Tensor:
    """The answers' tokens and the first ids, `size` in all."""
    needed = torch.cat([sample.input_ids for sample in learnt.samples]).unique()
    others = torch.arange(learnt.target.vocab_size)
    others = others[~torch.isin(others, needed)]
    return torch.cat([needed, others[: size - len(needed)]]).sort().values


def rounds_of(answer: Generated) -> list[Round]:
    """The engine's rounds; the first step is the prompt's own and drafts nothing."""
    rounds, position = [], 0
    for given, draft in zip(answer.steps, answer.drafts, strict=True):
        if draft:
            rounds.append(Round(position=position, draft_ids=tuple(draft), accepted=given - 1))
        position += given
    return rounds


def within(rounds: list[Round], limit: int) -> list[Round]:
    """Without a round that reaches the limit, where what is cut off depends on the decoder."""
    return [r for r in rounds if r.position + len(r.draft_ids) + 1 <= limit]


def test_plain_text_is_ours(engine: VllmCpu, learnt: Learnt) -> None:
    answers = engine.generate(learnt.folder, None, learnt.prompts, max_tokens=TOKENS, threads=1, log="vllm-plain")
    for mine, theirs in zip(learnt.plain, answers, strict=True):
        assert first_difference(mine.output_ids, theirs.output_ids) is None


@pytest.mark.parametrize("name", KINDS)
def test_text_drafts_and_acceptance_are_ours(name: str, engine: VllmCpu, learnt: Learnt, tmp_path: Path) -> None:
    kind, target = KINDS[name], learnt.target
    tokens = None if kind.draft_vocabulary is None else draft_tokens(learnt, kind.draft_vocabulary)
    drafter = overfit(target, learnt.samples, steps=STEPS, draft_tokens=tokens, **kind.parts)
    publish(
        Publication(
            name="overfitted",
            drafter=drafter,
            target=target,
            contract=contract_of(target, drafter, str(learnt.folder)),
            layouts=("speculators",),
        ),
        tmp_path / "published",
    )
    ours = decode(target, drafter, learnt.prompts, TOKENS)
    speculative = {
        "method": kind.method,
        "model": str(tmp_path / "published" / kind.folder),
        "num_speculative_tokens": drafter.block_size,
    }
    answers = engine.generate(
        learnt.folder,
        speculative,
        learnt.prompts,
        max_tokens=TOKENS,
        threads=1,
        log=f"vllm-{list(KINDS).index(name)}",
    )
    total = RoundAgreement()
    for plain, mine, theirs in zip(learnt.plain, ours, answers, strict=True):
        assert first_difference(plain.output_ids, mine.output_ids) is None
        assert first_difference(plain.output_ids, theirs.output_ids) is None
        rounds = [
            Round(position=r.position, draft_ids=tuple(r.draft_ids), accepted=r.accepted_raw) for r in mine.rounds
        ]
        total += compare_rounds(within(rounds, TOKENS), within(rounds_of(theirs), TOKENS), TOKENS)
    record(
        "vllm-cpu.json",
        name,
        total.figures(),
        engine=engine.version,
        engine_sha256=None,
        steps=STEPS,
        block=drafter.block_size,
        prompts=len(learnt.prompts),
    )
    assert total.ours == total.engine == total.same_accepted
    assert total.tokens_equal == total.tokens_compared
    assert total.ours_accepted > total.ours // 4, "little is accepted: this proves little"
