"""Let the target answer the training prompts itself: a drafter learns best from what its target would write.

1. Read the prompts of the three splits, and render every one with the target's chat template: a row that cannot be
   used is named, or left out and counted, before any is answered.
2. Cut the training prompts that have no answer yet into work items. An answer is known by its prompt and by how it was
   drawn, so it is kept when other rows change; those of an item are one file in `answers/`, there whole or not at all.
3. Ray workers decode the items.
4. Join the answers into `conversations/train.jsonl`, count finish reasons and short answers, and write `manifest.json`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from dspark.decoding.decoder import Decoder, SamplingConfig
from dspark.decoding.target import Target, open_tokenizer
from dspark.decoding.target_checks import unknown_token
from pipelines.data.chat import TemplateRefuses, answer_message, make_request, reads_the_clock, render_turn, thinks
from pipelines.data.conversations import BAD_ROW, Prompt, PromptSet, bad_row, read_prompts
from pipelines.errors import UserError
from pipelines.json_files import write_json, write_jsonl
from pipelines.records import AnswerRow, ConversationRow, read_rows
from pipelines.settings.schema import Settings
from pipelines.target_spec import TargetSpec, resolve_target
from pipelines.workers import on_pool, open_target, session
from storage.files.filesystems import Folder
from storage.identity import identity_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipelines.progress import Reporter
    from pipelines.runs.run import Run

TRAIN, MANIFEST, ANSWERS = "train.jsonl", "manifest.json", "answers"
TOOLS_NOT_SHOWN = "with tools that the chat template does not show"
LISTED = 100  # rows of a kind that the manifest names


@dataclass(frozen=True, kw_only=True)
class WorkItem:
    """Prompts to answer together, and the file that their answers go to."""

    name: str
    prompts: tuple[Prompt, ...]


def read_splits(settings: Settings) -> dict[str, PromptSet]:
    """The prompts of every split; training prompts with a question of another split are left out and noted."""
    data = settings.data
    sources = {"train": data.train, "calibration": data.calibration, "evaluation": data.evaluation}
    found = {split: read_prompts(sources[split], split, data.on_bad_row) for split in sources}
    return {**found, "train": found["train"].without(found["calibration"], found["evaluation"])}


def identity(settings: Settings, run: Run) -> dict[str, Any]:
    """The target, the prompts, and how answers are drawn."""
    return {
        **answer_fields(settings),
        "prompts": {split: prompts.sha256 for split, prompts in read_splits(settings).items()},
        "min_supervised_tokens": settings.data.min_supervised_tokens,
    }


def answer_fields(settings: Settings) -> dict[str, Any]:
    """Everything that the answer to a prompt depends on, the prompt apart."""
    spec = resolve_target(settings)
    now = {"render_time": str(settings.data.render_time)} if reads_the_clock(_tokenizer(spec, settings)) else {}
    return {
        "target": {"name": spec.name, "revision": spec.revision, **spec.hashes},
        "dtype": settings.target.dtype,
        "thinking": settings.target.thinking,
        "sampling": _sampling(settings),
        "seed": settings.run.seed,
        **now,
    }


def _sampling(settings: Settings) -> dict[str, Any]:
    return settings.regenerate.model_dump(include={"temperature", "top_p", "top_k", "max_new_tokens"})


def _tokenizer(spec: TargetSpec, settings: Settings) -> PreTrainedTokenizerBase:
    return _open_tokenizer(spec.path, settings.target.trust_remote_code)


@lru_cache(maxsize=1)
def _open_tokenizer(path: str, trust_remote_code: bool) -> Any:
    return open_tokenizer(path, trust_remote_code=trust_remote_code)


def execute(settings: Settings, run: Run, reporter: Reporter) -> dict[str, Any]:
    """Make `conversations/`."""
    spec = resolve_target(settings)
    splits = render_first(read_splits(settings), _tokenizer(spec, settings), settings, reporter)
    prompts = splits["train"].prompts
    folder = Folder(run.directory.location(f"{ANSWERS}/{identity_of(answer_fields(settings))[:16]}"))
    size = settings.regenerate.prompts_per_work_item
    places = find_answers(folder, _work_items(prompts, size))
    todo = _work_items([prompt for prompt in prompts if answer_key(prompt) not in places], size)
    if todo:
        done = len(prompts) - sum(len(item.prompts) for item in todo)
        with (
            session(settings, folder.url),
            reporter.task("answering the training prompts", len(prompts), "prompts", done) as task,
        ):
            tokens = 0

            def finished(item: WorkItem, result: int) -> None:
                nonlocal tokens
                tokens += result
                places.update((answer_key(prompt), item.name) for prompt in item.prompts)
                task.advance(len(item.prompts), tokens_per_second=tokens / task.seconds)

            on_pool(
                settings,
                partial(AnswerWorker, settings, spec, folder),
                todo,
                workers=settings.regenerate.num_workers,
                on_result=finished,
                item_name=lambda item: item.name,
            )
    answers = read_answers(folder, prompts, places)
    result = _join(settings, spec, Folder(run.location("regenerate")), answers, splits)
    for line in left_out(result, splits, settings.data.min_supervised_tokens):
        reporter.say(line)
    return result


def render_first(
    splits: Mapping[str, PromptSet], tokenizer: PreTrainedTokenizerBase, settings: Settings, reporter: Reporter
) -> dict[str, PromptSet]:
    """The prompts that the template takes, whatever the answers between their turns will be.

    Raises UserError for one that it refuses, unless bad rows are left out.
    """

    def why_not(prompt: Prompt) -> str | None:
        task.advance()
        said = [*prompt.turns[0]]
        for turn in prompt.turns[1:]:
            said += [{"role": "assistant", "content": "Yes."}, *turn]
        try:
            text = render_turn(tokenizer, prompt, said, settings, tokenize=False)
        except TemplateRefuses as error:
            return str(bad_row(error, settings.data.on_bad_row))
        without = replace(prompt, tools=())
        if prompt.tools and text == render_turn(tokenizer, without, said, settings, tokenize=False):
            tools_not_shown.append(prompt.place)
        return None

    found = {}
    total = sum(len(prompts.prompts) for prompts in splits.values())
    with reporter.task("rendering the prompts", total, "prompts") as task:
        for split, prompts in splits.items():
            tools_not_shown: list[str] = []
            found[split] = prompts.keep(why_not, BAD_ROW).noting(TOOLS_NOT_SHOWN, tools_not_shown)
            if prompts.prompts and not found[split].prompts:
                first = found[split].notes[BAD_ROW][-1]
                raise UserError(f"data.{split}: the chat template refuses every prompt, the last one so: {first}")
    return found


def answer_key(prompt: Prompt) -> str:
    """What an answer is known by: its draws depend on the prompt's id, its text on what is said."""
    said = [prompt.prompt_id, prompt.turns, prompt.tools]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]


