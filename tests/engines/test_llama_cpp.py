"""llama.cpp repeats a run's evaluation: same greedy text, same drafts, same accepted drafts a round.

1. Fetch and build llama.cpp (cached), convert target and published drafter to float32 GGUF (cached).
2. Serve the target alone, then with the drafter; ask for every evaluation prompt at temperature 0.
3. Compare four outputs of each prompt (ours and the engine's, plain and speculative) and all rounds.
4. Leave what was found in `results/llama-cpp.json`, which docs/engines.md quotes.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from llamacpp.comparison import RoundAgreement, compare_rounds, first_difference, place, without_stop
from llamacpp.results import record
from llamacpp.run_directory import Case, FinishedRun, read_run
from llamacpp.server import EngineCompletion, serve
from llamacpp.toolchain import LlamaCpp, prepare

from dspark.decoding.target import Target

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("DSPARK_ENGINES_CACHE", ROOT / ".engines"))
THREADS = int(os.environ.get("DSPARK_ENGINES_THREADS", os.cpu_count() or 1))

# Stated before anything was measured.
LOGIT_GAP = 1e-3  # where two float32 outputs part, our two best logits must be closer than this
ACCEPTED_PER_ROUND = 0.02  # absolute difference of the mean number of accepted drafts a round
IDENTICAL_ROUNDS = 0.98  # share of our rounds that the engine repeats: same position, same number accepted
EQUAL_DRAFT_TOKENS = 0.99  # share of equal tokens in rounds at the same position


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """A run and its repetition by the engine, prompt by prompt in the order of `run.cases`."""

    run: FinishedRun
    plain: list[EngineCompletion]
    speculative: list[EngineCompletion]

    def outputs(self, index: int) -> dict[str, list[int]]:
        """The four greedy answers to one prompt, each up to its stop token."""
        case = self.run.cases[index]
        answers = {
            "ours plain": case.plain_ids,
            "ours speculative": case.speculative_ids,
            "llama.cpp plain": self.plain[index].output_ids,
            "llama.cpp speculative": self.speculative[index].output_ids,
        }
        return {name: without_stop(ids, self.run.stop_token_ids) for name, ids in answers.items()}

    def agreement(self, index: int) -> RoundAgreement:
        case, answer = self.run.cases[index], self.speculative[index]
        engine = place([(r.draft_ids, r.accepted) for r in answer.rounds])
        return compare_rounds(case.rounds, engine, self.run.max_new_tokens)


@pytest.fixture(scope="module")
def tools() -> LlamaCpp:
    return prepare(CACHE)


@pytest.fixture(scope="module")
def run() -> FinishedRun:
    return read_run((ROOT / os.environ.get("DSPARK_RUN", "runs/quickstart")).resolve())


@pytest.fixture(scope="module")
def target(run: FinishedRun) -> Target:
    return Target.open(run.target, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def repeated(tools: LlamaCpp, run: FinishedRun) -> Repeated:
    target_gguf = tools.convert_target(run.target)
    drafter_gguf = tools.convert_drafter(run.drafter, run.target)
    logs = CACHE / "logs"
    answers = {}
    for name, drafter in (("plain", None), ("speculative", drafter_gguf)):
        log = logs / f"{name}.log"
        with serve(tools, target_gguf, drafter, block_size=run.block_size, threads=THREADS, log=log) as server:
            answers[name] = [_ask(server, case, run, name, i) for i, case in enumerate(run.cases)]
    return Repeated(run=run, **answers)


def _ask(server: Any, case: Case, run: FinishedRun, name: str, index: int) -> EngineCompletion:
    print(f"\r{name}: {index + 1}/{len(run.cases)} {case.request_id:40s}", end="", flush=True)
    return server.complete(case.prompt_ids, run.max_new_tokens)


def test_text_equals_plain_greedy_decoding(repeated: Repeated, target: Target) -> None:
    """Four ways to the same text; where one parts from ours, the two tokens were a tie within LOGIT_GAP."""
    ties, faults = [], []
    for index, case in enumerate(repeated.run.cases):
        outputs = repeated.outputs(index)
        reference = outputs.pop("ours plain")
        for name, ids in outputs.items():
            at = first_difference(reference, ids)
            if at is not None:
                gap = _gap_between(target, case.prompt_ids, reference, ids, at, repeated.run.stop_token_ids)
                found = {"request_id": case.request_id, "output": name, "token": at, "logit_gap": round(gap, 6)}
                (ties if gap <= LOGIT_GAP else faults).append(found)
    _record(
        repeated, "text", {"prompts": len(repeated.run.cases), "ties": ties, "faults": faults, "logit_gap": LOGIT_GAP}
    )
    assert not faults


def test_engine_drafts_and_accepts_what_our_evaluation_did(repeated: Repeated) -> None:
    total = RoundAgreement()
    domains: dict[str, RoundAgreement] = {}
    for index, case in enumerate(repeated.run.cases):
        found = repeated.agreement(index)
        total += found
        domains[case.domain] = domains.get(case.domain, RoundAgreement()) + found
    server_accepted = sum(answer.accepted_n for answer in repeated.speculative)
    log_accepted = sum(r.accepted for answer in repeated.speculative for r in answer.rounds)
    seconds = {name: sum(a.seconds for a in getattr(repeated, name)) for name in ("plain", "speculative")}
    tokens = {name: sum(len(a.output_ids) for a in getattr(repeated, name)) for name in ("plain", "speculative")}
    _record(
        repeated,
        "rounds",
        {
            **total.figures(),
            "domains": {name: found.figures() for name, found in sorted(domains.items())},
            "tolerances": {
                "accepted_per_round": ACCEPTED_PER_ROUND,
                "share_of_rounds_with_equal_accepted": IDENTICAL_ROUNDS,
                "share_of_equal_draft_tokens": EQUAL_DRAFT_TOKENS,
            },
            "engine_tokens_per_second": {name: round(tokens[name] / seconds[name], 2) for name in seconds},
        },
    )
    assert log_accepted == server_accepted, "rounds read from the log do not add up to the server's own total"
    assert total.tokens_equal >= EQUAL_DRAFT_TOKENS * total.tokens_compared
    assert total.share_identical >= IDENTICAL_ROUNDS
    assert abs(total.ours_per_round - total.engine_per_round) <= ACCEPTED_PER_ROUND


@torch.no_grad()
def _gap_between(
    target: Target,
    prompt_ids: tuple[int, ...],
    reference: list[int],
    other: list[int],
    at: int,
    stop_ids: frozenset[int],
) -> float:
    """Difference of our float32 logits for the two tokens at the place where outputs part; an end is a stop token."""
    context = torch.tensor([[*prompt_ids, *reference[:at]]])
    logits = target.model(context).logits[0, -1]

    def best(ids: list[int]) -> torch.Tensor:
        return logits[ids[at]] if at < len(ids) else logits[sorted(stop_ids)].max()

    return float((best(reference) - best(other)).abs())


def _record(repeated: Repeated, section: str, found: dict[str, Any]) -> None:
    run = repeated.run
    with (run.drafter / "model.safetensors").open("rb") as file:
        weights = hashlib.file_digest(file, "sha256").hexdigest()
    name = os.environ.get("DSPARK_ENGINES_RESULT", "llama-cpp.json")
    record(name, section, found, run=run.folder.name, published_weights_sha256=weights)
