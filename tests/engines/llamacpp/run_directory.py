"""What a finished run left for an engine to repeat: prompts, greedy answers, rounds, target and published drafter."""

import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc
from transformers import AutoTokenizer

from pipelines.reporting.events import read_completions, read_events

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
    finish_reason: str
    rounds: tuple[Round, ...]


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    folder: Path
    target: Path
    drafter: Path
    block_size: int
    max_new_tokens: int
    cases: tuple[Case, ...]


def open_run(folder: Path, *, drafter: str = "dspark", policy: str | None = None) -> FinishedRun:
    """Read a run directory. EngineError says what is missing and which command makes it."""
    for needed in ("run.json", "published/config.json", "evaluation", "conversations/evaluation.jsonl"):
        if not (folder / needed).exists():
            raise EngineError(f"{folder / needed} is missing; make the run first (make quickstart), or set DSPARK_RUN")
    target = _target_folder(folder)
    cases = _cases(folder, target, drafter, policy)
    return FinishedRun(
        folder=folder,
        target=target,
        drafter=folder / "published",
        block_size=json.loads((folder / "published" / "config.json").read_text())["block_size"],
        max_new_tokens=max(max(len(c.plain_ids), len(c.speculative_ids)) for c in cases),
        cases=cases,
    )


def _target_folder(folder: Path) -> Path:
    run = json.loads((folder / "run.json").read_text())
    target = Path(run["target_folder"])
    if not (target / "config.json").exists():
        raise EngineError(f"{folder / 'run.json'} names the target folder {target}, which holds no config.json")
    return target


def _cases(folder: Path, target: Path, drafter: str, policy: str | None) -> tuple[Case, ...]:
    """Prompts answered greedily both plainly and with the drafter, in the order of the conversations file."""
    evaluation = folder / "evaluation"
    completions = read_completions(*sorted(evaluation.glob("completions-*.parquet")))
    completions = completions.filter(pc.equal(completions["temperature"], 0.0)).to_pylist()
    events = read_events(*sorted(evaluation.glob("events-*.parquet")))
    events = events.filter(pc.and_(pc.equal(events["temperature"], 0.0), pc.equal(events["drafter"], drafter)))
    plain = {row["request_id"]: row for row in completions if row["drafter"] == "plain"}
    drafted = [row for row in completions if row["drafter"] == drafter]
    policies = sorted({row["policy"] for row in drafted})
    policy = policy or next((name for name in ("full-block", "full", *policies) if name in policies), None)
    speculative = {row["request_id"]: row for row in drafted if row["policy"] == policy}
    rounds: dict[str, list[Round]] = {}
    for row in sorted(events.to_pylist(), key=lambda row: row["round"]):
        if row["policy"] == policy:
            found = Round(position=row["position"], draft_ids=tuple(row["draft_ids"]), accepted=row["accepted_raw"])
            rounds.setdefault(row["request_id"], []).append(found)

    prompts = _prompts(folder, target)
    shared = [key for key in prompts if key in plain and key in speculative]
    if not shared:
        raise EngineError(f"{evaluation} has no prompt answered at temperature 0 both plainly and by {drafter!r}")
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
            finish_reason=speculative[key]["finish_reason"],
            rounds=tuple(rounds[key]),
        )
        for key in shared
    )


def _prompts(folder: Path, target: Path) -> dict[str, list[int]]:
    """Prompt ids by request; rendered from the conversation where the file does not carry them."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    found = {}
    for line in (folder / "conversations" / "evaluation.jsonl").read_text().splitlines():
        row = json.loads(line)
        ids = row.get("prompt_ids")
        if ids is None:
            turns = row["conversations"]
            asked = turns[:-1] if turns[-1]["role"] == "assistant" else turns
            ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        found[row["id"]] = list(ids)
    return found