def _work_items(prompts: Sequence[Prompt], size: int) -> list[WorkItem]:
    items = []
    for start in range(0, len(prompts), size):
        chosen = tuple(prompts[start : start + size])
        keys = "".join(answer_key(prompt) for prompt in chosen)
        items.append(WorkItem(name=f"{hashlib.sha256(keys.encode()).hexdigest()[:16]}.jsonl", prompts=chosen))
    return items


def find_answers(folder: Folder, items: Sequence[WorkItem]) -> dict[str, str]:
    """The file of each answer that is there, by its key; only files of other work items than these are read."""
    there = [name for name in folder.files(recursive=False) if name.endswith(".jsonl")]
    by_name = {item.name: item for item in items}
    found = {answer_key(prompt): name for name in there if name in by_name for prompt in by_name[name].prompts}
    left = {answer_key(prompt) for item in items for prompt in item.prompts} - found.keys()
    for name in there if left else ():
        if name not in by_name:
            found.update((row["key"], name) for row in _answer_rows(folder, name) if row["key"] in left)
    return found


def _answer_rows(folder: Folder, name: str) -> Iterator[dict[str, Any]]:
    return read_rows(folder, name, AnswerRow, "remove the file, and its prompts are answered again")


def read_answers(folder: Folder, prompts: Iterable[Prompt], places: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The rows of these prompts in their order, with the domain and split that they have now."""

    @lru_cache(maxsize=4)
    def rows(name: str) -> dict[str, dict[str, Any]]:
        return {row["key"]: row for row in _answer_rows(folder, name)}

    for prompt in prompts:
        key = answer_key(prompt)
        if (row := rows(places[key]).get(key)) is None:
            raise UserError(
                f"{folder.describe(places[key])} lacks the answer to {prompt.prompt_id!r}; remove the file, and its "
                "prompts are answered again"
            )
        yield {**{name: row[name] for name in row if name != "key"}, "domain": prompt.domain, "split": prompt.split}


def left_out(result: dict[str, Any], splits: dict[str, PromptSet], minimum: int) -> list[str]:
    """A line for everything that will not be trained on or evaluated, and why."""
    lines = [
        f"{split}: {len(places)} prompts {reason}"
        for split, prompts in splits.items()
        for reason, places in prompts.notes.items()
    ]
    answered = result["rows"] + result["dropped"]
    why = {
        "context": "end early: the next question does not fit the target's context with an answer",
        "template": "end early: the chat template refuses the target's own answer as history",
        "no token": "end before an id that the target wrote and the tokenizer does not have",
        "shortened": "had less room in the target's context than regenerate.max_new_tokens",
    }
    lines += [f"{count} of {answered} conversations {why[name]}" for name, count in result["ended"].items() if count]
    if result["dropped"]:
        lines.append(
            f"{result['dropped']} of {answered} answers dropped, shorter than data.min_supervised_tokens={minimum}; "
            f"their ids are in {MANIFEST}"
        )
    return lines


class AnswerWorker:
    """Holds the target and answers the prompts of one work item after the other."""

    def __init__(self, settings: Settings, spec: TargetSpec, folder: Folder) -> None:
        self.settings, self.spec, self.folder = settings, spec, folder
        self.target = open_target(settings, spec)
        self.decoder = answer_decoder(self.target, settings)

    def run(self, item: WorkItem) -> int:
        """Write the item's answers; returns the number of tokens generated."""
        rows = answer(self.decoder, self.target.tokenizer, item.prompts, self.settings, self.spec)
        write_jsonl(self.folder, item.name, rows)
        return sum(len(row["response_ids"]) for row in rows)


def answer_decoder(target: Target, settings: Settings) -> Decoder:
    """Plain decoding as the settings sample answers."""
    section = settings.regenerate
    sampling = SamplingConfig(temperature=section.temperature, top_p=section.top_p, top_k=section.top_k)
    return Decoder(target, sampling=sampling, max_rows=section.batch_size)


def answer(
    decoder: Any, tokenizer: Any, prompts: Sequence[Prompt], settings: Settings, spec: TargetSpec
) -> list[dict[str, Any]]:
    """Conversation rows in the prompts' order; every turn is asked with the target's own earlier answers before it.

    The last answer is the row's. A conversation stops early when an answer is cut, and, which `ended` says, when the
    next question does not fit the context any more ("context"), the template refuses the answer as history
    ("template"), or the target writes an id that the tokenizer does not have ("no token", which is left out).
    `finish_reason` is null where there is no answer at all.
    """
    rows = [_new_row(prompt, settings, spec) for prompt in prompts]
    going = dict(zip((prompt.prompt_id for prompt in prompts), zip(prompts, rows, strict=True), strict=True))
    turn = 0
    while going:
        requests = []
        for name, (prompt, row) in list(going.items()):
            request = _next_request(decoder, tokenizer, prompt, row, turn, settings, spec)
            if request is None:
                del going[name]
            else:
                requests.append(request)
        for completion in decoder.generate(sorted(requests, key=lambda request: -len(request.prompt_ids))):
            prompt, row = going[completion.request_id]
            output = completion.output_ids
            if unknown_token(decoder.target, output[-1:]) is not None:
                output, row["ended"] = output[:-1], "no token"
                del going[completion.request_id]
            row["response_ids"], row["finish_reason"] = output, completion.finish_reason
            history = answer_message(tokenizer, row["prompt_ids"], output, spec.stop_token_ids, prompt.tools)
            row["conversations"].append(history)
        turn += 1
    return rows


def _next_request(
    decoder: Any, tokenizer: Any, prompt: Prompt, row: dict[str, Any], turn: int, settings: Settings, spec: TargetSpec
) -> Any:
    """The request for the answer to a turn, noted in the row; None where the conversation ends before it."""
    if turn >= len(prompt.turns) or row["finish_reason"] == "length":
        return None
    said, room = [*row["conversations"], *prompt.turns[turn]], settings.regenerate.max_new_tokens
    try:
        ids = render_turn(tokenizer, prompt, said, settings)
    except TemplateRefuses:
        row["ended"] = "template"
        return None
    request = make_request(prompt.prompt_id, ids, room, spec, settings.run.seed + turn)
    if decoder.why_not(request) is not None:
        row["ended"] = "context"
        return None
    row |= {"conversations": said, "prompt_ids": ids, "shortened": request.max_new_tokens < room}
    return request


def read_conversations(folder: Folder) -> Iterator[dict[str, Any]]:
    """The rows of `train.jsonl`, in order. Raises UserError at a damaged line."""
    cure = (
        "restore the file, or set `complete` to false in stages/regenerate.json: `dspark regenerate CONFIG` then joins "
        "it anew from the answers"
    )
    return read_rows(folder, TRAIN, ConversationRow, cure)


def _new_row(prompt: Prompt, settings: Settings, spec: TargetSpec) -> dict[str, Any]:
    mode = "on" if thinks(settings.target.thinking, settings.run.seed, prompt.prompt_id) else "off"
    return {
        "key": answer_key(prompt),
        "id": prompt.prompt_id,
        "domain": prompt.domain,
        "split": prompt.split,
        "conversations": [],
        "prompt_ids": [],
        "response_ids": [],
        "finish_reason": None,
        "ended": None,
        "shortened": False,
        "thinking": mode,
        "generator": {"target": spec.name, "revision": spec.revision, "sampling": _sampling(settings)},
    }


def _join(
    settings: Settings,
    spec: TargetSpec,
    folder: Folder,
    answers: Iterable[dict[str, Any]],
    splits: dict[str, PromptSet],
) -> dict[str, Any]:
    """`train.jsonl` from the answers, the prompts of the other splits beside it, and the counts."""
    minimum = settings.data.min_supervised_tokens
    reasons: Counter[str] = Counter()
    domains: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    short: list[str] = []
    answered = tokens = 0

    def kept() -> Iterator[dict[str, Any]]:
        nonlocal answered, tokens
        for row in answers:
            answered += 1
            reasons[row["finish_reason"] or row["ended"]] += 1
            ended.update([row["ended"]] if row["ended"] else [], shortened=int(row["shortened"]))
            if len(row["response_ids"]) < minimum:
                short.append(row["id"])
                continue
            tokens += len(row["response_ids"])
            domains[row["domain"]] += 1
            yield row

    write_jsonl(folder, TRAIN, kept())
    if not domains:
        if ended["context"] == answered:
            raise UserError(
                f"none of the {answered} prompts fits the target's context of {spec.max_positions} tokens with an "
                "answer; give shorter prompts (data.train)"
            )
        raise UserError(
            f"none of the {answered} answers has the {minimum} tokens that data.min_supervised_tokens asks for "
            f"(finish reasons: {dict(reasons)}); lower it, or check the prompts and the chat template"
        )
    for split in ("calibration", "evaluation"):
        write_jsonl(folder, f"{split}.jsonl", (prompt.to_row() for prompt in splits[split].prompts))
    manifest = {
        "generator": {"target": spec.name, "revision": spec.revision},
        "sampling": _sampling(settings),
        "thinking": settings.target.thinking,
        "rows": answered - len(short),
        "answered": answered,
        "response_tokens": tokens,
        "finish_reasons": dict(reasons),
        "ended": dict(ended),
        "domains": dict(domains),
        "on_policy_rows": answered - len(short),
        "off_policy_rows": 0,
        "dropped": {"fewer_than_min_supervised_tokens": {"count": len(short), "ids": short[:LISTED]}},
        "prompts": {
            split: {
                "sha256": prompts.sha256,
                "prompts": len(prompts.prompts),
                "notes": {
                    reason: {"count": len(places), "rows": places[:LISTED]} for reason, places in prompts.notes.items()
                },
                "sources": [dict(source) for source in prompts.sources],
            }
            for split, prompts in splits.items()
        },
    }
    write_json(folder, MANIFEST, manifest)
    figures = {key: manifest[key] for key in ("rows", "response_tokens", "finish_reasons", "ended")}
    return {**figures, "dropped": len(short)}
