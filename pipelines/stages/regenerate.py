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
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from dspark.decoding.decoder import Decoder, SamplingConfig
from dspark.decoding.target import Target, open_tokenizer
from dspark.decoding.target_checks import unknown_token
from pipelines.data.answers import GIVEN, Answer, given_answer, join_answers, supervised_tokens
from pipelines.data.chat import TemplateRefuses, answer_message, make_request, reads_the_clock, render_turn, thinks
from pipelines.data.conversations import BAD_ROW, Prompt, PromptSet, bad_row, read_prompts
from pipelines.data.messages import Message
from pipelines.errors import UserError
from pipelines.json_files import write_json, write_jsonl
from pipelines.records import AnswerRow, ConversationRow, read_rows, write_rows
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


def check(settings: Settings) -> None:
    """Raises UserError for prompts that cannot be read."""
    read_splits(settings)


def identity(settings: Settings, run: Run) -> dict[str, Any]:
    """The target, the prompts, and how answers are drawn."""
    splits = read_splits(settings)
    several = any(prompt.count_answers() > 1 for prompt in splits["train"].prompts)
    return {
        **answer_fields(settings),
        "prompts": {split: prompts.sha256 for split, prompts in splits.items()},
        "min_supervised_tokens": settings.data.min_supervised_tokens,
        **({"mask_history": False} if several and not settings.data.mask_history else {}),
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
    said: list[Any] = [prompt.prompt_id, prompt.turns, prompt.tools]
    if prompt.count_answers() > 1:
        said.append("with every answer")
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


def read_answers(
    folder: Folder, prompts: Iterable[Prompt], places: Mapping[str, str]
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each of these prompts in their order, with the domain and split that it has now."""

    @lru_cache(maxsize=4)
    def rows(name: str) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for row in _answer_rows(folder, name):
            found.setdefault(row["key"], []).append(row)
        return found

    for prompt in prompts:
        key = answer_key(prompt)
        if (of_prompt := rows(places[key]).get(key)) is None:
            raise UserError(
                f"{folder.describe(places[key])} lacks the answer to {prompt.prompt_id!r}; remove the file, and its "
                "prompts are answered again"
            )
        now = {"domain": prompt.domain, "split": prompt.split}
        yield [{**{name: row[name] for name in row if name != "key"}, **now} for row in of_prompt]


def left_out(result: dict[str, Any], splits: dict[str, PromptSet], minimum: int) -> list[str]:
    """A line for everything that will not be trained on or evaluated, and why."""
    lines = [
        f"{split}: {len(places)} prompts {reason}"
        for split, prompts in splits.items()
        for reason, places in prompts.notes.items()
    ]
    answered = result["answered"]
    why = {
        "context": "end early: the next question does not fit the target's context with an answer",
        "template": "end early: the chat template refuses the target's own answer as history, or writes a tool call of "
        "the row otherwise than the target would",
        "no token": "end before an id that the target wrote and the tokenizer does not have",
        "shortened": "had less room in the target's context than regenerate.max_new_tokens",
    }
    lines += [f"{count} of {answered} conversations {why[name]}" for name, count in result["ended"].items() if count]
    if result["rows_apart"]:
        lines.append(
            f"{result['rows_apart']} answers have rows of their own: the chat template renders the answers before them "
            "otherwise than the target wrote them"
        )
    if result["off_policy_rows"]:
        lines.append(f"{result['off_policy_rows']} of {result['rows']} rows also teach tool calls that the data has")
    if result["dropped"]:
        lines.append(
            f"{result['dropped']} of {result['rows'] + result['dropped']} rows dropped, with fewer than "
            f"data.min_supervised_tokens={minimum}; their ids are in {MANIFEST}"
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
        write_rows(self.folder, item.name, rows)
        return sum(map(supervised_tokens, rows))


def answer_decoder(target: Target, settings: Settings) -> Decoder:
    """Plain decoding as the settings sample answers."""
    section = settings.regenerate
    sampling = SamplingConfig(temperature=section.temperature, top_p=section.top_p, top_k=section.top_k)
    return Decoder(target, sampling=sampling, max_rows=section.batch_size)


def answer(
    decoder: Any, tokenizer: Any, prompts: Sequence[Prompt], settings: Settings, spec: TargetSpec
) -> list[dict[str, Any]]:
    """Rows of the conversations in the prompts' order; a turn is asked with the target's own earlier answers before it.

    All answers of a conversation are in one row where they join (`pipelines/data/answers.py`): the last one is its
    `response_ids`, `spans` are those of all of them, and `given` counts those that the target did not write, the
    row's tool calls. A conversation stops early when an answer is cut, and, which `ended` says, when the
    next question does not fit the context any more ("context"), the template refuses the answer as history
    ("template"), or the target writes an id that the tokenizer does not have ("no token", which is left out).
    `finish_reason` is null where there is no answer at all.
    """
    talks = [_Conversation(prompt=prompt) for prompt in prompts]
    going = {talk.prompt.prompt_id: talk for talk in talks}
    while going:
        requests = {name: _next_request(talk, decoder, tokenizer, settings, spec) for name, talk in going.items()}
        going = {name: going[name] for name, request in requests.items() if request is not None}
        asked = [request for request in requests.values() if request is not None]
        for completion in decoder.generate(sorted(asked, key=lambda request: -len(request.prompt_ids))):
            talk, request = going[completion.request_id], requests[completion.request_id]
            output, prompt_ids = completion.output_ids, list(request.prompt_ids)
            if unknown_token(decoder.target, output[-1:]) is not None:
                output, talk.ended = output[:-1], "no token"
                del going[completion.request_id]
            tools = talk.prompt.tools
            talk.said.append(dict(answer_message(tokenizer, prompt_ids, output, spec.stop_token_ids, tools)))
            talk.answers.append(
                Answer(
                    prompt_ids=prompt_ids,
                    response_ids=list(output),
                    finish_reason=completion.finish_reason,
                    said=len(talk.said),
                    shortened=request.max_new_tokens < settings.regenerate.max_new_tokens,
                )
            )
            talk.turn += 1
    return [row for talk in talks for row in _rows(talk, settings, spec)]


@dataclass(kw_only=True)
class _Conversation:
    """What has been said and answered, up to the next turn."""

    prompt: Prompt
    said: list[Message] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    turn: int = 0
    ended: str | None = None


def _next_request(talk: _Conversation, decoder: Any, tokenizer: Any, settings: Settings, spec: TargetSpec) -> Any:
    """What the target is asked next, after the turn's own tool calls and results; None where the conversation ends."""
    prompt = talk.prompt
    if talk.turn == len(prompt.turns) or (talk.answers and talk.answers[-1].finish_reason == "length"):
        return None
    said, given = list(talk.said), []
    try:
        for message in prompt.turns[talk.turn]:
            said.append(message)
            if message["role"] == "assistant":
                given.append(given_answer(tokenizer, prompt, said, settings, spec.stop_token_ids))
        ids = render_turn(tokenizer, prompt, said, settings)
    except TemplateRefuses:
        talk.ended = "template"
        return None
    seed = settings.run.seed + talk.turn
    request = make_request(prompt.prompt_id, ids, settings.regenerate.max_new_tokens, spec, seed)
    if decoder.why_not(request) is not None:
        talk.ended = "context"
        return None
    talk.said, talk.answers = said, [*talk.answers, *given]
    return request


def read_conversations(folder: Folder) -> Iterator[dict[str, Any]]:
    """The rows of `train.jsonl`, in order. Raises UserError at a damaged line."""
    cure = (
        "restore the file, or set `complete` to false in stages/regenerate.json: `dspark regenerate CONFIG` then joins "
        "it anew from the answers"
    )
    return read_rows(folder, TRAIN, ConversationRow, cure)


def _rows(talk: _Conversation, settings: Settings, spec: TargetSpec) -> list[dict[str, Any]]:
    """The rows that teach a conversation's answers; one without an answer where there is none."""
    prompt, number, rows = talk.prompt, 0, []
    mode = "on" if thinks(settings.target.thinking, settings.run.seed, prompt.prompt_id) else "off"
    groups = join_answers([answer for answer in talk.answers if answer.response_ids] or talk.answers[:1])
    for group in groups or [[]]:
        last = group[-1] if group else None
        row: dict[str, Any] = {
            "key": answer_key(prompt),
            "id": prompt.request_id(number),
            "domain": prompt.domain,
            "split": prompt.split,
            "conversations": talk.said[: last.said] if last else [],
            "prompt_ids": last.prompt_ids if last else [],
            "response_ids": last.response_ids if last else [],
            "finish_reason": last.finish_reason if last else None,
            "ended": None if groups and group is not groups[-1] else talk.ended,
            "shortened": bool(last and last.shortened),
            "thinking": mode,
            "generator": {"target": spec.name, "revision": spec.revision, "sampling": _sampling(settings)},
        }
        if len(group) > 1:
            row["spans"] = [list(answer.span) for answer in group]
        if given := sum(answer.finish_reason == GIVEN for answer in group):
            row["given"] = given
        rows.append(row)
        number += len(group)
    return rows


def taught_rows(rows: list[dict[str, Any]], settings: Settings) -> list[dict[str, Any]]:
    """Of one prompt's rows: all of them, or the last answer alone where history is masked."""
    if not settings.data.mask_history:
        return rows
    row = {name: value for name, value in rows[-1].items() if name not in ("spans", "given")}
    return [{**row, "id": rows[0]["id"]}]


def _join(
    settings: Settings,
    spec: TargetSpec,
    folder: Folder,
    answers: Iterable[list[dict[str, Any]]],
    splits: dict[str, PromptSet],
) -> dict[str, Any]:
    """`train.jsonl` from the answers, the prompts of the other splits beside it, and the counts."""
    minimum = settings.data.min_supervised_tokens
    reasons: Counter[str] = Counter()
    domains: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    short: list[str] = []
    answered = tokens = apart = off_policy = 0

    def kept() -> Iterator[dict[str, Any]]:
        nonlocal answered, tokens, apart, off_policy
        for of_prompt in answers:
            answered += 1
            rows = taught_rows(of_prompt, settings)
            apart += len(rows) - 1
            for row in rows:
                reasons[row["finish_reason"] or row["ended"]] += 1
                ended.update([row["ended"]] if row["ended"] else [], shortened=int(row["shortened"]))
                if (supervised := supervised_tokens(row)) < minimum:
                    short.append(row["id"])
                    continue
                tokens += supervised
                off_policy += bool(row.get("given"))
                domains[row["domain"]] += 1
                yield row

    write_rows(folder, TRAIN, kept())
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
        "rows": sum(domains.values()),
        "answered": answered,
        "rows_apart": apart,
        "response_tokens": tokens,
        "finish_reasons": dict(reasons),
        "ended": dict(ended),
        "domains": dict(domains),
        "on_policy_rows": sum(domains.values()) - off_policy,
        "off_policy_rows": off_policy,
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
    told = ("rows", "answered", "rows_apart", "off_policy_rows", "response_tokens", "finish_reasons", "ended")
    return {**{key: manifest[key] for key in told}, "dropped": len(short)}
