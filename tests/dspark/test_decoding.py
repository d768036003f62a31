"""Plain and speculative decoding against the target's own full-sequence forward pass."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from small_models import a_drafter, tiny_target
from table_models import ScriptedProposer

from dspark.decoding.decoder import Decoder, Request, RequestError
from dspark.decoding.kv_cache import CacheFull, RaggedCache, RaggedStep
from dspark.decoding.proposers import ProposerError
from dspark.decoding.rounds import Completion, commit
from dspark.decoding.sampling import MIN_TEMPERATURE, SamplingConfig, SamplingError, probabilities, sample
from dspark.decoding.scheduling import FullBlock
from dspark.decoding.target import Target, TargetError

# A divergence is excused only where the target's two best logits are this close (float32).
GAP_TOLERANCE = 1e-3


def some_requests(count: int = 7, new_tokens: int = 14, stops: frozenset[int] = frozenset()) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    return [
        Request(
            request_id=f"r{index}",
            prompt_ids=torch.randint(3, 96, (2 + 7 * index % 23,), generator=generator).tolist(),
            max_new_tokens=new_tokens + index % 3,
            stop_token_ids=stops,
            seed=100 + index,
        )
        for index in range(count)
    ]


@cache
def shared_target(kind: str = "llama") -> Any:
    return tiny_target(kind)


_REFERENCES: dict[Any, tuple[list[int], list[float]]] = {}


def greedy_reference(target: Any, request: Request) -> tuple[list[int], list[float]]:
    """The slow loop: the whole sequence through the unmodified model for every token."""
    key = (target, tuple(request.prompt_ids), request.max_new_tokens, request.stop_token_ids)
    if key not in _REFERENCES:
        _REFERENCES[key] = _greedy_reference(target, request)
    return _REFERENCES[key]


@torch.no_grad()
def _greedy_reference(target: Any, request: Request) -> tuple[list[int], list[float]]:
    ids, gaps = list(request.prompt_ids), []
    for _ in range(request.max_new_tokens):
        logits = target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        top = logits.topk(2)
        gaps.append((top.values[0] - top.values[1]).item())
        ids.append(int(top.indices[0]))
        if ids[-1] in request.stop_token_ids:
            break
    return ids[len(request.prompt_ids) :], gaps


def assert_same_greedy(target: Any, request: Request, completion: Completion) -> None:
    expected, gaps = greedy_reference(target, request)
    for index, (ours, theirs) in enumerate(zip(completion.output_ids, expected, strict=False)):
        if ours != theirs:
            assert gaps[index] < GAP_TOLERANCE, f"{request.request_id} differs at {index}, logit gap {gaps[index]:.2g}"
            return
    assert len(completion.output_ids) == len(expected)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma4"])
@pytest.mark.parametrize("max_rows", [1, 3])
def test_plain_greedy_equals_the_full_forward(kind: str, max_rows: int) -> None:
    target = shared_target(kind)
    requests = some_requests(5)
    done = {c.request_id: c for c in Decoder(target, max_rows=max_rows, record_gaps=True).generate(requests)}
    assert sorted(done) == sorted(r.request_id for r in requests)
    for request in requests:
        completion = done[request.request_id]
        assert_same_greedy(target, request, completion)
        assert len(completion.logit_gaps) == len(completion.output_ids)
        assert completion.rounds == []


@pytest.mark.parametrize(
    "kind", ["vanilla", "gated", "rnn", "dflash", "mask-first", "reduced", "context-residual", "eagle3"]
)
def test_speculative_greedy_equals_plain_with_any_drafter(kind: str) -> None:
    target = shared_target()
    requests = some_requests()
    for max_rows in (1, 4):
        decoder = Decoder(target, a_drafter(target, kind), max_rows=max_rows)
        for completion in decoder.generate(requests):
            request = next(r for r in requests if r.request_id == completion.request_id)
            assert_same_greedy(target, request, completion)
            check_events(completion)


def check_events(completion: Completion) -> None:
    """What must hold of any completion's events."""
    text = completion.output_ids[:1]
    for number, event in enumerate(completion.rounds):
        assert event.round == number
        assert event.position == len(text)
        assert event.anchor_id == text[-1]
        assert 0 <= event.accepted_raw <= event.scheduled <= event.proposed == len(event.draft_ids)
        assert event.committed == len(event.committed_ids) <= event.accepted_raw + 1
        assert len(event.accepted) == len(event.reached) == len(event.acceptance_rate) == event.scheduled
        assert not (event.bonus and event.stop_cut)
        kept = event.committed - event.bonus
        assert event.committed_ids[:kept] == event.draft_ids[:kept]
        assert sum(event.accepted) <= event.accepted_raw
        text += event.committed_ids
    assert text == completion.output_ids


