"""Made-up evaluations whose true figures are known, and a report with everything in it."""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from dspark.calibration import SlotCalibration
from dspark.decoding.rounds import Completion, RoundEvent
from dspark.decoding.step_costs import CostTable, StepCosts
from pipelines.evaluation.round_log import COMPLETION_SCHEMA, EVENT_SCHEMA, Labels, completion_table, event_table
from pipelines.evaluation.serving import serving, split_of
from pipelines.reporting.report import ReportInputs, build_report, conversation_summary

TEXT = (
    "The little bicycle stood by the river and nobody knew whose it was . In the morning a child came , looked at it "
    "for a while and rode away , ringing the bell at every corner of the town until the whole street was awake"
)
WORDS = TEXT.split()
RATES = {"chat": 0.62, "mathematics": 0.82, "code": 0.74}


def decode(ids: Any) -> str:
    return "".join(" " + WORDS[token % len(WORDS)] for token in ids)


def simulate(
    request_id: str,
    *,
    rate: float,
    decay: float = 0.97,
    block: int = 7,
    tokens: int = 80,
    seed: int = 0,
    overconfidence: float = 2.0,
    stop: bool = True,
    gaps: float = 1.0,
) -> Completion:
    """An answer whose slot k is accepted with probability rate * decay**k plus noise that the confidence knows."""
    rng = np.random.default_rng([seed, zlib.crc32(request_id.encode())])
    text = rng.integers(0, len(WORDS), size=tokens + block + 2).tolist()
    rounds: list[RoundEvent] = []
    position = 1
    while position < tokens:
        logits = np.log(rate / (1 - rate)) + np.log(decay) * 3 * np.arange(block) + rng.normal(0, 1.0, size=block)
        truth = 1 / (1 + np.exp(-logits))
        hits = rng.random(block) < truth
        raw = int(np.cumprod(hits).sum()) if block else 0
        room = tokens - position
        last = position + raw + 1 >= tokens
        kept = min(raw, room)
        cut = last and stop and raw >= room
        bonus = raw < room
        committed = text[position : position + kept] + ([text[position + kept]] if bonus else [])
        drafts = text[position : position + raw] + [(text[position + i] + 7) % len(WORDS) for i in range(raw, block)]
        reached = [i <= raw for i in range(block)]
        rounds.append(
            RoundEvent(
                round=len(rounds),
                position=position,
                anchor_id=text[position - 1],
                draft_ids=drafts,
                proposed=block,
                scheduled=block,
                accepted_raw=raw,
                committed=len(committed),
                bonus=bonus,
                stop_cut=cut,
                confidence_logits=[float(x) for x in logits * overconfidence],
                accepted=[bool(i < raw) for i in range(block)],
                reached=reached,
                acceptance_rate=[float(t) if r else 0.0 for t, r in zip(truth, reached, strict=True)],
                committed_ids=committed,
                draft_ms=9.0 if block else 0.0,
                verify_ms=31.0 if block else 22.0,
                batch_rows=4,
                batch_tokens=4 * (block + 1),
            )
        )
        position += len(committed)
    return Completion(
        request_id=request_id,
        prompt_ids=[1, 2, 3],
        output_ids=text[:position],
        finish_reason="stop" if stop else "length",
        rounds=rounds,
        seconds=0.01 * position,
        logit_gaps=[gaps] * position,
    )


def labels(
    drafter: str = "dspark",
    temperature: float = 0.0,
    domain: str = "chat",
    *,
    prompt_id: str = "chat-000",
    seed: int = 1,
) -> Labels:
    return Labels(
        prompt_id=prompt_id,
        domain=domain,
        split="evaluation",
        seed=seed,
        temperature=temperature,
        drafter=drafter,
        policy="full",
    )


@cache
def evaluation(requests: int = 5, block: int = 7, tokens: int = 60) -> tuple[pa.Table, pa.Table]:
    """Three drafters, two temperatures, three domains."""
    events, completions = [EVENT_SCHEMA.empty_table()], [COMPLETION_SCHEMA.empty_table()]
    for drafter, loss, decay, size in (
        ("dspark", 0.0, 0.98, block),
        ("no-sequential-head", 0.08, 0.86, block),
        ("plain", 0.5, 1.0, 0),
    ):
        for temperature in (0.0, 1.0):
            for domain, rate in RATES.items():
                for index in range(requests):
                    completion = simulate(
                        f"{domain}-{index:03}",
                        rate=rate - loss - 0.06 * temperature,
                        decay=decay,
                        block=size,
                        tokens=tokens,
                        seed=int(temperature),
                        stop=index % 3 > 0,
                    )
                    named = labels(drafter, temperature, domain, prompt_id=completion.request_id)
                    events.append(event_table(completion, named))
                    completions.append(completion_table(completion, named))
    return pa.concat_tables(events), pa.concat_tables(completions)


