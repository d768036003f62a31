"""Whatever a settings file or a word of the command line holds: settings, or one message that names the place."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from pipelines.errors import UserError
from pipelines.settings import Settings, load_settings
from pipelines.settings.errors import known_keys
from pipelines.settings.yaml import DEEPEST, MOST_BYTES, MOST_VALUES

pytestmark = pytest.mark.fuzz
CONFIGS = Path(__file__).parents[2] / "configs"
NEEDED = "run: {directory: out}\ntarget: {model: some/model}\n"
KEYS = known_keys(Settings)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "settings.yaml"


def loads_or_is_refused(path: Path, *words: str) -> str | None:
    """The message that refuses it; None where it loads, and then its dump loads to the same."""
    try:
        settings = load_settings(path, words)
    except UserError as error:
        message = str(error)
        message.encode()  # can be printed and logged
        assert len(message) < 100_000
        return message
    path.write_text(settings.to_yaml())
    assert load_settings(path) == settings
    return None


@example(b"\xff\xfe\x00run")
@example(b"\x1f\x8b\x08\x00gzip")
@example(b"run: {directory: \x00}")
@example(b'run: {directory: "\\0"}')
@example(b'run: {directory: "\\ud800"}')
@example(b'run: {directory: "\\UFFFFFFFF"}')
@example(b"run: {seed: " + b"9" * 5000 + b"}")
@example(b"a: &a [*a]")
@example(b"a: &a {b: *a}")
@example(b"[" * 5000)
@example(b"a: " + b"{a: " * 100 + b"1" + b"}" * 100)
@example(b"? [a, b]\n: 1\n")
@example(b"<<: {run: 1}\n")
@example(b"run: !!set {a}\n")
@example(b"%YAML 9.9\n---\nrun: 1\n")
@example(b"run: 1\n---\nrun: 2\n")
@example(b"\xef\xbb\xbfrun: 1\n")
@given(st.binary(max_size=200))
def test_any_bytes(place: Path, content: bytes) -> None:
    place.write_bytes(content)
    message = loads_or_is_refused(place)
    assert message is not None
    assert message.startswith(f"{place}:")


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
    | st.sampled_from(["off", "yes", "6e-4", "1_000", "2020-01-01", "0x10", "~", "auto", "null"])
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(KEYS) | st.text(min_size=1, max_size=10), VALUES, max_size=4))
def test_any_values_of_real_keys(place: Path, given_values: dict[str, Any]) -> None:
    values: dict[str, Any] = yaml.safe_load(NEEDED)
    for dotted, value in given_values.items():
        holder = values
        *sections, key = dotted.split(".")
        for section in sections:
            holder = holder[section] if isinstance(holder.get(section), dict) else holder.setdefault(section, {}) or {}
            if not isinstance(holder, dict):
                break
        else:
            holder[key] = value
    place.write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
    message = loads_or_is_refused(place)
    assert message is None or message.startswith(f"{place}:")


@example("train.num_workers=" + "9" * 5000)
@example("data.train." + "9" * 5000 + ".limit=1")
@example("data.train.².limit=1")
@example("run.directory=\udcff")
@example("run.directory='\\ud800'")
@example("a" + ".a" * 5000 + "=1")
@example("train=" + "[" * 5000)
@example("train.deepspeed={a: " + "[" * 30 + "]" * 30 + "}")
@given(
    st.builds(lambda key, value: f"{key}={value}", st.sampled_from(KEYS), st.text(max_size=20))
    | st.text(st.characters(), max_size=40)
)
def test_any_override(place: Path, word: str) -> None:
    place.write_text(NEEDED)
    message = loads_or_is_refused(place, word)
    assert message is None or "command line" in message or repr(word)[:100] in message or "plugins" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &a [*a]\n", f"settings.yaml:1: nested more than {DEEPEST} deep"),
        (
            "\n".join(["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"])
            + "".join(f"\na{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)),
            f"more than {MOST_VALUES:,} values",
        ),
        ("x: 1\n" * 3 + "#" * MOST_BYTES, f"is larger than {MOST_BYTES:,} bytes"),
        (NEEDED + "train:\n  num_anchors: " + "9" * 5000, "settings.yaml:4: a number of 5000 characters"),
        (NEEDED + "train: {num_anchors: 99999999999999999999}", "settings.yaml:3: train.num_anchors is 9999"),
        (NEEDED + 'train: {local_copy: "a\\0b"}', "settings.yaml:3: 'a\\x00b' holds a NUL character"),
        ("run: {directory: \x01}\n", "settings.yaml:1: not valid YAML: the character #x0001 is not allowed"),
        ("extends: " + "x" * 5000, "File name too long"),
        ("extends: settings.yaml", "`extends` goes round in a circle"),
        ("train: {}\nextends: .", "settings.yaml:2: `extends` names '.', but "),
    ],
)
def test_what_no_settings_file_is(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    message = loads_or_is_refused(path)
    assert message is not None
    assert expected in message


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + NEEDED.encode())
    assert load_settings(path).run.directory == "out"


def dspark(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-m", "pipelines.cli", *arguments]
    return subprocess.run(command, capture_output=True, timeout=120, env={**os.environ, **environment})


ASCII = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_an_ascii_terminal_and_a_closed_pipe(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(NEEDED.replace("out", "öut"), encoding="utf-8")
    shown = dspark("settings", str(path), **ASCII)
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert rb"directory: \xf6ut" in shown.stdout
    refused = dspark("settings", str(path), "run.sëed=1", **ASCII)
    assert refused.returncode == 2
    assert refused.stderr.startswith(b"dspark: ")
    assert b"Traceback" not in refused.stderr
    piped = f"set -o pipefail; {sys.executable} -m pipelines.cli settings {path} | head -c 1"
    closed = subprocess.run(["bash", "-c", piped], capture_output=True, timeout=120)
    assert (closed.returncode, closed.stderr) == (0, b"")
