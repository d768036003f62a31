"""The programs of `benchmarks/` are run by hand: here each one is at least read, so that none names what has moved."""

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
HELPERS = ("dspark", "pipelines", "pipelines/training", "storage")  # as evidence.mk has them
PROGRAMS = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_benchmark_finds_all_that_it_imports(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = FOLDER / program
    for place in (path.parent, *(FOLDER.parent / "tests" / helpers for helpers in HELPERS)):
        monkeypatch.syspath_prepend(str(place))
    name = f"benchmark_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    assert module.__doc__
