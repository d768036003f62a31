"""Prompts out of files, data sets and benchmarks: what is read, skipped, counted and refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from demonstration_prompts import FOLDER, make_prompts, text_of

from pipelines.data import conversations
from pipelines.data.benchmarks import BENCHMARKS, BOXED
from pipelines.data.conversations import (
    BAD_ROW,
    CUT_AT_TOOL,
    IN_ANOTHER_SPLIT,
    NO_QUESTION,
    Prompt,
    PromptSet,
    file_sha256,
    open_benchmark,
    prompt_from_row,
    read_prompts,
)
from pipelines.data.messages import read_messages
from pipelines.errors import UserError
from pipelines.settings.schema import PromptSource


def write(folder: Path, *rows: Any, name: str = "prompts.jsonl") -> PromptSource:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / name).write_text("\n".join(lines) + "\n")
    return PromptSource(source=str(folder / name))


def test_demonstration_prompts_are_their_program_s() -> None:
    for split, rows in make_prompts().items():
        assert (FOLDER / f"{split}.jsonl").read_text(encoding="utf-8") == text_of(rows)


def test_demonstration_splits_are_disjoint_and_have_three_domains() -> None:
    sets = {
        split: read_prompts([PromptSource(source=f"demonstration:{split}")], split)
        for split in ("train", "calibration", "evaluation")
    }
    questions = [prompt.messages[-1]["content"] for split in sets.values() for prompt in split.prompts]
    assert len(set(questions)) == len(questions)
    assert sets["train"].without(sets["calibration"], sets["evaluation"]) == sets["train"]
    for split in sets.values():
        assert {prompt.domain for prompt in split.prompts} == {"chat", "mathematics", "code"}


def test_three_forms_of_rows(tmp_path: Path) -> None:
    system = {"role": "system", "content": "be kind"}
    source = write(
        tmp_path,
        {"id": "a", "domain": "code", "conversations": [system, {"role": "user", "content": "hi"}]},
        {
            "conversations": [
                {"from": "human", "value": "q1"},
                {"from": "gpt", "value": "x"},
                {"from": "human", "value": "q2"},
            ]
        },
        {"turns": ["t1", "t2"]},
    )
    found = read_prompts([source], "train").prompts
    assert found[0] == Prompt(
        prompt_id="a", domain="code", split="train", turns=((system, {"role": "user", "content": "hi"}),)
    )
    assert (found[1].prompt_id[:8], found[1].domain) == ("prompts-", "prompts")
    assert [prompt.questions for prompt in found[1:]] == [["q1", "q2"], ["t1", "t2"]]


def test_rows_without_a_question_are_counted(tmp_path: Path) -> None:
    source = write(tmp_path, {"turns": ["  "]}, {"turns": []}, {"turns": ["real"]})
    found = read_prompts([source], "evaluation")
    assert len(found.prompts) == 1
    path = tmp_path / "prompts.jsonl"
    assert found.notes == {NO_QUESTION: (f"{path}:1", f"{path}:2")}


def test_rows_keep_their_ids_when_others_come_or_go(tmp_path: Path) -> None:
    rows = [{"turns": [f"q{index % 5}"]} for index in range(6)]
    ids = [prompt.prompt_id for prompt in read_prompts([write(tmp_path, *rows)], "train").prompts]
    assert len(set(ids)) == 6
    assert ids[5] == f"{ids[0]}-2"  # two rows that say the same
    fewer = read_prompts([write(tmp_path, *rows[2:])], "train").prompts
    assert [prompt.prompt_id for prompt in fewer] == [*ids[2:5], ids[0]]
    part = read_prompts([write(tmp_path, *rows).model_copy(update={"skip": 2, "limit": 3})], "train").prompts
    assert [prompt.prompt_id for prompt in part] == ids[2:5]


def test_ids_of_answers_cannot_meet(tmp_path: Path) -> None:
    """The second turn of `q` and a prompt that is called so."""
    rows = [{"id": "q", "turns": ["a", "b"]}, {"id": "q/turn-2", "turns": ["c"]}]
    for order in (rows, rows[::-1]):
        with pytest.raises(
            UserError, match=r"prompts\.jsonl:2: two prompts have the id 'q/turn-2'.*jsonl:1 has already"
        ):
            read_prompts([write(tmp_path, *order)], "train")


WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def test_what_stands_in_a_row_is_handed_over(tmp_path: Path) -> None:
    """Text parts joined, tools (as JSON text too), system messages wherever they stand; null columns are absent."""
    parts = [{"type": "text", "text": "Say hello "}, {"type": "text", "text": "twice."}]
    null = dict.fromkeys(("turns", "conversations", "id", "domain", "tools"))
    rows = [
        {
            **null,
            "messages": [{"role": "user", "content": parts, "from": None}, {"role": "assistant", "content": None}],
        },
        {"turns": ["t"], "tools": [{**WEATHER, "strict": None}]},
        {"turns": ["t"], "tools": json.dumps([WEATHER])},
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "tool_calls": [1]},
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "b"},
            ]
        },
    ]
    found = read_prompts([write(tmp_path, *rows)], "train")
    assert found.notes == {}
    assert [prompt.tools for prompt in found.prompts] == [(), (WEATHER,), (WEATHER,), ()]
    assert found.prompts[0].turns == (({"role": "user", "content": "Say hello twice."},),)
    assert found.prompts[3].turns == (
        ({"role": "user", "content": "a"},),
        ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "b"}),
    )
    for prompt in found.prompts:
        assert prompt_from_row(prompt.to_row(), "again", split="train") == prompt


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a", "completion": "b"}, [("user", "a"), ("assistant", "b")]),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}, None),
        ({"prompt": "a"}, [("user", "a")]),
        ({"instruction": "a", "input": "", "output": "b"}, [("user", "a"), ("assistant", "b")]),
        ({"instruction": "a", "input": "c", "system": "s"}, [("system", "s"), ("user", "a\n\nc")]),
        ({"messages": [{"role": "developer", "content": ["x", {"text": "y"}]}]}, [("developer", "xy")]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": {"odd": 1}}]}, [("user", "a")]),
    ],
)
def test_shapes_of_rows(row: dict[str, Any], expected: list[tuple[str, str]] | None) -> None:
    found = [(message["role"], message["content"]) for message in read_messages(row, "f:1")]
    if row.get("conversations"):
        assert found.pop() == ("assistant", None)  # no text: refused where the answer is used
    assert found == (expected or [("user", "a"), ("assistant", "b")])


def test_calls_and_thoughts_have_one_form() -> None:
    """OpenAI's, its older one, flat ones, and ShareGPT's: arguments are an object where their text is one."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    forms: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [{"id": None, "function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "assistant", "content": "", "tool_calls": json.dumps([{"name": "f", "parameters": {"x": 1}}])},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
    ]
    found = read_messages({"messages": forms}, "f:1")
    assert found == [{"role": "assistant", "content": None, "tool_calls": [call]}] * 4
    thought = read_messages({"messages": [{"role": "assistant", "content": "a", "reasoning": "hm"}]}, "f:1")
    assert thought == [{"role": "assistant", "content": "a", "reasoning_content": "hm"}]
    result = {"role": "tool", "content": {"t": -3}, "tool_call_id": "c1", "name": None}
    expected = {"role": "tool", "content": '{"t": -3}', "tool_call_id": "c1"}
    assert read_messages({"messages": [result]}, "f:1") == [expected]