# Flat up to 48 tokens, then by the token; drafting grows with the users.
SIZES = (1, 16, 48, 96, 192, 384)
COSTS = StepCosts(
    CostTable(SIZES, tuple(1 / (0.02 * max(1.0, n / 48)) for n in SIZES), "toy"),
    (1, 64),
    (0.003, 0.02),
    {"device": "toy"},
)
LOADS = (1, 2, 4, 8, 16, 32, 64, 128)


def served(users: int = 4) -> pa.Table:
    """Events of an engine under the load of so many users: whole blocks, and no drafting."""
    tables = []
    for policy, drafter, block in (("none", "plain", 0), ("full", "dspark", 7)):
        for index in range(2 * users):
            completion = simulate(f"chat-{index:03}", rate=0.62, block=block, tokens=30)
            named = Labels(
                prompt_id=completion.request_id,
                domain="chat",
                split=split_of(users),
                seed=0,
                temperature=1.0,
                drafter=drafter,
                policy=policy,
            )
            tables.append(event_table(completion, named))
    return pa.concat_tables(tables)


def serving_figures(events: pa.Table) -> dict[str, Any] | None:
    return serving(
        events,
        served(),
        COSTS,
        SlotCalibration((2.0,) * 7),
        temperature=1.0,
        users=LOADS,
        static_length=3,
        threshold=0.5,
    )


def training_log(steps: int = 400) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        progress = 1 - np.exp(-step / 90)
        row = {
            "step": step,
            "loss": float(2.4 - 1.5 * progress + rng.normal(0, 0.04)),
            "expected_tau": float(1.1 + 1.6 * progress + rng.normal(0, 0.04)),
            "ce": float(6 - 3.4 * progress + rng.normal(0, 0.1)),
            "learning_rate": 6e-4 * min(1, step / 16) * (0.5 + 0.5 * float(np.cos(np.pi * step / steps))),
        }
        if step % 50 == 0:
            row |= {"validation_loss": float(2.45 - 1.42 * progress), "validation_expected_tau": 1.05 + 1.5 * progress}
        rows.append(row)
    return rows


def conversations() -> list[dict[str, Any]]:
    return [
        {
            "id": f"{domain}-{index:03}",
            "domain": domain,
            "split": "train",
            "conversations": [
                {"role": "user", "content": "List three facts about bicycles."},
                {"role": "assistant", "content": "1. They have two wheels.\n2. They need no fuel.\n3. They are quick."},
            ],
            "response_ids": list(range(40)),
            "finish_reason": "stop" if index % 5 else "length",
            "generator": {"target": "SmolLM2-135M-Instruct", "revision": None},
            "thinking": "off",
        }
        for domain in RATES
        for index in range(192)
    ]


def full_inputs(**changes: Any) -> ReportInputs:
    """A report with every section filled."""
    events, completions = evaluation()
    values: dict[str, Any] = {
        "title": "A DSpark drafter for SmolLM2-135M-Instruct",
        "created": "2026-11-29T18:00:00+00:00",
        "events": events,
        "completions": completions,
        "target": {"name": "SmolLM2-135M-Instruct", "revision": None, "hidden_size": 576, "num_layers": 30},
        "drafter": {
            "algorithm": "dspark",
            "block_size": 7,
            "markov_rank": 256,
            "markov_head_type": "vanilla",
            "num_draft_layers": 2,
        },
        "contract": {"target_layer_ids": [1, 7, 14, 21, 27], "block_layout": "anchor-first", "thinking": "off"},
        "calibration": {"temperatures": [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0], "fitted_on": "calibration", "rounds": 900},
        "serving": serving_figures(events),
        "training": training_log(),
        "cache": {
            "rows": 576,
            "tokens": 92_160,
            "bytes": 288_900_000,
            "bytes_per_token": {"context": 2712.7, "teacher": 412.3, "other": 9.8, "all": 3134.8},
            "raw_bytes_per_token": 6912,
            "codecs": {"context": {"name": "int8", "error": 0.004}, "teacher": {"name": "bf16", "error": 0.0}},
        },
        "conversations": conversation_summary(conversations()),
        "prompts": {
            f"{domain}-{index:03}": f"A prompt of {domain}, number {index}." for domain in RATES for index in range(8)
        },
        "provenance": {
            "command": ["dspark", "run", "configs/quickstart.yaml"],
            "revision": "9f75ee4",
            "seed": 1,
            "hardware": {"cpu": "2 cores, AVX2", "memory_gb": 8, "gpu": None},
            "versions": {"torch": "2.13.0", "transformers": "5.24.0", "deepspeed": "0.19.8", "ray": "2.60.0"},
            "settings": {
                "drafter": {"block_size": 7, "markov_rank": 256},
                "train": {"steps": 400, "lr": 6e-4, "note": "x" * 100},
            },
        },
        "decode": decode,
    }
    return ReportInputs(**(values | changes))


@cache
def full_report() -> dict[str, Any]:
    """The report of `full_inputs()`; not to be changed."""
    return build_report(full_inputs())
