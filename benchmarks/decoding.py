"""Decoding speed of one target on this machine.

1. Answer the same prompts one row at a time, then in batches, without a drafter: tokens per second of each.
2. With a drafter, answer them speculatively; with `--transformers`, by transformers' own generate as well, plain and
   assisted with the same number of draft tokens: by prompt lookup, and by the target's own first layer, which is a
   drafter of the same depth as one with one layer. It decodes one row at a time, so it answers `--alone` prompts.
3. With `--cost`, measure what steps cost against tokens in the verification batch, and drafts against rows.
4. Print a table; answers are greedy and of equal length, so every way does the same work.

    python benchmarks/decoding.py TARGET [--drafter FOLDER] [--rows 1,16] [--prompts 16] [--questions FILE.jsonl]
                                  [--new-tokens 64] [--threads 2] [--alone 4] [--transformers] [--cost] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dspark.acceptance import RoundTable, accepted_length
from dspark.decoding.decoder import Decoder, Request
from dspark.decoding.proposers import proposer_for
from dspark.decoding.step_timing import measure_step_costs
from dspark.decoding.target import Target
from dspark.models.checkpoint import load_drafter

QUESTIONS = (
    "Write a short story about a fox and a bridge.",
    "What is 17 times 23? Think step by step.",
    "Explain how rainbows form.",
    "Write a Python function that reverses a list.",
)


def requests_of(target: Target, options: argparse.Namespace) -> list[Request]:
    """Chats of one question each; stop tokens are off so that lengths are equal."""
    if options.questions is None:
        texts = [f"{QUESTIONS[i % len(QUESTIONS)]} (Answer number {i}.)" for i in range(options.prompts)]
    else:
        rows = [json.loads(line) for line in options.questions.read_text().splitlines()[: options.prompts]]
        texts = [row["turns"][0] if "turns" in row else row["conversations"][0]["content"] for row in rows]
    made = []
    for index, text in enumerate(texts):
        rendered = target.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        made.append(
            Request(request_id=str(index), prompt_ids=list(rendered), max_new_tokens=options.new_tokens, seed=index)
        )
    return made


def timed(work: Callable[[], int]) -> tuple[float, int]:
    """Seconds and tokens of one run."""
    start = time.perf_counter()
    tokens = work()
    return time.perf_counter() - start, tokens


def report(name: str, seconds: float, tokens: int, more: str = "") -> dict[str, Any]:
    print(f"| {name} | {seconds:.1f} | {tokens} | {tokens / seconds:.1f} | {more} |", flush=True)
    return {"way": name, "seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds, "more": more}


def engine(target: Target, drafter: Any, rows: int, requests: list[Request]) -> tuple[float, int, str]:
    decoder = Decoder(target, drafter, max_rows=rows)
    events: list[dict[str, Any]] = []

    def work() -> int:
        tokens = 0
        for done in decoder.generate(requests):
            tokens += len(done.output_ids)
            events.extend(event.to_dict() | {"request_id": done.request_id} for event in done.rounds)
        return tokens

    seconds, tokens = timed(work)
    if not events:
        return seconds, tokens, ""
    length = accepted_length(RoundTable.from_events(events))
    return seconds, tokens, f"accepted length {length.value:.2f} [{length.low:.2f}, {length.high:.2f}]"


def by_transformers(target: Target, requests: list[Request], **options: Any) -> tuple[float, int]:
    def work() -> int:
        tokens = 0
        for request in requests:
            ids = torch.tensor([request.prompt_ids], device=target.device)
            out = target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=request.max_new_tokens,
                min_new_tokens=request.max_new_tokens,
                pad_token_id=0,
                **options,
            )
            tokens += out.shape[1] - ids.shape[1]
        return tokens

    return timed(work)


def measure(options: argparse.Namespace, target: Target, drafter: Any) -> dict[str, Any]:
    """Every way, one after the other; the rows of the printed table and what follows from them."""
    requests = requests_of(target, options)
    # One short run first: allocations and thread pools are not what is measured.
    list(Decoder(target, drafter).generate([replace(request, max_new_tokens=2) for request in requests[:2]]))
    print("| way | seconds | tokens | tokens/s | |\n| --- | ---: | ---: | ---: | --- |")
    found, speeds = [], {}
    for rows in (int(part) for part in options.rows.split(",")):
        asked = requests if rows > 1 else requests[: options.alone]
        found.append(report(f"plain, {rows} rows", *engine(target, None, rows, asked)))
        speeds[rows] = found[-1]["tokens_per_second"]
        if drafter is not None:
            found.append(report(f"drafter, {rows} rows", *engine(target, drafter, rows, asked)))
    if options.transformers:
        asked = requests[: options.alone]
        budget = 7 if drafter is None else drafter.block_size
        constant = {"num_assistant_tokens": budget, "num_assistant_tokens_schedule": "constant"}
        found.append(report("transformers, plain", *by_transformers(target, asked)))
        for name, more in (
            (f"transformers, prompt lookup of {budget}", {"prompt_lookup_num_tokens": budget}),
            (f"transformers, own first layer drafts {budget}", {"assistant_early_exit": 1, **constant}),
        ):
            found.append(report(name, *by_transformers(target, asked, **more)))
    result: dict[str, Any] = {"ways": found}
    if len(speeds) > 1:
        result["batching"] = speeds[max(speeds)] / speeds[min(speeds)]
        print(f"\n{max(speeds)} rows against {min(speeds)}: {result['batching']:.1f} times")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--drafter")
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--questions", type=Path, help="prompts such as a run's conversations/evaluation.jsonl")
    parser.add_argument("--alone", type=int, default=4, help="prompts that are answered one row at a time")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    drafter = None
    layers = None
    if options.drafter:
        drafter = load_drafter(options.drafter, dtype="float32")
        layers = drafter.config.target_layer_ids
    target = Target.open(options.target, dtype="float32", target_layer_ids=layers)
    result = {"settings": {name: str(value) for name, value in vars(options).items()}}
    result |= measure(options, target, drafter)
    if options.cost:
        proposer = None if drafter is None else proposer_for(drafter, target)
        costs = measure_step_costs(target, proposer, source=f"{options.threads} threads, float32")
        result["costs"] = costs.to_dict()
        print("\n| tokens in the batch | steps/s |\n| ---: | ---: |")
        for tokens, speed in zip(costs.verify.tokens, costs.verify.steps_per_second, strict=True):
            print(f"| {tokens} | {speed:.2f} |")
        print("\n| rows | draft, ms |\n| ---: | ---: |")
        for rows, seconds in zip(costs.draft_rows, costs.draft_seconds, strict=True):
            print(f"| {rows} | {1000 * seconds:.1f} |")
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
