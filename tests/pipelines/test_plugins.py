"""Plugins: run once, reported by file and line, part of the identity, and with a worker that has no such file."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dspark.config import DrafterConfig
from dspark.models.checkpoint import load_drafter, save_drafter
from dspark.models.dspark import DSpark
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


def test_a_sequential_head_of_ones_own(tmp_path: Path) -> None:
    """It is a setting, trains to the same numbers as it drafts, and is stored under its name."""
    plugin = tmp_path / "halved.py"
    plugin.write_text(
        "from dspark.models.heads import SequentialHead\n"
        "from dspark.registry import sequential_heads\n"
        "@sequential_heads.register('halved')\n"
        "class Halved(SequentialHead):\n"
        "    def embed(self, previous_ids):\n"
        "        return super().embed(previous_ids) / 2\n"
    )
    words = ["drafter.markov_head_type=halved", "drafter.markov_rank=4", "drafter.draft_vocab_size=null"]
    with pytest.raises(UserError, match=r"no sequential head 'halved'; .*vanilla, gated, rnn"):
        load_settings(TINY, words)
    settings = load_settings(TINY, [f"plugins=[{plugin}]", *words])
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    target = {**sizes, "model_type": "llama", "num_hidden_layers": 4}
    parts = {**settings.drafter.parts, "target_layer_ids": (0, 2), "mask_token_id": 30}
    drafter = DSpark(DrafterConfig.for_target(target, **parts))
    drafter.initialise_random(1)
    head = drafter.markov_head
    assert head is not None
    ids, states = torch.tensor([[3, 5, 7]]), torch.randn(1, 3, 16)
    torch.testing.assert_close(head.bias_vectors(states, ids), head.markov_w1.weight[ids] / 2)
    notes = drafter.engine_notes(drafter.config, speculators=False)
    assert notes == ["Evaluation only: no engine has a halved sequential head."]
    save_drafter(drafter, tmp_path / "drafter", target)
    again = load_drafter(tmp_path / "drafter")
    assert type(again.markov_head) is type(head)
    assert torch.equal(again.markov_head.markov_w1.weight, head.markov_w1.weight)  # type: ignore[union-attr]
