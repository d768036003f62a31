"""Let the target answer the training prompts itself: a drafter learns best from what its target would write.

1. Read the prompts of the three splits and render the training ones with the target's chat template.
2. Cut them into work units; a unit's answers are one file in `conversations/parts/`, there whole or not at all.
3. Ray workers decode the units that are not there yet.
4. Join the parts into `train.jsonl`, count finish reasons and short answers, and write `manifest.json`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pipelines.data.chat import render_prompt, thinks
from pipelines.data.conversations import Prompt, PromptSet, read_prompts
from pipelines.errors import UserError
from pipelines.settings import Settings
from pipelines.stages.workers import on_pool, open_target, session
from pipelines.target_facts import TargetFacts, examine_target
from storage.files.filesystems import Folder

if TYPE_CHECKING:
    from pipelines.progress import Reporter
    from pipelines.run import Run

TRAIN, MANIFEST = "train.jsonl", "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A run of prompts, and the file that their answers go to."""

    name: str
    prompts: tuple[Prompt, ...]


def read_splits(settings: Settings) -> dict[str, PromptSet]:
    """The prompts of every split; training prompts that stand in a held-out split too are dropped and counted."""
    data = settings.data
    held_out = {
        "calibration": read_prompts(data.calibration, "calibration"),
        "evaluation": read_prompts(data.evaluation, "evaluation"),
    }
    return {"train": read_prompts(data.train, "train").without(*held_out.values()), **held_out}


def identity(settings: Settings, run: Run) -> dict[str, Any]:
    """The target, the prompts, and how answers are drawn."""
    facts = examine_target(settings)
    wanted = settings.regenerate
    return {
        "target": {"name": facts.name, "revision": facts.revision, **facts.hashes},
        "dtype": settings.target.dtype,
        "thinking": settings.target.thinking,
        "prompts": {split: prompts.sha256 for split, prompts in read_splits(settings).items()},
        "sampling": wanted.model_dump(include={"temperature", "top_p", "top_k", "max_new_tokens"}),
        "min_supervised_tokens": settings.data.min_supervised_tokens,
        "prompts_per_work_item": wanted.prompts_per_work_item,
        "seed": settings.run.seed,
    }


def execute(settings: Settings, run: Run, reporter: Reporter) -> dict[str, Any]:
    """Make `conversations/`."""
    facts = examine_target(settings)
    folder = Folder(run.location("regenerate"))
    splits = read_splits(settings)
    units = list(_units(splits["train"].prompts, settings.regenerate.prompts_per_work_item))
    todo = [unit for unit in units if not folder.exists(unit.name)]
    done = sum(len(unit.prompts) for unit in units) - sum(len(unit.prompts) for unit in todo)
    if todo:
        total = len(splits["train"].prompts)
        with (
            session(settings, run.location("regenerate")),
            reporter.task("answering the training prompts", total, "prompts", done) as task,
        ):
            tokens = 0

            def finished(unit: Unit, result: int) -> None:
                nonlocal tokens
                tokens += result
                task.advance(len(unit.prompts), tokens_per_second=tokens / task.seconds)

            on_pool(
                settings,
                partial(AnswerWorker, settings, facts, folder),
                todo,
                workers=settings.regenerate.num_workers,
                on_result=finished,
                unit_name=lambda unit: unit.name,
            )
    result = _join(settings, facts, folder, units, splits)
    for line in left_out(result, splits, settings.data.min_supervised_tokens):
        reporter.say(line)
    return result


def left_out(result: dict[str, Any], splits: dict[str, PromptSet], minimum: int) -> list[str]:
    """A line for everything that will not be trained on or evaluated, and why."""
    lines = [
        f"{split}: {count} prompts left out ({reason})"
        for split, prompts in splits.items()
        for reason, count in prompts.skipped.items()
        if count
    ]
    answered = result["rows"] + result["dropped"]
    if no_room := result["finish_reasons"].get("context", 0):
        lines.append(f"{no_room} of {answered} prompts do not fit the target's context with an answer")
    if result["dropped"]:
        lines.append(
            f"{result['dropped']} of {answered} answers dropped, shorter than data.min_supervised_tokens={minimum}; "
            f"their ids are in {MANIFEST}"
        )
    return lines