def test_calls_with_results_stay_in_their_turn(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": {"name": "f"}}]}
    messages = [
        {"role": "user", "content": "Weather?"},
        call,
        {"role": "tool", "content": "-3", "tool_call_id": "c1"},
        call,
        {"role": "tool", "content": "-4"},
        {"role": "assistant", "content": "Cold."},
        {"role": "user", "content": "So?"},
        call,
    ]
    found = read_prompts([write(tmp_path, {"messages": messages})], "train")
    (asked,) = found.prompts
    assert found.notes == {}
    assert [[message["role"] for message in turn] for turn in asked.turns] == [
        ["user", "assistant", "tool", "assistant", "tool"],
        ["user"],  # the last call has no result: the target writes its own
    ]
    assert asked.questions == ["weather?", "so?"]
    assert asked.count_answers() == 4
    assert prompt_from_row(asked.to_row(), "again", split="train") == asked


def test_a_tools_result_ends_a_conversation_and_is_noted(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "tool", "content": "-3"},
        {"role": "user", "content": "So?"},
    ]
    found = read_prompts([write(tmp_path, {"messages": messages})], "train")
    assert found.prompts[0].questions == ["weather?"]
    assert found.notes == {CUT_AT_TOOL: (f"{tmp_path / 'prompts.jsonl'}:1",)}


