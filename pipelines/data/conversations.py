"""Prompts: where they come from, what they say, and which split they belong to.

`messages.py` lists the shapes that a row may have; beside them it may have `id` and `domain`. Answers in a row are not
read: the target writes its own. Tool calls that have results stay. A row without a question is left out and counted;
one that cannot be read is an error, or left out and counted too (`data.on_bad_row`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pipelines.data.benchmarks import BENCHMARKS, Benchmark
from pipelines.data.messages import Message, is_call, read_messages, read_tools, value_of
from pipelines.errors import UserError
from pipelines.json_files import parse_row, read_lines
from pipelines.settings.schema import PromptSource

Row = tuple[str, dict[str, Any] | UserError]  # its place, and what it holds or why it cannot be read
DEMONSTRATION, HUB, BENCHMARK = "demonstration:", "hub:", "benchmark:"
NO_QUESTION, BAD_ROW = "left out: no question", "left out: could not be read"
IN_ANOTHER_SPLIT = "left out: a question stands in the calibration or evaluation prompts"
CUT_AT_TOOL = "cut before a tool's result, which no call of the row asked for"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What is asked. Each of `turns` is what is said before one answer.

    That is a question with system messages before it, and after it the tool calls of the row with their results, which
    stay as they are: the results answer no other calls.
    """

    prompt_id: str
    domain: str
    split: str
    turns: tuple[tuple[Message, ...], ...]
    tools: tuple[dict[str, Any], ...] = ()  # JSON schemas, for the chat template
    place: str = field(default="", compare=False)  # file:line, for messages

    @property
    def messages(self) -> tuple[Message, ...]:
        """Up to the first question."""
        return self.turns[0]

    @property
    def question(self) -> str:
        """The first one."""
        return str(next(message["content"] for message in self.turns[0] if message["role"] == "user"))

    @property
    def questions(self) -> list[str]:
        """Every question, without what spaces and capitals make different."""
        asked = [message["content"] for turn in self.turns for message in turn if message["role"] == "user"]
        return [" ".join(question.split()).lower() for question in asked]

    def count_answers(self) -> int:
        """The row's tool calls, and one answer a turn."""
        return len(self.turns) + sum(message["role"] == "assistant" for turn in self.turns for message in turn)

    def request_id(self, turn: int) -> str:
        """The name of an answer, counted from 0; `read_prompts` refuses ids that would share one."""
        return self.prompt_id if turn == 0 else f"{self.prompt_id}/turn-{turn + 1}"

    def to_row(self) -> dict[str, Any]:
        """The row of a prompts file; `prompt_from_row` reads it back."""
        row = {"id": self.prompt_id, "domain": self.domain, "split": self.split}
        said = {"conversations": [message for turn in self.turns for message in turn]}
        return {**row, **said, **({"tools": list(self.tools)} if self.tools else {})}


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The prompts of one split, the rows that were left out or changed (places by reason), and what each source is."""

    prompts: tuple[Prompt, ...]
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sources: tuple[Mapping[str, Any], ...] = ()

    @property
    def sha256(self) -> str:
        """Of everything that the prompts say, their ids and their order."""
        text = "\n".join(json.dumps(prompt.to_row(), sort_keys=True, ensure_ascii=False) for prompt in self.prompts)
        return hashlib.sha256(text.encode()).hexdigest()

    def keep(self, why_not: Callable[[Prompt], str | None], reason: str) -> PromptSet:
        """Those of which `why_not` says nothing; the others are noted under the reason, with what it says."""
        found = [(prompt, why_not(prompt)) for prompt in self.prompts]
        places = tuple(why for _, why in found if why is not None)
        kept = tuple(prompt for prompt, why in found if why is None)
        return replace(self, prompts=kept).noting(reason, places)

    def noting(self, reason: str, places: Sequence[str]) -> PromptSet:
        """The same with these places under the reason too."""
        together = (*self.notes.get(reason, ()), *places)
        return replace(self, notes={**self.notes, reason: together}) if together else self

    def without(self, *others: PromptSet) -> PromptSet:
        """Leaves out, and notes, the prompts with a question, at any turn, that is one of another set's as well."""
        known = {question for other in others for prompt in other.prompts for question in prompt.questions}
        kept = self.keep(lambda prompt: None if known.isdisjoint(prompt.questions) else prompt.place, IN_ANOTHER_SPLIT)
        if self.prompts and not kept.prompts:
            raise UserError(
                "every training prompt stands in the calibration or evaluation prompts too; give other sources"
            )
        return kept


