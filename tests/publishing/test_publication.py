import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from publications import compared, publication
from safetensors.torch import load_file, save_file

from dspark.families import as_dict
from dspark.manifest import CheckpointError, damaged_files, require_intact
from dspark.models.checkpoint import load_drafter, save_drafter
from pipelines.publishing import publication as publication_module
from pipelines.publishing.card import model_card
from pipelines.publishing.checks import CheckFailed
from pipelines.publishing.publication import Publication, PublishError, publish


@pytest.fixture
def vanilla() -> Publication:
    return publication("dspark_vanilla")


ALL = ["dspark_vanilla", "dspark_gated", "dspark_rnn", "dspark_noconfmarkov", "dflash_anchor_first", "dspark_gemma4"]


@pytest.mark.parametrize("name", ALL)
def test_publishes_every_head(name: str, tmp_path: Path) -> None:
    made = publication(name)
    manifest = publish(made, tmp_path / "published")
    assert damaged_files(tmp_path / "published") == []
    assert [path.name for path in tmp_path.iterdir()] == ["published"]
    checked = json.loads((tmp_path / "published" / "publish_checks.json").read_text())
    assert checked["4 reads back"]["tensors"] == len(load_file(tmp_path / "published" / "model.safetensors"))
    assert compared(made, tmp_path / "published")["largest_logit_difference"] < 1e-3
    card = (tmp_path / "published" / "README.md").read_text()
    for note in manifest["engines"]:
        assert note in card
    words = {"dspark_gated": "SGLang only", "dspark_rnn": "SGLang only", "dflash_anchor_first": "Evaluation only"}
    assert words.get(name, "llama.cpp") in card


def test_the_folder_opens_again(vanilla: Publication, tmp_path: Path) -> None:
    publish(vanilla, tmp_path / "published")
    again = load_drafter(tmp_path / "published")
    for name, tensor in vanilla.drafter.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_the_card_and_the_tables(vanilla: Publication, tmp_path: Path) -> None:
    publish(vanilla, tmp_path / "published")
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
    with pytest.raises(CheckFailed, match=r"publish\.dtype"):
        publish(dataclasses.replace(vanilla, dtype="bfloat16"), tmp_path / "published")
    with torch.no_grad():
        for module in (vanilla.target.model, vanilla.drafter):
            for parameter in module.parameters():
                parameter.copy_(parameter.bfloat16().float())
    publish(dataclasses.replace(vanilla, dtype="bfloat16"), tmp_path / "published")
    assert load_file(tmp_path / "published" / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    assert vanilla.drafter.dtype == torch.float32


def test_the_card_says_which_figures_engines_do_not_reach(vanilla: Publication, tmp_path: Path) -> None:
    publish(vanilla, tmp_path / "scaled")
    assert "no engine reads" not in (tmp_path / "scaled" / "README.md").read_text()
    affine = {**vanilla.calibration, "method": "affine"}
    publish(dataclasses.replace(vanilla, calibration=affine), tmp_path / "shifted")
    assert "no engine reads" in (tmp_path / "shifted" / "README.md").read_text()


def test_untied_targets_tell_llama_cpp(vanilla: Publication, tmp_path: Path) -> None:
    tied = torch.equal(vanilla.target.embed_tokens.weight, vanilla.target.lm_head.weight)
    publish(vanilla, tmp_path / "published")
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
        (
            _changed("rope_parameters", {"rope_type": "default", "rope_theta": 100.0}),
            r"rope_parameters is .*100\.0",
        ),
        (_changed("rms_norm_eps", 0.5), r"rms_norm_eps is 0\.5 there, 1e-06 here"),
        (_changed("mask_token_id", 3), "mask_token_id is 3 there, 159 here"),
        (_tensor("embed_tokens.weight"), "embed_tokens.weight"),
        (_tensor("lm_head.weight"), "lm_head.weight"),
        (_tensor("hidden_norm.weight"), r"hidden_norm\.weight in .* is not the trained drafter's"),
        (_tensor("markov_head.markov_w2.weight"), r"markov_w2\.weight in .* is not the trained"),
        (_tensor("confidence_head.proj.bias"), r"proj\.bias in .* is not the trained"),
    ],
)
def test_checks_find_what_would_fail_silently(
    vanilla: Publication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, message: str
) -> None:
    """Each fault is put into the folder after it was saved; nothing is published, the old folder stays."""
    publish(vanilla, tmp_path / "published")
    before = (tmp_path / "published" / "manifest.json").read_bytes()
    save = publication_module.save_drafter

    def spoiled(drafter: Any, path: Path, text_config: Any, **options: Any) -> None:
        save(drafter, path, text_config, **options)
        spoil(path)

    monkeypatch.setattr(publication_module, "save_drafter", spoiled)
    with pytest.raises((CheckFailed, CheckpointError), match=message):
        publish(vanilla, tmp_path / "published")
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
        publish(changed, tmp_path / "published")
    assert not (tmp_path / "published").exists()


