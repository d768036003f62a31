"""Plugins: run once, reported by file and line, part of the identity, and with a worker that has no such file."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.errors import UserError
from pipelines.plugins import plugin_identity
from pipelines.settings import load_settings

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"


def test_a_plugin_runs_once_and_again_in_a_process_without_its_file(tmp_path: Path) -> None:
    plugin = tmp_path / "counted.py"
    plugin.write_text("import sys\nsys.counted_loads = getattr(sys, 'counted_loads', 0) + 1\n")
    settings = load_settings(TINY, [f"plugins=[{plugin}]"])
    load_settings(TINY, [f"plugins=[{plugin}]"])
    assert sys.counted_loads == 1  # type: ignore[attr-defined]
    del sys.counted_loads  # type: ignore[attr-defined]
    assert plugin_identity(settings.plugins, [Path, pytest.Item]) == {}  # nothing in use comes from it

    (tmp_path / "settings.pickle").write_bytes(pickle.dumps(settings))
    plugin.unlink()
    program = (
        "import pickle, sys, pathlib\n"
        f"settings = pickle.loads(pathlib.Path({str(tmp_path / 'settings.pickle')!r}).read_bytes())\n"
        "assert sys.counted_loads == 1\n"
        "pickle.loads(pickle.dumps(settings))\n"
        "assert sys.counted_loads == 1\n"
        "print(settings.to_yaml(), end='')\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert shown == settings.to_yaml()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = 1\nb = unknown\n", r"broken\.py:2: NameError: name 'unknown'"),
        ("a = 1\n\nb = (\n", r"broken\.py:3: SyntaxError"),
        (None, r"plugins: there is no file .*broken\.py"),
    ],
)
def test_a_plugin_that_fails_is_named_with_its_line(text: str | None, message: str, tmp_path: Path) -> None:
    plugin = tmp_path / "broken.py"
    if text is not None:
        plugin.write_text(text)
    with pytest.raises(UserError, match=message):
        load_settings(TINY, [f"plugins=[{plugin}]"])


def test_a_module_that_is_not_installed_is_refused() -> None:
    with pytest.raises(UserError, match=r"plugins: no_such_module: No module named 'no_such_module'"):
        load_settings(TINY, ["plugins=[no_such_module]"])
