"""Prompts: where they come from, what they say, and which split they belong to.

A row has `conversations` (`role`/`content`, or ShareGPT's `from`/`value`) or `turns` (the user's words, in order).
Answers in a row are not read: the target writes its own. Rows without a prompt are skipped and counted; a line that
cannot be read is an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from pipelines.errors import UserError
from pipelines.settings.schema import PromptSource

Message = dict[str, str]
ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
DEMONSTRATION, HUB, BENCHMARK = "demonstration:", "hub:", "benchmark:"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What is asked: `messages` up to the first question, and the user's `later_turns`, asked one answer at a time."""

    prompt_id: str
    domain: str
    split: str
    messages: tuple[Message, ...]
    later_turns: tuple[str, ...] = ()

    def to_row(self) -> dict[str, Any]:
        """The row of a prompts file; `prompt_from_row` reads it back."""
        later = [{"role": "user", "content": turn} for turn in self.later_turns]
        conversations = [*self.messages, *later]
        return {"id": self.prompt_id, "domain": self.domain, "split": self.split, "conversations": conversations}


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The prompts of one split, what was left out, and what each source resolved to."""

    prompts: tuple[Prompt, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)
    sources: tuple[Mapping[str, Any], ...] = ()

    @property
    def sha256(self) -> str:
        """Of everything that the prompts say, their ids and their order."""
        text = "\n".join(json.dumps(prompt.to_row(), sort_keys=True, ensure_ascii=False) for prompt in self.prompts)
        return hashlib.sha256(text.encode()).hexdigest()

    def without(self, *held_out: PromptSet) -> PromptSet:
        """Drops, and counts, the prompts whose first question stands in another set as well."""
        known = {_question(prompt) for other in held_out for prompt in other.prompts}
        kept = tuple(prompt for prompt in self.prompts if _question(prompt) not in known)
        dropped = len(self.prompts) - len(kept)
        if self.prompts and not kept:
            raise UserError(
                "every training prompt stands in the calibration or evaluation prompts too; give other sources"
            )
        skipped = {**self.skipped, "stands in a held-out split": dropped} if dropped else self.skipped
        return replace(self, prompts=kept, skipped=skipped)


def _question(prompt: Prompt) -> str:
    return " ".join(prompt.messages[-1]["content"].split()).lower()


def read_prompts(sources: Sequence[PromptSource], split: str) -> PromptSet:
    """Every prompt of these sources, in their order. Raises UserError: no such source, a bad line, nothing left."""
    prompts: list[Prompt] = []
    skipped: dict[str, int] = {}
    resolved = []
    for source in sources:
        rows, facts = _open(source)
        before = len(prompts)
        stop = None if source.limit is None else source.skip + source.limit
        for index, (place, row) in enumerate(islice(rows, source.skip, stop), start=source.skip):
            prompt = prompt_from_row(row, place, split=split, default_id=f"{facts['name']}-{index:06d}")
            if prompt is None:
                skipped["no question"] = skipped.get("no question", 0) + 1
                continue
            domain = source.domain or str(row.get("domain") or facts["domain"])
            prompts.append(replace(prompt, domain=domain))
        if len(prompts) == before:
            raise UserError(
                f"data.{split}: {source.source!r} gives no prompt (skip {source.skip}, limit {source.limit})"
            )
        resolved.append({**source.model_dump(exclude_none=True), **facts, "prompts": len(prompts) - before})
    _require_distinct_ids(prompts, split)
    return PromptSet(prompts=tuple(prompts), skipped=skipped, sources=tuple(resolved))


def prompt_from_row(row: Mapping[str, Any], place: str, *, split: str, default_id: str = "") -> Prompt | None:
    """The prompt in a row; None if it asks nothing. Raises UserError if it has the wrong form."""
    messages = _messages(row, place)
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None or not messages[first]["content"].strip():
        return None
    later = [message["content"] for message in messages[first + 1 :] if message["role"] == "user"]
    return Prompt(
        prompt_id=str(row.get("id") or default_id),
        domain=str(row.get("domain") or "general"),
        split=split,
        messages=tuple(message for message in messages[: first + 1] if message["role"] != "assistant"),
        later_turns=tuple(turn for turn in later if turn.strip()),
    )


def _messages(row: Mapping[str, Any], place: str) -> list[Message]:
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
            raise UserError(f"{place}: `turns` must be a list of texts, found {str(turns)[:80]!r}")
        return [{"role": "user", "content": turn} for turn in turns]
    found = row.get("conversations", row.get("messages"))
    if not isinstance(found, list):
        raise UserError(
            f"{place}: a row needs `conversations` or `turns`; it has {', '.join(map(str, row)) or 'nothing'}"
        )
    messages = []
    for message in found:
        role, content = "", None
        if isinstance(message, dict):
            role = ROLES.get(str(message.get("role", message.get("from"))), "")
            content = message.get("content", message.get("value"))
        if not role or not isinstance(content, str):
            raise UserError(
                f"{place}: a message needs a role (system, user or assistant) and a text as content, found "
                f"{str(message)[:80]!r}"
            )
        messages.append({"role": role, "content": content})
    return messages


def _require_distinct_ids(prompts: Sequence[Prompt], split: str) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.prompt_id in seen:
            raise UserError(f"data.{split}: two prompts have the id {prompt.prompt_id!r}; ids must differ")
        seen.add(prompt.prompt_id)


def _open(source: PromptSource) -> tuple[Iterator[tuple[str, dict[str, Any]]], dict[str, Any]]:
    """(place, row) pairs, and what the source resolved to: `name`, `domain`, `revision` or `sha256`."""
    text = source.source
    if text.startswith(DEMONSTRATION):
        split = text.removeprefix(DEMONSTRATION)
        path = Path(str(files("pipelines.data.demonstration") / f"{split}.jsonl"))
        if not path.is_file():
            raise UserError(
                f"there are no demonstration prompts {split!r}; there are train, calibration and evaluation"
            )
        return read_jsonl(path), {"name": f"demonstration-{split}", "domain": "chat", "sha256": file_sha256(path)}
    if text.startswith(BENCHMARK):
        from pipelines.data.benchmarks import open_benchmark

        return open_benchmark(text.removeprefix(BENCHMARK), source.revision, source.folder)
    if text.startswith(HUB):
        name = text.removeprefix(HUB)
        rows, revision = open_hub_dataset(name, source.subset, source.split, source.revision)
        return rows, {"name": name.replace("/", "-"), "domain": "general", "revision": revision}
    path = Path(text).expanduser()
    if not path.is_file():
        raise UserError(
            f"there is no prompts file {text} (looked for {path.absolute()}: paths are relative to the working "
            "directory); a source is a JSONL file, demonstration:SPLIT, benchmark:NAME or hub:OWNER/NAME"
        )
    return read_jsonl(path), {"name": path.stem, "domain": _domain_of_file(path.stem), "sha256": file_sha256(path)}


def _domain_of_file(stem: str) -> str:
    from pipelines.data.benchmarks import BENCHMARKS

    return BENCHMARKS[stem].domain if stem in BENCHMARKS else stem


def open_hub_dataset(
    name: str, subset: str | None, split: str, revision: str | None, **options: Any
) -> tuple[Iterator[tuple[str, dict[str, Any]]], str | None]:
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


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, object) for each line that is not blank. Raises UserError at a line that is no JSON object."""
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            place = f"{path}:{number}"
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{place}: not UTF-8 (byte {raw[error.start]:#04x} at position {error.start + 1} of the line); "
                    "save the file as UTF-8"
                ) from None
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{place}: not valid JSON: {error.msg} (column {error.colno})") from None
            if not isinstance(row, dict):
                raise UserError(f"{place}: expected a JSON object, found {line.strip()[:60]!r}")
            yield place, row


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write all rows, or, if that is interrupted, none."""
    from storage.files.filesystems import Folder

    path = path.absolute()
    with Folder(path.parent).writer(path.name) as stream:
        for row in rows:
            stream.write((json.dumps(row, ensure_ascii=False) + "\n").encode())


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