def read_prompts(
    sources: Sequence[PromptSource], split: str, on_bad_row: Literal["error", "skip"] = "error"
) -> PromptSet:
    """Every prompt of these sources, in their order. Raises UserError: no such source, a bad row, nothing left."""
    prompts: list[Prompt] = []
    notes: dict[str, list[str]] = {}
    names: dict[str, str] = {}  # of every answer: where its prompt stands
    same: Counter[str] = Counter()  # rows without an id that say the same
    resolved = []
    for source in sources:
        rows, facts = _open(source)
        before = len(prompts)
        stop = None if source.limit is None else source.skip + source.limit
        for place, row in islice(rows, source.skip, stop):
            changes: list[str] = []
            try:
                if isinstance(row, UserError):
                    raise row
                prompt = prompt_from_row(row, place, split=split, note=changes.append)
                if prompt is not None:
                    if source.turns == "first" or (source.turns is None and source.source.startswith(BENCHMARK)):
                        prompt = replace(prompt, turns=prompt.turns[:1])
                    prompt = replace(prompt, domain=source.domain or str(value_of(row, "domain") or facts["domain"]))
                    if not prompt.prompt_id:
                        prompt = replace(prompt, prompt_id=_name_by_content(prompt, facts["name"], same))
                    _take_names(prompt, names)
            except UserError as error:
                notes.setdefault(BAD_ROW, []).append(str(bad_row(error, on_bad_row)))
                continue
            for change in changes:
                notes.setdefault(change, []).append(place)
            if prompt is not None:
                prompts.append(prompt)
        if len(prompts) == before:
            raise UserError(
                f"data.{split}: {source.source!r} gives no prompt (skip {source.skip}, limit {source.limit}; "
                f"{', '.join(f'{len(places)} {reason}' for reason, places in notes.items()) or 'it has no rows'})"
            )
        resolved.append({**source.model_dump(exclude_none=True), **facts, "prompts": len(prompts) - before})
    places = {reason: tuple(found) for reason, found in notes.items()}
    return PromptSet(prompts=tuple(prompts), notes=places, sources=tuple(resolved))


def bad_row(error: UserError, on_bad_row: Literal["error", "skip"]) -> UserError:
    """The error, where bad rows are left out; raised with the cure where they are not."""
    if on_bad_row == "skip":
        return error
    raise UserError(f"{error}\nMend the row, or leave such rows out with data.on_bad_row=skip.") from error


def _name_by_content(prompt: Prompt, source: str, same: Counter[str]) -> str:
    """An id that stays when other rows come or go."""
    said = json.dumps([prompt.turns, prompt.tools], sort_keys=True, ensure_ascii=False)
    name = f"{source}-{hashlib.sha256(said.encode()).hexdigest()[:16]}"
    same[name] += 1
    return name if same[name] == 1 else f"{name}-{same[name]}"


def _take_names(prompt: Prompt, names: dict[str, str]) -> None:
    own = [prompt.request_id(number) for number in range(prompt.count_answers())]
    if taken := [name for name in own if name in names]:
        raise UserError(
            f"{prompt.place}: two prompts have the id {taken[0]!r}, which a turn of {names[taken[0]]} has already; "
            "ids must differ"
        )
    names.update(dict.fromkeys(own, prompt.place))


def prompt_from_row(
    row: Mapping[str, Any], place: str, *, split: str, note: Callable[[str], None] = lambda reason: None
) -> Prompt | None:
    """The prompt in a row; None if it asks nothing. Raises UserError if it has the wrong form.

    Args:
        note: receives what is left out of the row, or why all of it is.
    """
    turns: list[tuple[Message, ...]] = []
    before: list[Message] = []
    messages = read_messages(row, place)
    answered = False
    for message, following in zip(messages, [*messages[1:], None], strict=False):
        if message["role"] == "assistant":
            called = following is not None and following["role"] == "tool"
            if called and turns and not answered:
                if message["content"] is None and not is_call(message):
                    raise UserError(f"{place}: the content of a tool call is neither a text nor `tool_calls`")
                turns[-1] += (*before, message)
                before = []
            answered = answered or not called
        elif message["role"] == "tool":
            if answered or not turns or turns[-1][-1]["role"] == "user":
                note(CUT_AT_TOOL)
                break
            turns[-1] += (message,)
        elif (message["content"] or "").strip():
            before.append(message)
        elif message["role"] == "user" and not turns:
            break
        if message["role"] == "user" and before:
            turns.append(tuple(before))
            before, answered = [], False
    if not turns:
        note(NO_QUESTION)
        return None
    name = value_of(row, "id")
    return Prompt(
        prompt_id="" if name is None else str(name),
        domain=str(value_of(row, "domain") or "general"),
        split=split,
        turns=tuple(turns),
        tools=read_tools(row, place),
        place=place,
    )


