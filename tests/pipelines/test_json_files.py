"""Files that hold JSON: any bytes are read, or refused in one message that begins with file and line."""

import gzip
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.data.conversations import read_prompts
from pipelines.errors import UserError
from pipelines.json_files import parse_json, read_jsonl, write_jsonl
from pipelines.runs.directory import RunDirectory
from pipelines.runs.run import open_run
from pipelines.settings.schema import PromptSource
from pipelines.stages.regenerate import read_conversations
from storage.files.filesystems import Folder

NESTED = b"[" * 100_000
LINE = b'{"turns": ["hi"]}\n'


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (LINE + b'{"turns": ["\\ud83d"]}', r"f:2: a text has half a character"),
        (LINE + NESTED, r"f:2: not usable JSON: it is nested too deeply"),
        (LINE + b'{"n": ' + b"7" * 5000 + b"}", r"f:2: not usable JSON: Exceeds the limit \(4300 digits\)"),
        (LINE + b'{"turns": ["\0"]}', r"f:2: not valid JSON: Invalid control character"),
        (LINE + b"\0\0\0", r"f:2: not valid JSON: Expecting value"),
        (LINE + '{"turns": ["Grüße"]}'.encode("latin-1"), r"f:2: not UTF-8 \(byte 0xfc at position 15"),
        ("{}".encode("utf-16"), r"f:1: not UTF-8 \(byte 0xff at position 1 "),
        (gzip.compress(LINE, mtime=0)[:-9], r"f:\d: the gzip file is cut off or damaged"),
        (LINE + b"[1]", r"f:2: expected a JSON object"),
    ],
)
def test_what_cannot_be_read_is_named(data: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(UserError, match=expected):
        list(read_jsonl(tmp_path / "f"))


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress, lambda data: b"\xef\xbb\xbf" + data])
def test_gzip_and_a_byte_order_mark_are_read(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(pack(LINE + b"\n" + b'{"turns": ["\\ud83d\\ude00"]}'))
    assert list(read_jsonl(tmp_path / "f")) == [
        (f"{tmp_path / 'f'}:1", {"turns": ["hi"]}),
        (f"{tmp_path / 'f'}:3", {"turns": ["\U0001f600"]}),
    ]


def test_a_fault_in_a_whole_file_has_its_line() -> None:
    with pytest.raises(UserError, match=r"^run\.json:3: not valid JSON"):
        parse_json(b'{\n"a": 1,\n"b": nope}', "run.json")
    with pytest.raises(UserError, match=r"^run\.json:2: not UTF-8 \(byte 0xff at position 3 "):
        parse_json(b'{\n "\xff"}', "run.json")


def test_rows_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    write_jsonl(folder, "rows.jsonl", [{"a": "ü"}, {"a": 2}])

    def failing() -> Any:
        yield {"a": 3}
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_jsonl(folder, "rows.jsonl", failing())
    assert [row for _, row in read_jsonl(tmp_path / "rows.jsonl")] == [{"a": "ü"}, {"a": 2}]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def _prompts(folder: Path) -> object:
    return read_prompts([PromptSource(source=str(folder / "data.jsonl"))], "train")


def _conversations(folder: Path) -> object:
    (folder / "data.jsonl").replace(folder / "train.jsonl")
    return list(read_conversations(Folder(folder)))


def _summary(folder: Path) -> object:
    (folder / "data.jsonl").replace(folder / "run.json")
    return open_run(str(folder))


READERS = (_prompts, _conversations, _summary)
ROW = {
    "id": "a",
    "turns": ["x"],
    "conversations": [{"role": "user", "content": "x"}],
    "tools": [{"name": "t"}],
    "prompt_ids": [1],
    "response_ids": [2],
    "domain": "d",
    "thinking": "off",
    "uid": "0",
    "settings": {"run": {"directory": "r"}, "target": {"model": "m"}, "data": {"render_time": "2020-01-01"}},
    "stages": {},
    "invocations": [],
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*ROW, "role", "content"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.fuzz
@pytest.mark.parametrize("read", READERS)
@settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_bytes_are_read_or_refused_with_their_place(
    read: Callable[[Path], object], data: Any, tmp_path: Path
) -> None:
    """Arbitrary bytes, rows with one value replaced, and good rows cut off or with a byte changed."""
    good = json.dumps({**ROW, data.draw(st.sampled_from(list(ROW))): data.draw(JSON)}).encode()
    where = data.draw(st.integers(0, len(good) - 1))
    kinds = [
        good,
        good[:where],
        good[:where] + data.draw(st.binary(max_size=2)) + good[where + 1 :],
        data.draw(st.binary(max_size=30)),
    ]
    content = LINE * data.draw(st.integers(0, 1)) + data.draw(st.sampled_from(kinds))
    (tmp_path / "data.jsonl").write_bytes(content)
    said = ""
    with suppress(UserError):
        try:
            read(tmp_path)
        except UserError as error:
            said = str(error)
            raise
    assert re.search(r"(data|train)\.jsonl|run\.json|^$", said), said
    assert re.search(r"\.jsonl?:\d+: ", said) or not re.search("not (valid|usable) JSON|not UTF-8", said), said


def test_a_run_directory_is_no_root(tmp_path: Path) -> None:
    for wrong in ("//", "", "a\0b"):
        with pytest.raises(UserError, match=r"run\.directory: .* is no place for a run"):
            RunDirectory(wrong)
