"""What is left out of the training text is said on the screen."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.data.chat import generated_sample
from pipelines.data.conversations import PromptSet
from pipelines.errors import UserError
from pipelines.reporting.report import conversation_summary
from pipelines.stages.regenerate import left_out, read_conversations
from storage.files.filesystems import Folder


def test_everything_left_out_has_a_line_with_its_reason() -> None:
    splits = {"train": PromptSet(prompts=(), skipped={"no question": 1}), "evaluation": PromptSet(prompts=())}
    result = {"rows": 2, "dropped": 10, "finish_reasons": {"context": 9, "length": 3}}
    assert left_out(result, splits, 14) == [
        "train: 1 prompts left out (no question)",
        "9 of 12 prompts do not fit the target's context with an answer",
        "10 of 12 answers dropped, shorter than data.min_supervised_tokens=14; their ids are in manifest.json",
    ]
    assert left_out({"rows": 2, "dropped": 0, "finish_reasons": {"stop": 2}}, {}, 14) == []


ROW = {
    "id": "a",
    "domain": "chat",
    "conversations": [{"role": "user", "content": "hello"}],
    "prompt_ids": [1, 2],
    "response_ids": [3],
    "finish_reason": "stop",
    "thinking": "off",
}


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
    generated_sample(second["prompt_ids"] or [0], second["response_ids"], 10)
    conversation_summary([second])
    assert {type(second[key]) for key in ("id", "domain")} == {str}


CHECKED = ("id", "domain", "conversations", "prompt_ids", "response_ids")


@pytest.mark.parametrize(
    "line", ["null", "[]", "{}", "9" * 5000, "[" * 10**5, *(json.dumps({**ROW, key: 5}) for key in CHECKED)]
)
def test_what_is_no_conversation_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=r"train\.jsonl:1: .*stages/regenerate\.json"):
        list(read_conversations(Folder(tmp_path)))