def _open(source: PromptSource) -> tuple[Iterator[Row], dict[str, Any]]:
    """The rows, and what the source resolved to: `name`, `domain`, `revision` or `sha256`."""
    text = source.source
    if text.startswith(DEMONSTRATION):
        split = text.removeprefix(DEMONSTRATION)
        path = Path(str(files("pipelines.data.demonstration") / f"{split}.jsonl"))
        if not path.is_file():
            raise UserError(
                f"there are no demonstration prompts {split!r}; there are train, calibration and evaluation"
            )
        return _file_rows(path), {"name": f"demonstration-{split}", "domain": "chat", "sha256": file_sha256(path)}
    if text.startswith(BENCHMARK):
        return open_benchmark(text.removeprefix(BENCHMARK), source.revision, source.folder)
    if text.startswith(HUB):
        name = text.removeprefix(HUB)
        rows, revision = open_hub_dataset(name, source.subset, source.split, source.revision)
        return rows, {"name": name.replace("/", "-"), "domain": "general", "revision": revision}
    path = Path(text).expanduser()
    if path.is_dir():
        raise UserError(f"{path} is a folder; name the prompts file in it")
    if not path.is_file():
        raise UserError(
            f"there is no prompts file {text} (looked for {path.absolute()}: paths are relative to the working "
            "directory); a source is a JSONL file, demonstration:SPLIT, benchmark:NAME or hub:OWNER/NAME"
        )
    name = path.name.partition(".")[0]
    domain = BENCHMARKS[name].domain if name in BENCHMARKS else name
    return _file_rows(path), {"name": name, "domain": domain, "sha256": file_sha256(path)}


def _file_rows(path: Path) -> Iterator[Row]:
    for number, line in read_lines(path):
        try:
            yield f"{path}:{number}", parse_row(line, str(path), number)
        except UserError as error:
            yield f"{path}:{number}", error


def open_benchmark(name: str, revision: str | None, folder: str | None = None) -> tuple[Iterator[Row], dict[str, Any]]:
    """Rows with `turns`, and what the benchmark resolved to: a hub commit, or the hash of a local file.

    With `folder` the rows come from its NAME.jsonl, which has `turns`. Raises UserError: no such benchmark or file.
    """
    if name not in BENCHMARKS:
        close = get_close_matches(name, BENCHMARKS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UserError(f"there is no benchmark {name!r}; {hint}known are {', '.join(BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    facts: dict[str, Any] = {"name": name, "domain": benchmark.domain}
    if folder is not None:
        path = Path(folder).expanduser() / f"{name}.jsonl"
        if not path.is_file():
            raise UserError(
                f"benchmark:{name} is to be read from {path}, which does not exist; see the source's `folder`"
            )
        return islice(_file_rows(path), benchmark.count), {**facts, "sha256": file_sha256(path)}
    options = {"data_files": {benchmark.split: benchmark.data_files}} if benchmark.data_files else {}
    rows, revision = open_hub_dataset(benchmark.dataset, benchmark.subset, benchmark.split, revision, **options)
    found = (_as_turns(place, row, benchmark) for place, row in islice(rows, benchmark.count))
    return found, {**facts, "dataset": benchmark.dataset, "revision": revision}


def _as_turns(place: str, row: dict[str, Any] | UserError, benchmark: Benchmark) -> Row:
    assert isinstance(row, dict)
    try:
        return place, {"turns": benchmark.turns(row), "domain": benchmark.domain}
    except KeyError as error:
        raise UserError(
            f"{place} has no column {error}; it has {', '.join(row)}: set the source's revision to one that has it"
        ) from None
    except TypeError as error:
        return place, UserError(f"{place}: a column of this benchmark is not a text ({error})")


def open_hub_dataset(
    name: str, subset: str | None, split: str, revision: str | None, **options: Any
) -> tuple[Iterator[Row], str | None]:
    """Rows of a Hugging Face data set (or of a local folder that `datasets` reads), and the commit they are of."""
    import datasets

    try:
        if revision is None and not Path(name).exists():
            from huggingface_hub import HfApi

            revision = HfApi().dataset_info(name).sha
        table = datasets.load_dataset(name, name=subset, split=split, revision=revision, **options)
    except Exception as error:  # the hub client raises many kinds; each becomes one message that names the cure
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"could not read the data set {name!r} (subset {subset}, split {split}): {reason}\n"
            "Check its name and the network, or give a JSONL file with `conversations` or `turns`."
        ) from error
    return ((f"{name}[{index}]", dict(row)) for index, row in enumerate(table)), revision


def evenly_spaced(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the items, evenly spread over them, in their order."""
    if len(items) <= count:
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
