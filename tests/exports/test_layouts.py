"""DFlash in its own layout, EAGLE-3, reduced vocabularies, and the `speculators` layout of all of them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from publications import GOLDEN, publication
from safetensors.torch import load_file, save_file

from dspark.manifest import damaged_files
from dspark.models.checkpoint import load_drafter
from dspark.models.starting_weights import build_drafter
from pipelines.exports import gates
from pipelines.exports.native import Publication, publish_native
from pipelines.exports.reader import open_folder
from pipelines.exports.speculators import LayoutError, speculators_config

ALL = sorted(path.parent.parent.name for path in GOLDEN.glob("*/checkpoint/config.json"))
QWEN = [name for name in ALL if "gemma" not in name]


def changed(name: str, **overrides: Any) -> Publication:
    """A conformance publication whose drafter has other settings, with random weights."""
    given = publication(name)
    vocabulary = overrides.get("draft_vocab_size")
    config = given.drafter.config.replace(**overrides)
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


def check(made: Publication, folder: Path) -> dict[str, Any]:
    """Publish with both layouts; both must draft alike, and the folder must open again as it was."""
    publish_native(dataclasses.replace(made, speculators=True), folder)
    assert damaged_files(folder) == []
    found = json.loads((folder / "gates.json").read_text())
    for gate in ("4 drafts alike", "4 drafts alike, speculators layout"):
        assert found[gate]["rounds"] == gates.PROBE_ROUNDS
        assert found[gate]["tokens_equal"] == gates.PROBE_ROUNDS * made.drafter.block_size
        assert found[gate]["largest_logit_difference"] < 1e-3
    again = load_drafter(folder)
    assert again.config.replace(num_anchors=1) == made.drafter.config.replace(num_anchors=1)
    for name, tensor in made.drafter.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    if made.drafter.draft_token_ids is not None:
        assert torch.equal(again.draft_token_ids, made.drafter.draft_token_ids)
    return found


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


def test_gemma_has_no_speculators_form(tmp_path: Path) -> None:
    made = dataclasses.replace(publication("dspark_gemma4"), speculators=True)
    with pytest.raises(LayoutError, match=r"publish\.speculators=false"):
        publish_native(made, tmp_path / "published")
    assert not (tmp_path / "published").exists()
    config = publication("dspark_vanilla").drafter.config.replace(target_layer_ids=(-1, 2))
    with pytest.raises(LayoutError, match=r"-1, the embedding's output.*drafter\.target_layer_ids"):
        speculators_config(config, target_name="t", architectures=[])


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("dflash_anchor_first", "sample_from_anchor", False),
        ("dflash_anchor_first", "mask_token_id", 3),
        ("eagle3_qwen3", "norm_before_residual", True),
        ("eagle3_qwen3", "transformer_layer_config.rms_norm_eps", 0.5),
    ],
)
def test_a_key_read_differently_is_found(
    name: str, key: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipelines.exports import speculators

    write = speculators.write_speculators

    def spoiled(drafter: Any, folder: Path, **facts: Any) -> dict[str, Any]:
        values = write(drafter, folder, **facts)
        *outer, last = key.split(".")
        section = values[outer[0]] if outer else values
        section[last] = value
        (folder / "config.json").write_text(json.dumps(values))
        return values

    monkeypatch.setattr(speculators, "write_speculators", spoiled)
    with pytest.raises(ValueError, match=r"other logits|drafts token|norm_before_residual|tuple|shape|size"):
        publish_native(dataclasses.replace(publication(name), speculators=True), tmp_path / "published")
    assert not (tmp_path / "published").exists()


def test_mappings_that_disagree_are_refused(tmp_path: Path) -> None:
    publish_native(changed("eagle3_qwen3", draft_vocab_size=40), tmp_path / "published")
    path = tmp_path / "published" / "model.safetensors"
    tensors = load_file(path)
    tensors["t2d"] = tensors["t2d"].roll(1)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="d2t and t2d"):
        open_folder(tmp_path / "published")
    assert damaged_files(tmp_path / "published") == [
        f"{tmp_path / 'published' / 'model.safetensors'} has been changed since it was written"
    ]
