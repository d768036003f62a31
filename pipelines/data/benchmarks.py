"""The paper's evaluation sets: Hugging Face name, how many prompts are taken, and how a row becomes a question.

The wording around each question is that of the reference's evaluation files. Where there is no hub, give a JSONL file
with `turns` as the source instead, or a folder of such files, named like the benchmarks, as the source's `folder`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
PROGRAMMER = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program"
)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """`turns` makes the user's words out of a row; `count` prompts are taken, from the start."""

    domain: str
    dataset: str
    count: int
    turns: Callable[[Mapping[str, Any]], list[str]]
    subset: str | None = None
    split: str = "test"
    data_files: str | None = None


def _livecodebench(row: Mapping[str, Any]) -> list[str]:
    if row["starter_code"]:
        code, how = row["starter_code"], "Use the following code structure:"
    else:
        code, how = "# YOUR CODE HERE", "Write your code in the following format:"
    question = f"{PROGRAMMER}\n\n### Question:\n{row['question_content']}"
    form = f"### Format: {how}\n```python\n{code}\n```\n\n### Answer: (use the provided format with backticks)"
    return [f"{question}\n\n{form}"]


def _humaneval(row: Mapping[str, Any]) -> list[str]:
    opening = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{opening}\n```python\n{row['prompt']}\n```"]


def _alpaca(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"]]


BENCHMARKS = {
    "gsm8k": Benchmark(
        domain="mathematics",
        dataset="openai/gsm8k",
        subset="main",
        count=500,
        turns=lambda row: [row["question"] + BOXED],
    ),
    "math500": Benchmark(
        domain="mathematics",
        dataset="HuggingFaceH4/MATH-500",
        count=500,
        turns=lambda row: [row["problem"] + BOXED],
    ),
    "aime25": Benchmark(
        domain="mathematics",
        dataset="MathArena/aime_2025",
        split="train",
        count=30,
        turns=lambda row: [row["problem"] + BOXED],
    ),
    "humaneval": Benchmark(domain="code", dataset="openai/openai_humaneval", count=164, turns=_humaneval),
    "mbpp": Benchmark(
        domain="code",
        dataset="google-research-datasets/mbpp",
        subset="sanitized",
        count=256,
        turns=lambda row: [row["prompt"]],
    ),
    "livecodebench": Benchmark(
        domain="code",
        dataset="livecodebench/code_generation_lite",
        data_files="test*.jsonl",
        count=500,
        turns=_livecodebench,
    ),
    "mt-bench": Benchmark(
        domain="chat",
        dataset="HuggingFaceH4/mt_bench_prompts",
        split="train",
        count=80,
        turns=lambda row: list(row["prompt"]),
    ),
    "alpaca": Benchmark(domain="chat", dataset="tatsu-lab/alpaca", split="train", count=500, turns=_alpaca),
    "arena-hard-v2": Benchmark(
        domain="chat",
        dataset="lmarena-ai/arena-hard-auto",
        data_files="data/arena-hard-v2.0/question.jsonl",
        count=500,
        turns=lambda row: [row["prompt"]],
    ),
}
