"""Prompts out of files, data sets and benchmarks: what is read, skipped, counted and refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.data import conversations
from pipelines.data.benchmarks import BENCHMARKS, BOXED, open_benchmark
from pipelines.data.conversations import Prompt, PromptSet, file_sha256, read_jsonl, read_prompts, write_jsonl
from pipelines.errors import UserError
from pipelines.settings.schema import PromptSource


def write(folder: Path, *rows: Any, name: str = "prompts.jsonl") -> PromptSource:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / name).write_text("\n".join(lines) + "\n")
    return PromptSource(source=str(folder / name))


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
        prompt_id="a", domain="code", split="train", messages=(system, {"role": "user", "content": "hi"})
    )
    assert (found[1].prompt_id, found[1].domain) == ("prompts-000001", "prompts")
    assert [prompt.messages[-1]["content"] for prompt in found[1:]] == ["q1", "t1"]
    assert [prompt.later_turns for prompt in found[1:]] == [("q2",), ("t2",)]


def test_rows_without_a_question_are_counted(tmp_path: Path) -> None:
    source = write(tmp_path, {"turns": ["  "]}, {"turns": []}, {"turns": ["real"]})
    found = read_prompts([source], "evaluation")
    assert len(found.prompts) == 1
    assert found.skipped == {"no question": 2}


def test_skip_and_limit_keep_ids(tmp_path: Path) -> None:
    source = write(tmp_path, *({"turns": [f"q{index}"]} for index in range(6)))
    part = read_prompts([source.model_copy(update={"skip": 2, "limit": 3})], "train").prompts
    assert [prompt.prompt_id for prompt in part] == ["prompts-000002", "prompts-000003", "prompts-000004"]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["{not json"], r"prompts\.jsonl:1: not valid JSON"),
        (["[1]"], "expected a JSON object"),
        ([{"text": "x"}], "needs `conversations` or `turns`; it has text"),
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
    train = read_prompts([write(tmp_path, {"turns": ["One  two"]}, {"turns": ["three"]})], "train")
    held_out = read_prompts([write(tmp_path, {"turns": ["one two"]}, name="held.jsonl")], "evaluation")
    kept = train.without(held_out)
    assert [prompt.messages[-1]["content"] for prompt in kept.prompts] == ["three"]
    assert kept.skipped == {"stands in a held-out split": 1}
    with pytest.raises(UserError, match="every training prompt"):
        train.without(train)


def test_the_hash_sees_every_word_and_the_order() -> None:
    def of(*texts: str) -> str:
        prompts = [
            Prompt(prompt_id=str(index), domain="d", split="s", messages=({"role": "user", "content": text},))
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
    """Counts are the paper's, a second turn stays, and the file's hash takes the place of the revision."""
    rows = [{"turns": [f"question {index}", "and?"]} for index in range(90)]
    (tmp_path / "mt-bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_prompts([PromptSource(source="benchmark:mt-bench", folder=str(tmp_path))], "evaluation")
    assert len(found.prompts) == 80
    assert {prompt.domain for prompt in found.prompts} == {"chat"}
    assert found.prompts[0].later_turns == ("and?",)
    assert found.sources[0]["sha256"] == file_sha256(tmp_path / "mt-bench.jsonl")
    with pytest.raises(UserError, match=r"gsm8k\.jsonl, which does not exist"):
        read_prompts([PromptSource(source="benchmark:gsm8k", folder=str(tmp_path))], "evaluation")


def test_a_benchmark_with_other_columns_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = iter([("gsm8k[0]", {"text": "Q"})])
    monkeypatch.setattr(conversations, "open_hub_dataset", lambda *_, **__: (rows, None))
    with pytest.raises(UserError, match="no column 'question'; it has text"):
        list(open_benchmark("gsm8k", None)[0])


def test_jsonl_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"a": "ü"}, {"a": 2}])
    assert [row for _, row in read_jsonl(path)] == [{"a": "ü"}, {"a": 2}]

    def failing() -> Any:
        yield {"a": 3}
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_jsonl(path, failing())
    assert [row for _, row in read_jsonl(path)] == [{"a": "ü"}, {"a": 2}]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]
