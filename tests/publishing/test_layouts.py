"""DFlash in its own layout, EAGLE-3, reduced vocabularies, and the `speculators` layout of all of them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import PROBE_ROUNDS
from publications import GOLDEN, compared, publication
from safetensors.torch import load_file

from dspark.config import SettingError
from dspark.manifest import damaged_files
from dspark.models.checkpoint import load_drafter
from dspark.models.starting_weights import build_drafter
from pipelines.plugins import load_plugins
from pipelines.publishing.layouts import require_forms
from pipelines.publishing.publication import Publication, publish

PLUGIN = GOLDEN.parent / "plugins" / "flat_layout.py"
ALL = sorted(path.parent.parent.name for path in GOLDEN.glob("*/checkpoint/config.json"))
QWEN = [name for name in ALL if "gemma" not in name]


def changed(name: str, **overrides: Any) -> Publication:
    """A conformance publication whose drafter has other settings, with random weights."""
    given = publication(name)
    vocabulary = overrides.get("draft_vocab_size")
    config = dataclasses.replace(given.drafter.config, **overrides)
    tokens = None if vocabulary is None else torch.arange(0, 2 * vocabulary, 2)
    drafter = build_drafter(config, given.target, start="random", seed=4, draft_token_ids=tokens)
    for parameter in drafter.parameters():
        if parameter.requires_grad and parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    if drafter.sequential_head is not None:
        drafter.sequential_head.restore_reserved_column()
    contract = dataclasses.replace(given.contract, block_size=config.block_size)
    if config.algorithm != "eagle3":
        contract = dataclasses.replace(contract, block_layout=config.block_layout)
    return dataclasses.replace(given, drafter=drafter.eval(), contract=contract, calibration=None)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mask-first": ("dflash_anchor_first", {"block_layout": "mask-first", "block_size": 5}),
    "mask-first, reduced": ("dflash_anchor_first", {"block_layout": "mask-first", "draft_vocab_size": 40}),
    "anchor-first, reduced": ("dflash_anchor_first", {"draft_vocab_size": 40}),
    "vanilla, reduced": ("dspark_vanilla", {"draft_vocab_size": 40}),
    "one slot": ("dflash_anchor_first", {"block_size": 1}),
    "eagle3, reduced": ("eagle3_qwen3", {"draft_vocab_size": 40}),
}


def check(made: Publication, folder: Path) -> None:
    """Publish with both layouts; both must draft alike, and the folder must open again as it was."""
    publish(dataclasses.replace(made, layouts=("speculators",)), folder)
    assert damaged_files(folder) == []
    for place in (folder, folder / "speculators"):
        found = compared(made, place)
        assert found["rounds"] == PROBE_ROUNDS
        assert found["tokens_equal"] == PROBE_ROUNDS * made.drafter.block_size
        assert found["largest_logit_difference"] < 1e-3
    again = load_drafter(folder, needs_manifest=True)
    assert again.config == made.drafter.config
    for name, tensor in made.drafter.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    if made.drafter.draft_token_ids is not None:
        assert torch.equal(again.draft_token_ids, made.drafter.draft_token_ids)


@pytest.mark.parametrize("name", QWEN)
def test_the_references_drafters_in_both_layouts(name: str, tmp_path: Path) -> None:
    made = publication(name)
    check(made, tmp_path / "published")
    folder = tmp_path / "published" / "speculators"
    stored, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    assert not {"embed_tokens.weight", "lm_head.weight", "d2t"} & stored.keys()
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == made.drafter.block_size
    key = "eagle_aux_hidden_state_layer_ids" if name.startswith("eagle3") else "aux_hidden_state_layer_ids"
    assert config[key] == [layer + 1 for layer in made.drafter.config.target_layer_ids]


@pytest.mark.parametrize("kind", KINDS)
def test_other_drafters_in_both_layouts(kind: str, tmp_path: Path) -> None:
    name, overrides = KINDS[kind]
    made = changed(name, **overrides)
    check(made, tmp_path / "published")
    folder = tmp_path / "published" / "speculators"
    config = json.loads((folder / "config.json").read_text())
    if name != "eagle3_qwen3":
        anchor_first = overrides.get("block_layout") != "mask-first"
        assert config["sample_from_anchor"] is anchor_first
        assert config["block_size"] == made.drafter.block_size + (not anchor_first)
    size = overrides.get("draft_vocab_size")
    assert config["draft_vocab_size"] == (size or made.target.vocab_size)
    if size is not None:
        stored = load_file(folder / "model.safetensors")
        drafted = torch.arange(size) + stored["d2t"]
        assert torch.equal(drafted, made.drafter.draft_token_ids)
        assert torch.equal(stored["t2d"].nonzero().flatten(), drafted)
        assert torch.equal(stored["lm_head.weight"], made.target.lm_head.weight[drafted])


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("dspark_vanilla", {}),
        ("dspark_vanilla", {"draft_vocab_size": 40}),
        ("dspark_gemma4", {}),
        ("dflash_anchor_first", {"block_layout": "mask-first"}),
    ],
)
def test_a_context_residual_in_the_native_layout_alone(name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    made = changed(name, context_residual=True, **overrides)
    publish(made, tmp_path / "published")
    assert compared(made, tmp_path / "published")["tokens_equal"] == PROBE_ROUNDS * made.drafter.block_size
    card = (tmp_path / "published" / "README.md").read_text()
    assert "no engine has the context residual" in card
    assert "vLLM" not in card
    if "gemma" not in name:
        with pytest.raises(
            SettingError, match=r"drafter\.context_residual.*leave the layout out.*context_residual=false"
        ):
            publish(dataclasses.replace(made, layouts=("speculators",)), tmp_path / "both")
        assert not (tmp_path / "both").exists()


def test_drafters_without_a_form_are_refused(tmp_path: Path) -> None:
    made = dataclasses.replace(publication("dspark_gemma4"), layouts=("speculators",))
    with pytest.raises(SettingError, match="Qwen3-style draft layers, not gemma4: leave it out"):
        publish(made, tmp_path / "published")
    assert not (tmp_path / "published").exists()
    config = dataclasses.replace(publication("dspark_vanilla").drafter.config, target_layer_ids=(-1, 2))
    with pytest.raises(SettingError, match=r"publish\.layouts: .*-1, the embedding's output.*target_layer_ids"):
        require_forms(("speculators",), config)
    with pytest.raises(SettingError, match=r"no layout 'speculator'; did you mean speculators\?.*publish\.layouts"):
        require_forms(("speculator",), config)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("dflash_anchor_first", "sample_from_anchor", False),
        ("dflash_anchor_first", "mask_token_id", 3),
        ("eagle3_qwen3", "norm_before_residual", True),
        ("eagle3_qwen3", "transformer_layer_config.rms_norm_eps", 0.5),
    ],
)
def test_the_second_implementation_finds_a_key_that_says_something_else(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    """So that equal drafts, above, mean that every key says what it should."""
    made = dataclasses.replace(publication(name), layouts=("speculators",))
    publish(made, tmp_path / "published")
    folder = tmp_path / "published" / "speculators"
    values = json.loads((folder / "config.json").read_text())
    *outer, last = key.split(".")
    (values[outer[0]] if outer else values)[last] = value
    (folder / "config.json").write_text(json.dumps(values))
    message = r"other logits|drafts token|norm_before_residual|tuple|shape|size"
    with pytest.raises((AssertionError, ValueError, RuntimeError), match=message):
        compared(made, folder)


def test_a_layout_of_ones_own(tmp_path: Path) -> None:
    """One class in one file, found by its name: tests/plugins/flat_layout.py."""
    load_plugins([str(PLUGIN)])
    made = dataclasses.replace(publication("dspark_vanilla"), layouts=("flat",))
    publish(made, tmp_path / "published")
    stored = load_file(tmp_path / "published" / "flat" / "model.safetensors")["weights"]
    assert len(stored) == sum(tensor.numel() for tensor in made.drafter.state_dict().values())
    assert json.loads((tmp_path / "published" / "flat" / "config.json").read_text())["block_size"] == 7
    assert "- `flat/`: the same drafter in one long vector." in (tmp_path / "published" / "README.md").read_text()
    assert damaged_files(tmp_path / "published") == []