class AnswerWorker:
    """Holds the target and answers one unit of prompts after the other."""

    def __init__(self, settings: Settings, facts: TargetFacts, folder: Folder) -> None:
        from dspark.decoding.decoder import Decoder, SamplingConfig

        self.settings, self.facts, self.folder = settings, facts, folder
        self.target = open_target(settings, facts)
        wanted = settings.regenerate
        self.decoder = Decoder(
            self.target,
            sampling=SamplingConfig(temperature=wanted.temperature, top_p=wanted.top_p, top_k=wanted.top_k),
            max_rows=wanted.batch_size,
        )

    def run(self, unit: Unit) -> int:
        """Write the unit's answers; returns the number of tokens generated."""
        rows = answer(self.decoder, self.target.tokenizer, unit.prompts, self.settings, self.facts)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self.folder.write(unit.name, "".join(lines).encode())
        return sum(len(row["response_ids"]) for row in rows)


def answer(
    decoder: Any, tokenizer: Any, prompts: tuple[Prompt, ...], settings: Settings, facts: TargetFacts
) -> list[dict[str, Any]]:
    """Conversation rows in the prompts' order; every turn is asked with the target's own earlier answers before it.

    A conversation stops early, and says so in `finish_reason`, when the next prompt does not fit the context any more.
    """
    rows = [_new_row(prompt, settings, facts) for prompt in prompts]
    pending = [
        (row, [prompt.messages[-1]["content"], *prompt.later_turns]) for row, prompt in zip(rows, prompts, strict=True)
    ]
    for turn in range(max(len(turns) for _, turns in pending)):
        asked = {}
        for row, turns in pending:
            if turn >= len(turns) or row["finish_reason"] in ("context", "length"):
                continue
            if turn:
                row["conversations"].append({"role": "user", "content": turns[turn]})
            thinking = row["thinking"] == "on"
            ids = render_prompt(tokenizer, row["conversations"], thinking=thinking, row=row["id"])
            request = make_request(row["id"], ids, settings.regenerate.max_new_tokens, facts, settings.run.seed + turn)
            if decoder.why_not(request) is not None:
                row["finish_reason"] = "context"
                continue
            asked[row["id"]] = row
            row["prompt_ids"] = ids
            row["request"] = request
        ordered = sorted((row.pop("request") for row in asked.values()), key=lambda r: -len(r.prompt_ids))
        for completion in decoder.generate(ordered):
            row = asked[completion.request_id]
            ended = completion.output_ids[-1:] and completion.output_ids[-1] in facts.stop_token_ids
            text = tokenizer.decode(completion.output_ids[:-1] if ended else completion.output_ids)
            row["response_ids"] = completion.output_ids
            row["finish_reason"] = completion.finish_reason
            row["conversations"].append({"role": "assistant", "content": text})
    return rows


def make_request(request_id: str, ids: list[int], max_new_tokens: int, facts: TargetFacts, seed: int) -> Any:
    """A decoding request whose random draws depend on the run's seed and its own id alone."""
    import zlib

    from dspark.decoding.decoder import Request

    return Request(
        request_id=request_id,
        prompt_ids=ids,
        max_new_tokens=max_new_tokens,
        stop_token_ids=frozenset(facts.stop_token_ids),
        seed=zlib.crc32(f"{seed}/{request_id}".encode()),
    )


def read_conversations(folder: Folder) -> Iterator[dict[str, Any]]:
    """The rows of `train.jsonl`, in order. Raises UserError at a damaged line."""
    for number, line in enumerate(folder.read(TRAIN).splitlines(), start=1):
        try:
            row = json.loads(line)
            damage = _damage(row)
        except (ValueError, RecursionError) as error:
            damage = f"not valid JSON ({error})"
        if damage is not None:
            raise UserError(
                f"{folder.describe(TRAIN)}:{number}: {damage}; restore the file, or set `complete` to false in "
                "stages/regenerate.json: `dspark regenerate CONFIG` then joins it anew from its parts"
            )
        yield row