@pytest.mark.parametrize("algorithm", ["vanilla", "eagle3"])
@pytest.mark.parametrize(
    "config", [SamplingConfig(temperature=0.8), SamplingConfig(temperature=1.0, top_p=0.9, top_k=30)]
)
def test_sampling_does_not_depend_on_the_batch(algorithm: str, config: SamplingConfig) -> None:
    target = shared_target()
    drafter = a_drafter(target, algorithm)
    outputs = []
    for max_rows in (1, 3, 8):
        decoder = Decoder(target, drafter, sampling=config, max_rows=max_rows)
        outputs.append(
            {c.request_id: (c.output_ids, [e.draft_ids for e in c.rounds]) for c in decoder.generate(some_requests())}
        )
    assert outputs[0] == outputs[1] == outputs[2]
    again = Decoder(target, drafter, sampling=config).generate([replace(r, seed=r.seed + 1) for r in some_requests()])
    assert {c.request_id: c.output_ids for c in again} != {key: value[0] for key, value in outputs[0].items()}


def test_a_perfect_drafter_commits_whole_blocks() -> None:
    target = shared_target()
    request = some_requests(1, new_tokens=17)[0]
    expected, _ = greedy_reference(target, request)
    start = len(request.prompt_ids)

    def script(history: list[int], slots: int) -> tuple[list[int], float]:
        at = len(history) - start
        return (expected + [0] * slots)[at : at + slots], 0.0

    proposer = ScriptedProposer(script, block_size=4, vocab_size=97)
    (completion,) = Decoder(target, proposer).generate([request])
    assert completion.output_ids == expected
    assert completion.finish_reason == "length"
    # 1 from the prompt, 3 rounds of 5, and a last one cut to a single token by the limit.
    assert [event.committed for event in completion.rounds] == [5, 5, 5, 1]
    assert [event.accepted_raw for event in completion.rounds][:3] == [4, 4, 4]
    assert [event.bonus for event in completion.rounds] == [True, True, True, False]


def test_stop_token_inside_the_accepted_prefix() -> None:
    target = shared_target()
    base = some_requests(1, new_tokens=17)[0]
    expected, _ = greedy_reference(target, base)
    start = len(base.prompt_ids)
    stop = next(token for index, token in enumerate(expected) if index >= 3 and token not in expected[:index])
    at = expected.index(stop)

    def script(history: list[int], slots: int) -> tuple[list[int], float]:
        done = len(history) - start
        return (expected + [0] * slots)[done : done + slots], 0.0

    request = replace(base, stop_token_ids=frozenset([stop]))
    (completion,) = Decoder(target, ScriptedProposer(script, block_size=16, vocab_size=97)).generate([request])
    assert completion.output_ids == expected[: at + 1]
    assert completion.finish_reason == "stop"
    event = completion.rounds[-1]
    assert event.stop_cut
    assert not event.bonus
    assert event.committed == at
    assert sum(event.reached) == at == sum(event.accepted)
    assert event.accepted_raw > event.committed


def test_commit_ends_an_answer_in_one_place() -> None:
    stops = frozenset([9])
    assert commit([], 5, stops, 3).token_ids == [5]
    assert commit([], 9, stops, 3).finish_reason == "stop"
    assert commit([1, 2], 5, stops, 3).finish_reason == "length"
    whole = commit([1, 2], 5, stops, 4)
    assert (whole.token_ids, whole.bonus, whole.finish_reason) == ([1, 2, 5], True, None)
    cut = commit([1, 9, 2], 5, stops, 9)
    assert (cut.token_ids, cut.bonus, cut.stop_cut, cut.finish_reason) == ([1, 9], False, True, "stop")
    full = commit([1, 2, 3], 5, stops, 2)
    assert (full.token_ids, full.bonus, full.stop_cut, full.finish_reason) == ([1, 2], False, False, "length")
    assert commit([1, 2], 5, stops, 2).bonus is False
    at_limit = commit([1, 9], 5, stops, 2)
    assert at_limit.finish_reason == "stop"


def test_requests_that_cannot_be_decoded_are_named() -> None:
    target = shared_target()
    good = some_requests(1)[0]
    decoder = Decoder(target, max_length=40)
    assert decoder.why_not(good) is None
    for bad, words in (
        (replace(good, prompt_ids=[]), "empty prompt"),
        (replace(good, max_new_tokens=0), "0 new tokens"),
        (replace(good, prompt_ids=[5] * 300), "context is 256"),
        (replace(good, prompt_ids=[5] * 30), "max_length"),
        (replace(good, prompt_ids=[5, 97]), "97 is the id of no token"),
    ):
        why = decoder.why_not(bad)
        assert why is not None
        assert words in why
        with pytest.raises(RequestError, match="r0"):
            list(decoder.generate([good, bad]))
    assert list(decoder.generate([])) == []