def test_bad_rows_are_left_out_where_the_settings_say_so(tmp_path: Path) -> None:
    rows = [
        {"turns": ["a"], "id": "x"},
        "{not json",
        '{"turns": ["\\ud83d"]}',
        {"turns": ["b"], "id": "x"},
        {"turns": ["c"]},
    ]
    source = write(tmp_path, *rows)
    with pytest.raises(UserError, match=r"(?s)jsonl:2: not valid JSON.*data\.on_bad_row=skip"):
        read_prompts([source], "train")
    found = read_prompts([source], "train", "skip")
    assert [prompt.questions for prompt in found.prompts] == [["a"], ["c"]]
    (noted,) = found.notes.items()
    assert noted[0] == BAD_ROW
    assert [line.removeprefix(f"{source.source}:")[0] for line in noted[1]] == ["2", "3", "4"]
    assert "half a character" in noted[1][1]


@pytest.mark.parametrize(("turns", "expected"), [(None, 1), ("first", 1), ("all", 2)])
def test_benchmarks_ask_the_first_turn_as_the_paper_does(turns: Any, expected: int, tmp_path: Path) -> None:
    write(tmp_path, {"turns": ["one", "two"]}, name="mt-bench.jsonl")
    source = PromptSource(source="benchmark:mt-bench", folder=str(tmp_path), turns=turns)
    assert len(read_prompts([source], "evaluation").prompts[0].turns) == expected
    own = PromptSource(source=str(tmp_path / "mt-bench.jsonl"), turns=turns)
    assert len(read_prompts([own], "evaluation").prompts[0].turns) == (expected if turns else 2)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["{not json"], r"prompts\.jsonl:1: not valid JSON"),
        (["[1]"], "expected a JSON object"),
        ([{"text": "x"}], "needs `messages` or `conversations`, `prompt`, `instruction` or `turns`; it has text"),
        ([{"turns": [3]}], "`turns` must be a list of texts"),
        ([{"conversations": [{"role": "wizard", "content": "x"}]}], "a message needs a role"),
        ([{"turns": ["a"], "id": "x"}, {"turns": ["b"], "id": "x"}], "two prompts have the id 'x'"),
        ([""], "gives no prompt"),
    ],
)
def test_bad_files_are_named(rows: list[Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=expected):
        read_prompts([write(tmp_path, *rows)], "train")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("nowhere.jsonl", "there is no prompts file"),
        ("demonstration:nowhere", "no demonstration prompts"),
        ("benchmark:gsm8", "did you mean gsm8k"),
    ],
)
def test_unknown_sources(source: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        read_prompts([PromptSource(source=source)], "train")


def test_what_stands_in_a_held_out_split_is_dropped_and_counted(tmp_path: Path) -> None:
    rows = [{"turns": ["One  two"]}, {"turns": ["three"]}, {"turns": ["x", "one two"]}, {"turns": ["Second"]}]
    train = read_prompts([write(tmp_path, *rows)], "train")
    others = read_prompts([write(tmp_path, {"turns": ["one two", "second"]}, name="held.jsonl")], "evaluation")
    kept = train.without(others)
    assert [prompt.questions for prompt in kept.prompts] == [["three"]]
    assert kept.notes == {IN_ANOTHER_SPLIT: tuple(f"{tmp_path / 'prompts.jsonl'}:{line}" for line in (1, 3, 4))}
    with pytest.raises(UserError, match="every training prompt"):
        train.without(train)


def test_the_hash_sees_every_word_and_the_order() -> None:
    def of(*texts: str) -> str:
        prompts = [
            Prompt(prompt_id=str(index), domain="d", split="s", turns=(({"role": "user", "content": text},),))
            for index, text in enumerate(texts)
        ]
        return PromptSet(prompts=tuple(prompts)).sha256

    assert of("a", "b") == of("a", "b")
    assert len({of("a", "b"), of("b", "a"), of("a", "b "), of("a")}) == 4


def test_hub_data_sets_are_read_through_datasets(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder, {"conversations": [{"from": "human", "value": "hub question"}]}, name="train.jsonl")
    found = read_prompts([PromptSource(source=f"hub:{folder}")], "train")
    assert found.prompts[0].messages[-1]["content"] == "hub question"
    with pytest.raises(UserError, match="could not read the data set"):
        read_prompts([PromptSource(source=f"hub:{folder}", split="nosuch")], "train")


ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "Q", "answer": "A"},
    "math500": {"problem": "Q"},
    "aime25": {"problem": "Q"},
    "humaneval": {"prompt": "def f():\n"},
    "mbpp": {"prompt": "Write."},
    "livecodebench": {"question_content": "Q", "starter_code": ""},
    "mt-bench": {"prompt": ["one", "two"]},
    "alpaca": {"instruction": "Do", "input": "this"},
    "arena-hard-v2": {"prompt": "Q"},
}


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_every_benchmark_makes_a_question_and_keeps_its_revision(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(dataset: str, subset: str | None, split: str, revision: str | None, **options: Any) -> tuple[Any, str]:
        return iter([(f"{dataset}[0]", ROWS[name])] * 1000), "abc123"

    monkeypatch.setattr(conversations, "open_hub_dataset", fake)
    rows, facts = open_benchmark(name, None)
    found = list(rows)
    assert len(found) == BENCHMARKS[name].count
    assert facts["revision"] == "abc123"
    turns = found[0][1]["turns"]
    assert len(turns) == (2 if name == "mt-bench" else 1)
    assert turns[0].endswith(BOXED) == (BENCHMARKS[name].domain == "mathematics")


def test_benchmarks_are_read_from_a_folder_without_a_hub(tmp_path: Path) -> None:
    """Counts and turns are the paper's, and the file's hash takes the place of the revision."""
    rows = [{"turns": [f"question {index}", "and?"]} for index in range(90)]
    (tmp_path / "mt-bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_prompts([PromptSource(source="benchmark:mt-bench", folder=str(tmp_path))], "evaluation")
    assert len(found.prompts) == 80
    assert {prompt.domain for prompt in found.prompts} == {"chat"}
    assert found.prompts[0].questions == ["question 0"]
    assert found.sources[0]["sha256"] == file_sha256(tmp_path / "mt-bench.jsonl")
    with pytest.raises(UserError, match=r"gsm8k\.jsonl, which does not exist"):
        read_prompts([PromptSource(source="benchmark:gsm8k", folder=str(tmp_path))], "evaluation")


def test_a_benchmark_with_other_columns_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = iter([("gsm8k[0]", {"text": "Q"})])
    monkeypatch.setattr(conversations, "open_hub_dataset", lambda *_, **__: (rows, None))
    with pytest.raises(UserError, match="no column 'question'; it has text"):
        list(open_benchmark("gsm8k", None)[0])


def test_a_benchmark_row_with_a_null_is_a_bad_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("gsm8k[0]", {"question": None}), ("gsm8k[1]", {"question": "Q"})]
    monkeypatch.setattr(conversations, "open_hub_dataset", lambda *_, **__: (iter(rows), None))
    found = read_prompts([PromptSource(source="benchmark:gsm8k")], "evaluation", "skip")
    assert len(found.prompts) == 1
    assert found.notes[BAD_ROW][0].startswith("gsm8k[0]: ")