def test_the_contract_is_the_checkpoints(vanilla: Publication, tmp_path: Path) -> None:
    other = dataclasses.replace(vanilla.contract, mask_token_id=7)
    with pytest.raises(PublishError, match="mask_token_id"):
        publish(dataclasses.replace(vanilla, contract=other), tmp_path / "published")


def test_publishing_twice_gives_the_same_bytes(vanilla: Publication, tmp_path: Path) -> None:
    first = publish(vanilla, tmp_path / "a")
    second = publish(vanilla, tmp_path / "b")
    assert first == second


def test_a_flipped_bit_is_found_in_every_published_file(vanilla: Publication, tmp_path: Path) -> None:
    """Whoever opens the folder finds it: decode and `run` by the whole manifest, the loaders in what they read."""
    folder = tmp_path / "published"
    publish(dataclasses.replace(vanilla, layouts=("speculators",), provenance={"seed": 1}), folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {"README.md", "config.json", "contract.json", "manifest.json", "model.safetensors", "provenance.json"}
    assert names < {path.name for path in files}
    for path in files:
        data = path.read_bytes()
        for place in (0, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
            with pytest.raises(CheckpointError, match=rf"{path} .*: publish it again"):
                require_intact(folder, cure="publish it again")
        path.write_bytes(data)
    require_intact(folder)


def test_what_comes_from_data_is_shown_as_it_stands(vanilla: Publication) -> None:
    """A name or a domain makes no link, no tag, no heading and no table cell in the card."""
    odd = "x](http://evil) <img src=x onerror=alert(1)> `| **b** |`\n# heading"
    row: dict[str, Any] = {"drafter": "dspark", "temperature": 0.0, "value": 2.0, "low": 1.0, "high": 3.0, "rounds": 5}
    report = {
        "accepted_length": [{**row, "domain": odd}, {**row, "domain": "mean"}],
        "summary": [f"One pass of {odd} yields 2 tokens."],
        "flags": [{"level": "warning", "text": f"Of {odd} there is little."}],
    }
    contract = dataclasses.replace(vanilla.contract, target_name=odd)
    card = model_card(odd, vanilla.drafter.config, contract, None, report, [], license="other")
    body = re.sub(r"``.*?``(?!`)", "", card.split("---", 2)[2])  # code spans, where the target is named
    assert "evil" in body
    for active in ("<img", "](http", "**b**", "\n# heading"):
        assert active not in body.replace("\\]", "")
    (line,) = [line for line in body.splitlines() if line.startswith("| drafter")]
    assert len(re.findall(r"(?<!\\)\|", line)) == 7
    assert "base_model" not in card


@pytest.mark.parametrize(
    ("name", "revision", "real"),
    [
        ("org/model", "a" * 40, True),
        ("models/tiny", None, False),
        ("tiny", "1.0.0", False),
        ("package:x", "a" * 40, False),
    ],
)
def test_the_card_names_a_base_model_of_the_hub_only(
    name: str, revision: str | None, real: bool, vanilla: Publication
) -> None:
    contract = dataclasses.replace(vanilla.contract, target_name=name, target_revision=revision)
    card = model_card("a", vanilla.drafter.config, contract, None, None, [], license=None)
    assert (f"base_model: {name}" in card) is real


def test_the_configuration_has_nothing_of_the_targets_alone(vanilla: Publication, tmp_path: Path) -> None:
    alone = {"quantization_config": {"quant_method": "fp8"}, "auto_map": {"AutoConfig": "x.C"}, "num_experts": 128}
    save_drafter(vanilla.drafter, tmp_path, {**as_dict(vanilla.target.text_config), **alone})
    config = json.loads((tmp_path / "config.json").read_text())
    assert not {*alone, "transformers_version", "_name_or_path"} & set(config)