def test_a_drafter_for_another_target_is_refused() -> None:
    target = tiny_target()
    drafter = a_drafter(target, "vanilla")
    target.layer_ids = (0, 1, 2)
    with pytest.raises(ProposerError, match="target_layer_ids"):
        Decoder(target, drafter)
    with pytest.raises(ProposerError, match="Linear"):
        Decoder(target, torch.nn.Linear(1, 1))


def test_wrong_temperature_table_is_refused() -> None:
    target = shared_target()
    with pytest.raises(RequestError, match="5 calibrated temperatures"):
        Decoder(target, a_drafter(target, "vanilla"), temperatures=[1.0] * 5, length_policy=FullBlock())


def test_cache_says_when_it_is_full() -> None:
    cache = RaggedCache(num_layers=1, rows=2, capacity=8)
    with pytest.raises(CacheFull, match="max_length"):
        cache.begin(RaggedStep([0, 1], [6, 7], [1, 2], torch.device("cpu")))


def test_logits_that_are_not_finite_name_the_request_and_the_place() -> None:
    """Embedding row 50 is what the damage stands in; a request reads it in its prompt, or first after its answer."""
    target = tiny_target()
    good, bad = some_requests(2)
    with torch.no_grad():
        target.embed_tokens.weight[50] = torch.nan
    target.lm_head = torch.nn.Linear(32, 97, bias=False)
    prompt = replace(bad, prompt_ids=[5, 50, 7])
    place = (
        r"request 'r1': the target's logits for token 0 of its answer \(position 3\) are not finite; .*target\.dtype"
    )
    for temperature in (0.0, 1.0):
        with pytest.raises(RequestError, match=place):
            list(Decoder(target, sampling=SamplingConfig(temperature=temperature)).generate([good, prompt]))
    with torch.no_grad():
        target.lm_head.weight[:] = 0
        target.lm_head.weight[50] = torch.randn(32) * 100  # r0 or r1 writes token 50 at once, whichever it favours
    with pytest.raises(RequestError, match=r"request 'r.': the target's logits for token 1 of its answer"):
        list(Decoder(target, sampling=SamplingConfig(temperature=1.0)).generate([good, bad]))


def test_draft_logits_that_are_not_finite_are_the_drafters() -> None:
    target = shared_target()
    drafter = a_drafter(target, "vanilla")
    with torch.no_grad():
        drafter.sequential_head.markov_w2.weight[:] = torch.inf
    with pytest.raises(RequestError, match="request 'r0': the drafter's logits for token 1 of its answer"):
        list(Decoder(target, drafter).generate(some_requests(1)))


def test_the_lowest_temperature_is_greedy_and_lower_ones_are_refused() -> None:
    logits = torch.tensor([[3e30, -1e38, 2.9e30], [0.0, 1.0, 2.0]])
    lowest = SamplingConfig(temperature=MIN_TEMPERATURE)
    assert probabilities(logits, lowest).tolist() == [[1, 0, 0], [0, 0, 1]]
    assert sample(logits, replace(lowest, top_k=2), torch.tensor([0.999, 0.0])).tolist() == [0, 2]
    for wrong in (1e-38, 1e-6, -1.0, float("nan"), float("inf")):
        with pytest.raises(SamplingError, match=r"expected 0 \(greedy\), 1e-05 or more"):
            SamplingConfig(temperature=wrong)


class ShortTokenizer:
    """Has fewer ids than the target has logits."""

    eos_token_id = None

    def __init__(self) -> None:
        self.added_tokens_decoder = {88: "<last>"}

    def __len__(self) -> int:
        return 80


def test_ids_beyond_the_tokenizer_are_never_read() -> None:
    target = Target(shared_target().model, ShortTokenizer(), target_layer_ids=(0, 2, 4))
    assert target.input_vocab_size == 89
    decoder = Decoder(target, sampling=SamplingConfig(temperature=3.0), max_rows=4)
    requests = [replace(r, prompt_ids=[i % 89 for i in r.prompt_ids], max_new_tokens=60) for r in some_requests(12)]
    masked = replace(requests[0], prompt_ids=[5, 96])
    assert "96 is the id of no token: ids are 0 to 88" in str(decoder.why_not(masked))
    with pytest.raises(TargetError, match="89 is the id of no token"):
        target.capture(torch.tensor([[5, 89, 7]]))
    done = list(decoder.generate(requests))
    assert any(completion.output_ids[-1] > 88 for completion in done)
    for completion in done:
        assert max(completion.output_ids[:-1], default=0) <= 88
