"""Files of one's own that add algorithms, sequential heads, loss terms, codecs or trackers: the setting `plugins`.

A plugin is a Python file (or an importable module) that registers its parts when it is imported. Its text travels with
the settings to every worker, so the file itself has to be on the driver's machine only.
"""

from __future__ import annotations

import hashlib
import linecache
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from pipelines.errors import UserError

_TEXTS: dict[str, str] = {}  # of the files that this process has run


def load_plugins(plugins: Sequence[str]) -> None:
    """Run each once a process. Raises UserError for one that is not there or fails."""
    for plugin in plugins:
        if not plugin.endswith(".py"):
            _import(plugin)
        elif plugin not in _TEXTS:
            path = Path(plugin).expanduser()
            if not path.is_file():
                raise UserError(f"plugins: there is no file {plugin} (in {Path.cwd()}); give its path, or a module")
            _run(plugin, path.read_text())


def plugin_texts(plugins: Sequence[str]) -> dict[str, str]:
    """The text of each plugin that is a file, which workers run instead of reading it."""
    load_plugins(plugins)
    return {plugin: _TEXTS[plugin] for plugin in plugins if plugin in _TEXTS}


def plugin_identity(plugins: Sequence[str], parts: Iterable[Any]) -> dict[str, dict[str, str]]:
    """For a stage's identity: the SHA-256 of the text of each plugin that one of its `parts` (classes) comes from.

    Empty where they are all built in, so that naming a plugin alone changes no stage.
    """
    texts = plugin_texts(plugins)
    modules = {part.__module__ for part in parts}
    used = {}
    for plugin in plugins:
        if plugin in texts and _module_name(plugin) in modules:
            used[plugin] = hashlib.sha256(texts[plugin].encode()).hexdigest()
        elif within := sorted(name for name in modules if f"{name}.".startswith(f"{plugin}.")):
            sources = [Path(str(sys.modules[name].__file__)).read_bytes() for name in within]
            used[plugin] = hashlib.sha256(b"".join(sources)).hexdigest()
    return {"plugins": used} if used else {}


def load_texts(plugins: Sequence[str], texts: Mapping[str, str]) -> None:
    """On a worker: run the texts that the driver read. A process keeps the first text of a plugin."""
    for plugin in plugins:
        if plugin not in texts:
            _import(plugin)
        elif plugin not in _TEXTS:
            _run(plugin, texts[plugin])


def _import(plugin: str) -> None:
    try:
        import_module(plugin)
    except ImportError as error:
        raise UserError(f"plugins: {plugin}: {error}; give an installed module or the path of a .py file") from error


def _module_name(plugin: str) -> str:
    return f"dspark_plugin_{Path(plugin).stem}_{hashlib.sha256(plugin.encode()).hexdigest()[:8]}"


def _run(plugin: str, text: str) -> None:
    name = _module_name(plugin)
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = plugin
    linecache.cache[plugin] = (len(text), None, text.splitlines(keepends=True), plugin)  # for tracebacks
    _TEXTS[plugin] = text
    try:
        exec(compile(text, plugin, "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[name], _TEXTS[plugin]
        at = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == plugin]
        line = error.lineno if isinstance(error, SyntaxError) else at[-1] if at else 1
        raise UserError(f"plugins: {plugin}:{line}: {type(error).__name__}: {error}") from error
