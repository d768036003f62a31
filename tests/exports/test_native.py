import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from publications import publication
from safetensors.torch import load_file, save_file

from dspark.manifest import damaged_files
from dspark.models.checkpoint import load_drafter
from pipelines.exports import gates
from pipelines.exports.native import Publication, PublishError, publish_native


@pytest.fixture
def vanilla() -> Publication:
    return publication("dspark_vanilla")


ALL = ["dspark_vanilla", "dspark_gated", "dspark_rnn", "dspark_noconfmarkov", "dflash_anchor_first", "dspark_gemma4"]


@pytest.mark.parametrize("name", ALL)
def test_publishes_every_head(name: str, tmp_path: Path) -> None:
    manifest = publish_native(publication(name), tmp_path / "published")
    assert damaged_files(tmp_path / "published") == []
    assert [path.name for path in tmp_path.iterdir()] == ["published"]
    checked = json.loads((tmp_path / "published" / "gates.json").read_text())
    assert checked["4 drafts alike"]["rounds"] == gates.PROBE_ROUNDS
    assert checked["4 drafts alike"]["largest_logit_difference"] < 1e-3
    card = (tmp_path / "published" / "README.md").read_text()
    for note in manifest["engines"]:
        assert note in card
    words = {"dspark_gated": "SGLang only", "dspark_rnn": "SGLang only", "dflash_anchor_first": "Evaluation only"}
    assert words.get(name, "llama.cpp") in card


def test_the_folder_opens_again(vanilla: Publication, tmp_path: Path) -> None:
    publish_native(vanilla, tmp_path / "published")
    again = load_drafter(tmp_path / "published")
    for name, tensor in vanilla.drafter.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_the_card_and_the_tables(vanilla: Publication, tmp_path: Path) -> None:
    publish_native(vanilla, tmp_path / "published")
    card = (tmp_path / "published" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "golden/target"
    assert front["license"] == "mit"
    assert "Not measured." in card
    table = json.loads((tmp_path / "published" / "sglang_temperatures.json").read_text())
    assert set(table) == {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}
    assert len(table["temperatures"]) == 7
    assert table["num_samples"] == 321


def test_bfloat16_on_request(vanilla: Publication, tmp_path: Path) -> None:
    """A target whose weights are bfloat16 values is stored exactly; one with wider weights is refused."""
    with pytest.raises(gates.GateFailed, match=r"publish\.dtype"):
        publish_native(dataclasses.replace(vanilla, dtype="bfloat16"), tmp_path / "published")
    with torch.no_grad():
        for module in (vanilla.target.model, vanilla.drafter):
            for parameter in module.parameters():
                parameter.copy_(parameter.bfloat16().float())
    publish_native(dataclasses.replace(vanilla, dtype="bfloat16"), tmp_path / "published")
    assert load_file(tmp_path / "published" / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    assert vanilla.drafter.dtype == torch.float32


def test_the_card_says_which_figures_engines_do_not_reach(vanilla: Publication, tmp_path: Path) -> None:
    publish_native(vanilla, tmp_path / "scaled")
    assert "no engine reads" not in (tmp_path / "scaled" / "README.md").read_text()
    affine = {**vanilla.calibration, "method": "affine"}
    publish_native(dataclasses.replace(vanilla, calibration=affine), tmp_path / "shifted")
    assert "no engine reads" in (tmp_path / "shifted" / "README.md").read_text()


def test_untied_targets_tell_llama_cpp(vanilla: Publication, tmp_path: Path) -> None:
    tied = torch.equal(vanilla.target.embed_tokens.weight, vanilla.target.lm_head.weight)
    publish_native(vanilla, tmp_path / "published")
    config = json.loads((tmp_path / "published" / "config.json").read_text())
    assert config.get("has_embed_tokens") is (None if tied else False)


def _without(key: str) -> Any:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        del config[key]
        (folder / "config.json").write_text(json.dumps(config))

    return change


def _changed(key: str, value: Any) -> Any:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config[key] = value
        (folder / "config.json").write_text(json.dumps(config))

    return change


def _tensor(name: str) -> Any:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = tensors[name] + 0.25
        save_file(tensors, folder / "model.safetensors")

    return change


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without("confidence_head_with_markov"), "confidence_head_with_markov"),
        (_without("markov_head_type"), "markov_head_type"),
        (_without("rope_parameters"), "rope_parameters"),
        (_changed("tie_word_embeddings", True), "tie_word_embeddings"),
        (_changed("block_layout", "mask-first"), "anchor-first"),
        (_changed("mask_token_id", 5000), r"drafter\.mask_token_id"),
        (_changed("target_layer_ids", [0, 2, 5]), r"drafter\.target_layer_ids"),
        (_changed("target_layer_ids", [-1, 2, 4]), r"drafter\.target_layer_ids"),
        (_changed("rope_parameters", {"rope_type": "default", "rope_theta": 100.0}), "other logits|drafts token"),
        (_changed("rms_norm_eps", 0.5), "other logits|drafts token"),
        (_changed("mask_token_id", 3), "other logits|drafts token"),
        (_tensor("embed_tokens.weight"), "embed_tokens.weight"),
        (_tensor("lm_head.weight"), "lm_head.weight"),
        (_tensor("hidden_norm.weight"), "other logits|drafts token"),
        (_tensor("markov_head.markov_w2.weight"), None),
        (_tensor("confidence_head.proj.bias"), "confidences"),
    ],
)
def test_gates_find_what_would_fail_silently(
    vanilla: Publication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, message: str | None
) -> None:
    """Each fault is put into the folder after it was saved; nothing is published, the old folder stays."""
    import dspark.models.checkpoint

    publish_native(vanilla, tmp_path / "published")
    before = (tmp_path / "published" / "manifest.json").read_bytes()
    save = dspark.models.checkpoint.save_drafter

    def spoiled(drafter: Any, path: Path, text_config: Any, **options: Any) -> None:
        save(drafter, path, text_config, **options)
        spoil(path)

    monkeypatch.setattr(dspark.models.checkpoint, "save_drafter", spoiled)
    if message is None:
        with pytest.raises(gates.GateFailed):
            publish_native(vanilla, tmp_path / "published")
    else:
        with pytest.raises(gates.GateFailed, match=message):
            publish_native(vanilla, tmp_path / "published")
    assert (tmp_path / "published" / "manifest.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["published"]


@pytest.mark.parametrize(
    ("temperatures", "message"),
    [([1.0] * 5, "5 temperatures for a block of 7"), ([1.0] * 6 + [0.0], "positive"), ([1e308] * 7, "float32")],
)
def test_temperatures_fit_the_block(
    vanilla: Publication, tmp_path: Path, temperatures: list[float], message: str
) -> None:
    changed = dataclasses.replace(vanilla, calibration={"temperatures": temperatures})
    with pytest.raises(PublishError, match=message):
        publish_native(changed, tmp_path / "published")
    assert not (tmp_path / "published").exists()


def test_the_contract_is_the_checkpoints(vanilla: Publication, tmp_path: Path) -> None:
    other = dataclasses.replace(vanilla.contract, mask_token_id=7)
    with pytest.raises(PublishError, match="mask_token_id"):
        publish_native(dataclasses.replace(vanilla, contract=other), tmp_path / "published")


def test_publishing_twice_gives_the_same_bytes(vanilla: Publication, tmp_path: Path) -> None:
    first = publish_native(vanilla, tmp_path / "a")
    second = publish_native(vanilla, tmp_path / "b")
    assert first == second
