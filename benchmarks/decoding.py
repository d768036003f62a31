"""Decoding speed of one target on this machine.

1. Answer the same prompts one row at a time, then in batches, without a drafter: tokens per second of each.
2. With a drafter, answer them speculatively; with `--transformers`, by transformers' own generate as well, plain and
   assisted by a prompt-lookup drafter with the same number of draft tokens.
3. With `--cost`, measure steps per second against tokens in the verification batch.
4. Print a table; answers are greedy and of equal length, so every way does the same work.

    python benchmarks/decoding.py TARGET [--drafter FOLDER] [--rows 1,16] [--prompts 16] [--new-tokens 64] [--threads 2]
                                  [--transformers] [--cost]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dspark.acceptance import RoundTable, accepted_length
from dspark.decoding import Decoder, Request
from dspark.drafter import load_drafter
from dspark.step_cost import measure_step_cost
from dspark.target import Target

QUESTIONS = (
    "Write a short story about a fox and a bridge.",
    "What is 17 times 23? Think step by step.",
    "Explain how rainbows form.",
    "Write a Python function that reverses a list.",
)


def requests_of(target: Target, prompts: int, new_tokens: int) -> list[Request]:
    """Chats of a few questions, each told apart by a number; stop tokens are off so that lengths are equal."""
    made = []
    for index in range(prompts):
        text = f"{QUESTIONS[index % len(QUESTIONS)]} (Answer number {index}.)"
        rendered = target.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        made.append(Request(request_id=str(index), prompt_ids=list(rendered), max_new_tokens=new_tokens, seed=index))
    return made


def timed(work: Callable[[], int]) -> tuple[float, int]:
    """Seconds and tokens of one run."""
    start = time.perf_counter()
    tokens = work()
    return time.perf_counter() - start, tokens


def report(name: str, seconds: float, tokens: int, more: str = "") -> float:
    print(f"| {name} | {seconds:.1f} | {tokens} | {tokens / seconds:.1f} | {more} |", flush=True)
    return tokens / seconds


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--drafter")
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--cost", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    drafter = None
    layers = None
    if options.drafter:
        drafter = load_drafter(options.drafter, dtype="float32")
        layers = drafter.config.target_layer_ids
    target = Target.open(options.target, dtype="float32", target_layer_ids=layers)
    requests = requests_of(target, options.prompts, options.new_tokens)
    # One short run first: allocations and thread pools are not what is measured.
    list(Decoder(target, drafter).generate([replace(request, max_new_tokens=2) for request in requests[:2]]))
    print("| way | seconds | tokens | tokens/s | |\n| --- | ---: | ---: | ---: | --- |")
    speeds = {}
    for rows in (int(part) for part in options.rows.split(",")):
        speeds[rows] = report(f"plain, {rows} rows", *engine(target, None, rows, requests))
        if drafter is not None:
            report(f"drafter, {rows} rows", *engine(target, drafter, rows, requests))
    if options.transformers:
        report("transformers, plain", *by_transformers(target, requests))
        budget = 7 if drafter is None else drafter.block_size
        assisted = by_transformers(target, requests, prompt_lookup_num_tokens=budget)
        report(f"transformers, prompt lookup of {budget}", *assisted)
    if len(speeds) > 1:
        print(f"\n{max(speeds)} rows against {min(speeds)}: {speeds[max(speeds)] / speeds[min(speeds)]:.1f} times")
    if options.cost:
        table = measure_step_cost(target, source=f"{options.threads} threads, float32")
        print("\n| tokens in the batch | steps/s |\n| ---: | ---: |")
        for tokens, speed in zip(table.tokens, table.steps_per_second, strict=True):
            print(f"| {tokens} | {speed:.2f} |")


if __name__ == "__main__":
    main()