def _damage(row: Any) -> str | None:
    """Why this is no row of TRAIN; None if it is one."""
    if not isinstance(row, dict):
        return "not a JSON object"
    for key in ("id", "domain"):
        if not isinstance(row.get(key), str):
            return f"`{key}` is {row.get(key)!r:.40}, not a text"
    for key in ("prompt_ids", "response_ids"):
        ids = row.get(key)
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            return f"`{key}` is {ids!r:.40}, not a list of token ids"
    said = row.get("conversations")
    texts = isinstance(said, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        for turn in said
    )
    if not texts:
        return f"`conversations` is {said!r:.40}, not a list of messages"
    if missing := sorted({"thinking", "finish_reason"} - row.keys()):
        return f"it lacks `{missing[0]}`"
    return None


def _new_row(prompt: Prompt, settings: Settings, facts: TargetFacts) -> dict[str, Any]:
    mode = "on" if thinks(settings.target.thinking, settings.run.seed, prompt.prompt_id) else "off"
    sampling = settings.regenerate.model_dump(include={"temperature", "top_p", "top_k", "max_new_tokens"})
    return {
        "id": prompt.prompt_id,
        "domain": prompt.domain,
        "split": prompt.split,
        "conversations": [dict(message) for message in prompt.messages],
        "prompt_ids": [],
        "response_ids": [],
        "finish_reason": None,
        "thinking": mode,
        "generator": {"target": facts.name, "revision": facts.revision, "sampling": sampling},
    }


def _units(prompts: tuple[Prompt, ...], rows: int) -> Iterator[Unit]:
    for number, start in enumerate(range(0, len(prompts), rows)):
        yield Unit(name=f"parts/train-{number:06d}.jsonl", prompts=prompts[start : start + rows])


def _join(
    settings: Settings, facts: TargetFacts, folder: Folder, units: list[Unit], splits: dict[str, PromptSet]
) -> dict[str, Any]:
    """`train.jsonl` from the parts, the held-out prompts beside it, and the counts."""
    minimum = settings.data.min_supervised_tokens
    reasons: Counter[str] = Counter()
    domains: Counter[str] = Counter()
    short: list[str] = []
    answered = tokens = kept = 0
    with folder.writer(TRAIN) as stream:
        for unit in units:
            for line in folder.read(unit.name).splitlines():
                row = json.loads(line)
                answered += 1
                reasons[str(row["finish_reason"])] += 1
                if len(row["response_ids"]) < minimum:
                    short.append(row["id"])
                    continue
                kept += 1
                tokens += len(row["response_ids"])
                domains[row["domain"]] += 1
                stream.write(line + b"\n")
    if not kept:
        raise UserError(
            f"none of the {answered} answers has the {minimum} tokens that data.min_supervised_tokens asks for "
            f"(finish reasons: {dict(reasons)}); lower it, or check the prompts and the chat template"
        )
    for split in ("calibration", "evaluation"):
        lines = (json.dumps(prompt.to_row(), ensure_ascii=False) + "\n" for prompt in splits[split].prompts)
        folder.write(f"{split}.jsonl", "".join(lines).encode())
    manifest = {
        "generator": {"target": facts.name, "revision": facts.revision},
        "sampling": settings.regenerate.model_dump(include={"temperature", "top_p", "top_k", "max_new_tokens"}),
        "thinking": settings.target.thinking,
        "rows": kept,
        "answered": answered,
        "response_tokens": tokens,
        "finish_reasons": dict(reasons),
        "domains": dict(domains),
        "on_policy_rows": kept,
        "off_policy_rows": 0,
        "dropped": {"fewer_than_min_supervised_tokens": {"count": len(short), "ids": short[:100]}},
        "prompts": {
            split: {
                "sha256": prompts.sha256,
                "prompts": len(prompts.prompts),
                "skipped": dict(prompts.skipped),
                "sources": [dict(source) for source in prompts.sources],
            }
            for split, prompts in splits.items()
        },
    }
    folder.write(MANIFEST, (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode())
    return {key: manifest[key] for key in ("rows", "response_tokens", "finish_reasons")} | {"dropped": len(short)}
