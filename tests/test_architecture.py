"""docs/architecture.md speaks of files and names that there are, and the way from a shard to the loss stays short."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
PATH = re.compile(r"\b(?:dspark|storage|cluster|pipelines|tests)/[\w/.]*\w(?:\.py|/)")


def test_every_file_that_it_speaks_of_is_there() -> None:
    named = set(PATH.findall(TEXT))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def names_in(path: Path) -> set[str]:
    """Functions, classes and variables of a module, and of its classes as `Class.name`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        for name in _names(node):
            found.add(name)
            if isinstance(node, ast.ClassDef):
                found |= {f"{name}.{inner}" for part in node.body for inner in _names(part)}
    return found


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_a_shard_reaches_the_loss_in_at_most_eight_files() -> None:
    rows = re.findall(r"^\| \d \| `([^`]+)` \| (.*) \|$", TEXT, flags=re.MULTILINE)
    files = [file for file, _ in rows]
    assert 0 < len(set(files)) == len(files) <= 8
    for file, words in rows:
        named = re.findall(r"`([^`]+)`", words)
        assert named
        assert not set(named) - names_in(ROOT / file), file


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports when it is loaded."""
    tree = ast.parse(path.read_text())
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom | ast.Import)]
    return {
        name
        for node in nodes
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }


def test_the_list_leaves_no_file_of_the_way_out() -> None:
    """What makes, holds or changes a row's states on the way is in the list: what else its files import is known."""
    files = re.findall(r"^\| \d \| `([^`]+)` \|", TEXT, flags=re.MULTILINE)
    listed = {file.removesuffix(".py").replace("/", ".") for file in files}
    around = {
        # which rows and blocks, before any state is read
        "storage.order",
        "dspark.losses.anchors",
        # files, folders, records of what is committed, worker processes
        "storage.cache.commits",
        "storage.cache.plan",
        "storage.cache.read_ahead",
        "storage.cache.records",
        "storage.cache.schema",
        "storage.cache.streams",
        "storage.cache.verify",
        "storage.codecs.fitting",
        "storage.codecs.registry",
        "storage.files.filesystems",
        "storage.files.local_copy",
        # the drafter
        "dspark.config",
        "dspark.models.heads",
        "dspark.registry",
    }
    own = {"dspark", "storage", "pipelines", "cluster"}
    met = {name for file in files for name in imports_of(ROOT / file) if name.split(".")[0] in own}
    met = {name for name in met if not name.endswith(".errors")}
    assert met - listed - around == set()
