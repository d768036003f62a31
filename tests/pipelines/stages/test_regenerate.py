"""Answers to prompts: what is kept when rows change, what ends a conversation, and what is said of it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.decoding.decoder import Decoder, SamplingConfig
from pipelines.data.answers import generated_sample
from pipelines.data.chat import render_prompt
from pipelines.data.conversations import BAD_ROW, NO_QUESTION, Prompt, PromptSet
from pipelines.errors import UserError
from pipelines.progress import Reporter
from pipelines.records import AnswerRow
from pipelines.reporting.report import conversation_summary
from pipelines.runs.run import Run
from pipelines.settings import Settings, load_settings
from pipelines.stages import regenerate
from pipelines.stages.regenerate import (
    TOOLS_NOT_SHOWN,
    AnswerWorker,
    answer_key,
    find_answers,
    left_out,
    read_answers,
    read_conversations,
    read_splits,
    render_first,
)
from pipelines.target_spec import resolve_target
from storage.files.filesystems import Folder

CHATML = (
    "{% for m in messages %}<|start|>{{ m['role'] }} {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)
REFUSES_ANSWERS = (
    "{% for m in messages if m['role'] == 'assistant' and m['content'] != 'Yes.' %}"
    "{{ raise_exception('channel tags') }}{% endfor %}" + CHATML
)
REFUSES_SYSTEM = (
    "{% for m in messages if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endfor %}" + CHATML
)
WITH_DATE = "{{ strftime_now('%d %b %Y') }}" + CHATML
NOTHING: dict[str, Any] = dict.fromkeys(("dropped", "rows_apart", "off_policy_rows"), 0)
LONG = 128  # the toy target's context


def prompt(name: str, *questions: str, **more: Any) -> Prompt:
    turns = tuple(({"role": "user", "content": question},) for question in questions)
    return Prompt(prompt_id=name, domain="d", split="train", turns=turns, place=f"f:{name}", **more)


def load(folder: Path, target: Path, rows: Sequence[dict[str, Any]] = (), *words: str) -> Settings:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or [{"turns": ["a?"]}]))
    return load_settings(
        Path(__file__).parents[3] / "configs" / "tiny.yaml",
        [
            f"run.directory={folder / 'run'}",
            f"target.model={target}",
            f"data.train=[{{source: {folder / 'train.jsonl'}}}]",
            "data.min_supervised_tokens=1",
            "regenerate.temperature=1.0",
            "regenerate.prompts_per_work_item=2",
            "regenerate.max_new_tokens=6",
            "tracking.wandb=disabled",
            *words,
        ],
    )


@pytest.fixture
def templated(toy_folder: Path, tmp_path: Path) -> Iterator[Any]:
    """Makes the toy target with another chat template."""

    def make(template: str) -> Path:
        folder = tmp_path / "target"
        folder.mkdir(exist_ok=True)
        for file in toy_folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "chat_template.jinja").write_text(template)
        regenerate._open_tokenizer.cache_clear()
        return folder

    yield make
    regenerate._open_tokenizer.cache_clear()


def test_everything_left_out_has_a_line_with_its_reason() -> None:
    splits = {"train": PromptSet(prompts=(), notes={NO_QUESTION: ("f:1",)}), "evaluation": PromptSet(prompts=())}
    ended = {"context": 9, "template": 1, "shortened": 0}
    result = {"rows": 4, "answered": 12, "rows_apart": 2, "off_policy_rows": 3, "dropped": 10, "ended": ended}
    assert left_out(result, splits, 14) == [
        "train: 1 prompts left out: no question",
        "9 of 12 conversations end early: the next question does not fit the target's context with an answer",
        "1 of 12 conversations end early: the chat template refuses the target's own answer as history, or writes a "
        "tool call of the row otherwise than the target would",
        "2 answers have rows of their own: the chat template renders the answers before them otherwise than the target "
        "wrote them",
        "3 of 4 rows also teach tool calls that the data has",
        "10 of 14 rows dropped, with fewer than data.min_supervised_tokens=14; their ids are in manifest.json",
    ]
    assert left_out({**NOTHING, "rows": 2, "answered": 2, "ended": {"shortened": 0}}, {}, 14) == []


def test_answers_stay_when_rows_come_and_go(toy_folder: Path, tmp_path: Path) -> None:
    """Rows without ids, of which one in front is deleted and one changed: the others' answers are neither lost nor
    drawn otherwise, whatever work item they were in."""
    rows = [{"turns": [f"question {index}?"]} for index in range(5)]

    worker = AnswerWorker(load(tmp_path, toy_folder), resolve_target(load(tmp_path, toy_folder)), Folder(tmp_path))

    def answers(rows: list[dict[str, Any]], folder: Path) -> tuple[list[str], list[dict[str, Any]]]:
        prompts = read_splits(load(tmp_path, toy_folder, rows))["train"].prompts
        places = find_answers(Folder(folder), regenerate._work_items(prompts, 2))
        todo = [item for item in prompts if answer_key(item) not in places]
        worker.folder = Folder(folder)
        for item in regenerate._work_items(todo, 2):
            worker.run(item)
        places = find_answers(Folder(folder), regenerate._work_items(prompts, 2))
        found = list(read_answers(Folder(folder), prompts, places))
        return [question for item in todo for question in item.questions], found

    asked, first = answers(rows, tmp_path / "kept")
    assert len(asked) == 5
    assert answers(rows, tmp_path / "kept") == ([], first)
    changed = [rows[1], {"turns": ["another?"]}, *rows[3:]]
    asked, second = answers(changed, tmp_path / "kept")
    assert asked == ["another?"]
    assert [second[0], *second[2:]] == [first[1], *first[3:]]
    assert second == answers(changed, tmp_path / "anew")[1]


def test_damaged_answers_are_named(tmp_path: Path) -> None:
    item = regenerate._work_items([prompt("a", "b")], 2)[0]
    (tmp_path / item.name).write_text('{"key": "torn')
    places = find_answers(Folder(tmp_path), [item])
    with pytest.raises(UserError, match=rf"{item.name}:1: not valid JSON.*; remove the file, and its prompts"):
        list(read_answers(Folder(tmp_path), item.prompts, places))
    (tmp_path / item.name).write_text("")
    with pytest.raises(UserError, match="lacks the answer to 'a'; remove the file"):
        list(read_answers(Folder(tmp_path), item.prompts, places))


def answer_one(target: Path, folder: Path, asked: Prompt, *words: str, stop_tokens: int = 1) -> dict[str, Any]:
    wanted = load(folder, target, (), *words)
    worker = AnswerWorker(wanted, resolve_target(wanted), Folder(folder))
    spec = replace(worker.spec, stop_token_ids=tuple(range(stop_tokens)))
    return regenerate.answer(worker.decoder, worker.target.tokenizer, [asked], wanted, spec)[-1]


def test_answers_are_no_longer_than_the_context(toy_folder: Path, tmp_path: Path) -> None:
    """A question with room for some tokens is answered with at most so many; one without room is not."""
    row = answer_one(toy_folder, tmp_path, prompt("p", "x" * 100), "regenerate.max_new_tokens=4096")
    assert 0 < len(row["response_ids"]) <= LONG - len(row["prompt_ids"])
    assert (row["shortened"], row["ended"]) == (True, None)
    row = answer_one(toy_folder, tmp_path, prompt("p", "x" * 200))
    assert (row["response_ids"], row["ended"], row["finish_reason"]) == ([], "context", None)
    wanted = load(tmp_path, toy_folder)
    with pytest.raises(UserError, match=r"none of the 1 prompts fits the target's context of 128 tokens"):
        regenerate._join(wanted, resolve_target(wanted), Folder(tmp_path / "out"), [[row]], {})


def test_an_answer_that_its_template_refuses_ends_the_conversation(templated: Any, tmp_path: Path) -> None:
    asked = prompt("p", "one?", "two?")
    whole = answer_one(templated(CHATML), tmp_path, asked, stop_tokens=200)
    assert whole["finish_reason"] == "stop"
    assert [message["role"] for message in whole["conversations"]] == ["user", "assistant"] * 2
    ended = answer_one(templated(REFUSES_ANSWERS), tmp_path, asked, stop_tokens=200)
    assert (ended["ended"], ended["finish_reason"]) == ("template", "stop")
    assert ended["conversations"] == whole["conversations"][:2]


JOINS = CHATML.replace("<|start|>{% endif %}", "<|start|>assistant {% endif %}")


def test_all_answers_of_a_conversation_are_labels(templated: Any, tmp_path: Path) -> None:
    """In one row where the template keeps the text, each as it was written; with history masked, the last alone."""
    asked = prompt("p", "one?", "two?", "three?")
    wanted = load(tmp_path, templated(JOINS))
    worker = AnswerWorker(wanted, resolve_target(wanted), Folder(tmp_path))
    worker.target.tokenizer.add_special_tokens({"additional_special_tokens": []})
    spec = replace(worker.spec, stop_token_ids=tuple(range(200)))
    rows = regenerate.answer(worker.decoder, worker.target.tokenizer, [asked], wanted, spec)
    alone = [
        regenerate.answer(
            worker.decoder, worker.target.tokenizer, [replace(asked, turns=asked.turns[:count])], wanted, spec
        )[-1]
        for count in (1, 2, 3)
    ]
    assert [row["id"] for row in rows][:1] == ["p"]
    assert len({row["id"] for row in rows}) == len(rows)
    taught = []
    for row in rows:
        ids = [*row["prompt_ids"], *row["response_ids"]]
        spans = row.get("spans") or [[len(row["prompt_ids"]), len(ids)]]
        taught += [(ids[:start], ids[start:end]) for start, end in spans]
        AnswerRow.model_validate(row)
    assert taught == [(row["prompt_ids"], row["response_ids"]) for row in alone]
    masked = load(tmp_path, Path(wanted.target.model), (), "data.mask_history=true")
    (last,) = regenerate.taught_rows(rows, masked)
    assert (last["id"], last["response_ids"]) == ("p", alone[-1]["response_ids"])
    assert "spans" not in last
    assert regenerate.taught_rows(rows, wanted) == rows


def test_several_turns_are_part_of_the_identity_and_one_is_not(toy_folder: Path, tmp_path: Path) -> None:
    def fields(turns: list[str], *words: str) -> dict[str, Any]:
        return Run(load(tmp_path, toy_folder, [{"turns": turns}], *words)).fields("regenerate")

    assert "mask_history" not in fields(["a?"])
    assert fields(["a?", "b?"])["mask_history"] is False
    assert "mask_history" not in fields(["a?", "b?"], "data.mask_history=true")


def test_every_prompt_is_rendered_before_one_is_answered(templated: Any, tmp_path: Path) -> None:
    wanted = load(tmp_path, templated(REFUSES_SYSTEM))
    tokenizer = regenerate._tokenizer(resolve_target(wanted), wanted)
    late = Prompt(
        prompt_id="late",
        domain="d",
        split="train",
        turns=(
            ({"role": "user", "content": "a"},),
            ({"role": "system", "content": "b"}, {"role": "user", "content": "c"}),
        ),
        place="f:900000",
    )
    good = prompt("tools", "x", tools=({"name": "t"},))
    splits = {"train": PromptSet(prompts=(good, late))}
    with pytest.raises(UserError, match=r"(?s)^f:900000: the chat template .* no system role.*data\.on_bad_row=skip"):
        render_first(splits, tokenizer, wanted, Reporter(quiet=True))
    skipping = load(tmp_path, Path(wanted.target.model), (), "data.on_bad_row=skip")
    found = render_first(splits, tokenizer, skipping, Reporter(quiet=True))["train"]
    assert found.prompts == (good,)
    assert found.notes[BAD_ROW][0].startswith("f:900000: ")
    assert found.notes[TOOLS_NOT_SHOWN] == ("f:tools",)
    with pytest.raises(UserError, match=r"data\.train: the chat template refuses every prompt"):
        render_first({"train": PromptSet(prompts=(late,))}, tokenizer, skipping, Reporter(quiet=True))


def test_a_run_has_one_date(templated: Any, tmp_path: Path) -> None:
    """The time of its first start, which a template that asks for it makes part of the identity."""
    target = templated(WITH_DATE)
    wanted = load(tmp_path, target, (), "data.render_time=2020-01-02T03:04:05")
    run = Run(wanted)
    assert run.fields("regenerate")["render_time"] == "2020-01-02 03:04:05"
    run.write_summary()
    later = Run(load(tmp_path, target))  # the settings do not name a time any more
    assert later.settings.data.render_time == wanted.data.render_time
    assert later.identity("regenerate") == run.identity("regenerate")
    tokenizer = regenerate._tokenizer(resolve_target(wanted), wanted)
    ids = regenerate.render_turn(tokenizer, prompt("p", "a"), prompt("p", "a").turns[0], later.settings)
    assert tokenizer.decode(ids).startswith("02 Jan 2020")
    assert ids != render_prompt(tokenizer, prompt("p", "a").turns[0], thinking=False)
    assert "render_time" not in Run(load(tmp_path, templated(CHATML))).fields("regenerate")


ROW = {
    "id": "a",
    "domain": "chat",
    "conversations": [{"role": "user", "content": "hello"}],
    "prompt_ids": [1, 2],
    "response_ids": [3],
    "finish_reason": "stop",
    "thinking": "off",
}


@pytest.mark.fuzz
@given(place=st.integers(0, 10**4), new=st.binary(min_size=1, max_size=8))
def test_a_damaged_line_of_the_conversations_is_named(place: int, new: bytes) -> None:
    """Rows that come through are ones that the cache stage can take, whatever the damage."""
    line = json.dumps(ROW).encode()
    place %= len(line)
    damaged = line[:place] + new.replace(b"\n", b" ").replace(b"\r", b" ") + line[place + len(new) :]
    with TemporaryDirectory() as folder:
        Path(folder, "train.jsonl").write_bytes(line + b"\n" + damaged + b"\n")
        rows, message = read_conversations(Folder(folder)), "train.jsonl:2: "
        assert next(rows) == ROW
        try:
            second = next(rows)
        except UserError as error:
            second, message = None, str(error)
    assert "train.jsonl:2: " in message
    if second is None:
        return
    generated_sample(second["prompt_ids"] or [0], second["response_ids"], 10, spans=second.get("spans"))
    conversation_summary([second])
    assert {type(second[key]) for key in ("id", "domain")} == {str}


CHECKED = ("id", "domain", "conversations", "prompt_ids", "response_ids")


@pytest.mark.parametrize(
    "line",
    [
        "null",
        "[]",
        "{}",
        "9" * 5000,
        "[" * 10**5,
        *(json.dumps({**ROW, key: 5}) for key in CHECKED),
        *(
            json.dumps({**ROW, "spans": spans})
            for spans in ([], [[0]], [[2, 2]], [[1, 2], [0, 3]], [[0, 4]], [[-1, 2]], 5)
        ),
    ],
)
def test_what_is_no_conversation_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=r"train\.jsonl:1: .*stages/regenerate\.json"):
        list(read_conversations(Folder(tmp_path)))


def test_an_answer_ends_before_an_id_that_the_tokenizer_does_not_have(toy_folder: Path, tmp_path: Path) -> None:
    settings = load(tmp_path, toy_folder, (), "regenerate.temperature=3.0", "regenerate.max_new_tokens=40")
    worker = AnswerWorker(settings, resolve_target(settings), Folder(tmp_path))
    worker.target.input_vocab_size -= 60  # the last ids stand for logits that pad the head
    decoder = Decoder(worker.target, sampling=SamplingConfig(temperature=3.0))
    prompts = [prompt(f"p{number}", "x", "y") for number in range(4)]
    rows = regenerate.answer(decoder, worker.target.tokenizer, prompts, settings, worker.spec)
    assert "no token" in {row["ended"] for row in rows}
    assert all(token < worker.target.input_vocab_size for row in rows for token in row["response_ids"])
    kept = regenerate.left_out({**NOTHING, "rows": 4, "answered": 4, "ended": {"no token": 2}}, {}, 1)
    assert kept == ["2 of 4 conversations end before an id that the target wrote and the tokenizer does not have"]
