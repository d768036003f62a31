"""What a finished run left for an engine to repeat: prompts, greedy answers, rounds, target and published drafter."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from dspark.decoding.target import open_tokenizer
from pipelines.data.chat import render_prompt, thinks
from pipelines.evaluation.round_log import read_completions, read_events
from pipelines.runs.run import open_run
from pipelines.settings import Settings
from pipelines.stages.decoding import DSPARK, PLAIN, read_split
from pipelines.target_spec import resolve_target

from .comparison import Round
from .toolchain import EngineError


@dataclass(frozen=True, kw_only=True)
class Case:
    """One evaluation prompt at temperature 0, as our own evaluation answered it."""

    request_id: str
    domain: str
    prompt_ids: tuple[int, ...]
    plain_ids: tuple[int, ...]
    speculative_ids: tuple[int, ...]
    rounds: tuple[Round, ...]


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """`target` and `drafter` are folders in the Hugging Face layout; rounds verify the full block."""

    folder: Path
    target: Path
    drafter: Path
    block_size: int
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    cases: tuple[Case, ...]


def read_run(folder: Path) -> FinishedRun:
    """Read a run directory. EngineError says what is missing and which command makes it."""
    for needed in ("run.json", "published/config.json", "evaluation", "conversations/evaluation.jsonl"):
        if not (folder / needed).exists():
            raise EngineError(f"{folder / needed} is missing; make the run first (make quickstart), or set DSPARK_RUN")
    settings = open_run(str(folder)).settings
    if settings.evaluate.policy != "full":
        raise EngineError(
            f"{folder} was evaluated with the length policy {settings.evaluate.policy!r}; llama.cpp verifies full "
            "blocks here: evaluate with evaluate.policy=full"
        )
    spec = resolve_target(settings)
    return FinishedRun(
        folder=folder,
        target=Path(spec.path),
        drafter=folder / "published",
        block_size=json.loads((folder / "published" / "config.json").read_text())["block_size"],
        max_new_tokens=settings.evaluate.max_new_tokens,
        stop_token_ids=frozenset(spec.stop_token_ids),
        cases=_cases(folder, _prompts(folder, settings, spec.path)),
    )


def _cases(folder: Path, prompts: dict[str, list[int]]) -> tuple[Case, ...]:
    """Prompts answered greedily both plainly and with the drafter, in the order of `prompts` (first turns)."""
    evaluation = folder / "evaluation"
    answers = _greedy(read_completions(evaluation / "completions-all.parquet"))
    plain = {row["prompt_id"]: row for row in answers if row["drafter"] == PLAIN}
    speculative = {row["prompt_id"]: row for row in answers if row["drafter"] == DSPARK}
    rounds: dict[str, list[Round]] = {}
    for row in sorted(_greedy(read_events(evaluation / "events-all.parquet")), key=lambda row: row["round"]):
        if row["drafter"] == DSPARK:
            found = Round(position=row["position"], draft_ids=tuple(row["draft_ids"]), accepted=row["accepted_raw"])
            rounds.setdefault(row["prompt_id"], []).append(found)
    shared = [key for key in prompts if key in plain and key in speculative]
    if not shared:
        raise EngineError(f"{evaluation} has no prompt answered at temperature 0 both plainly and with the drafter")
    for key in shared:
        if plain[key]["prompt_tokens"] != len(prompts[key]):
            raise EngineError(
                f"{key}: the evaluation's prompt has {plain[key]['prompt_tokens']} tokens, rendered again it has "
                f"{len(prompts[key])}; the tokenizer or chat template is not the one of the evaluation"
            )
    return tuple(
        Case(
            request_id=key,
            domain=plain[key]["domain"],
            prompt_ids=tuple(prompts[key]),
            plain_ids=tuple(plain[key]["output_ids"]),
            speculative_ids=tuple(speculative[key]["output_ids"]),
            rounds=tuple(rounds.get(key, ())),
        )
        for key in shared
    )


def _greedy(table: Any) -> list[dict[str, Any]]:
    """First turns at temperature 0; one seed only, since greedy decoding has no draws."""
    rows = table.filter(pc.equal(table["temperature"], 0.0)).to_pylist()
    first = min((row["seed"] for row in rows), default=0)
    return [row for row in rows if row["seed"] == first and row["turn"] == 0]


def _prompts(folder: Path, settings: Settings, target: str) -> dict[str, list[int]]:
    """Prompt ids by request, rendered as the evaluation renders them."""
    tokenizer = open_tokenizer(target)
    mode, seed = settings.target.thinking, settings.run.seed
    return {
        prompt.prompt_id: render_prompt(
            tokenizer, prompt.messages, thinking=thinks(mode, seed, prompt.prompt_id), row=prompt.prompt_id
        )
        for prompt in read_split(folder / "conversations" / "evaluation.jsonl", "evaluation")
    }
