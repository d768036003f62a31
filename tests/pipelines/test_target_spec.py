"""A target is found by package, folder or hub commit, on the driver's machine and on another one."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants as hub
import pytest
from transformers import AutoConfig, GraniteConfig, GraniteForCausalLM
from whole_run import write_config

from dspark.decoding.target_checks import check_target
from pipelines.errors import UserError
from pipelines.progress import Reporter
from pipelines.runs.executor import run_stages
from pipelines.settings import Settings, load_settings, settings_from_dict
from pipelines.target_spec import local_folder, resolve_target
from pipelines.workers import TARGET_CHECK, open_target

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def settings(model: str, **target: str) -> Settings:
    return settings_from_dict({"run": {"directory": "unused"}, "target": {"model": model, **target}})


@pytest.fixture
def hub_cache(toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds the toy target at one commit; the hub itself is out of reach."""
    model = tmp_path / "models--some--toy"
    snapshot = model / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for file in toy_folder.iterdir():
        (snapshot / file.name).symlink_to(file.resolve())
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    return snapshot


def test_a_hub_model_that_was_fetched_before_works_without_the_network(hub_cache: Path) -> None:
    spec = resolve_target(settings("some/toy"))
    assert (spec.name, spec.path, spec.revision) == ("some/toy", str(hub_cache), COMMIT)
    elsewhere = replace(spec, path="/not/on/this/machine")
    assert local_folder(elsewhere) == str(hub_cache)


def test_a_hub_model_that_was_never_fetched_names_the_cure(hub_cache: Path) -> None:
    with pytest.raises(UserError, match="could not be fetched from the Hugging Face hub"):
        resolve_target(settings("some/other"))


def test_a_folder_of_the_drivers_machine_alone_is_refused_elsewhere(toy_folder: Path) -> None:
    spec = resolve_target(settings(str(toy_folder)))
    assert local_folder(spec) == str(toy_folder)
    assert json.loads((toy_folder / "config.json").read_text())["model_type"] == spec.text_config["model_type"]
    with pytest.raises(UserError, match="storage that every machine sees"):
        local_folder(replace(spec, path="/not/on/this/machine"))


def test_a_revision_of_a_folder_is_refused(toy_folder: Path) -> None:
    with pytest.raises(UserError, match="drop it"):
        resolve_target(settings(str(toy_folder), revision="main"))
    with pytest.raises(UserError, match="drop it"):
        resolve_target(settings("package:smollm2-135m-instruct", revision="main"))


def test_the_opening_check_is_done_once_a_run_and_version(
    toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = settings_from_dict({"run": {"directory": str(tmp_path)}, "target": {"model": str(toy_folder)}})
    calls: list[str] = []

    def counted(target: Any) -> Any:
        calls.append(str(target.dtype))
        return check_target(target)

    monkeypatch.setattr("pipelines.workers.check_target", counted)
    spec, kept = resolve_target(wanted), tmp_path / TARGET_CHECK
    open_target(wanted, spec)
    assert not kept.exists()  # what has no run yet leaves nothing
    (tmp_path / "run.json").write_text("{}")
    for _ in range(3):
        open_target(wanted, spec)
    assert len(calls) == 2
    found = json.loads(kept.read_text())
    assert found["identity"]["weights_sha256"] == spec.hashes["weights_sha256"]
    assert 0 <= found["differences"]["decoded"] <= found["differences"]["allowed"]
    for changed in ({"dtype": "float32"}, {"attn_implementation": "eager"}):
        other = settings_from_dict(
            {"run": {"directory": str(tmp_path)}, "target": {"model": str(toy_folder), **changed}}
        )
        open_target(other, spec)
        open_target(other, spec)
    assert len(calls) == 4
    changed_weights = replace(spec, hashes={**spec.hashes, "weights_sha256": "0" * 64})
    open_target(other, changed_weights)
    assert len(calls) == 5


def test_a_target_with_a_head_of_its_own_is_refused_before_an_answer_is_written(
    toy_folder: Path, tmp_path: Path
) -> None:
    """Granite divides its logits: its configuration is a decoder's, and only opening it tells."""
    shutil.copytree(toy_folder, folder := tmp_path / "target")
    config = AutoConfig.from_pretrained(folder)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    granite = GraniteConfig(**{name: getattr(config, name) for name in sizes}, eos_token_id=0, logits_scaling=8.0)
    GraniteForCausalLM(granite).save_pretrained(folder)
    run = load_settings(write_config(tmp_path, folder), ["drafter.initial_weights=random"])
    with pytest.raises(UserError, match=r"the head times the last hidden states differ from the model's own"):
        run_stages(run, Reporter(quiet=True), only=["regenerate"])
    assert not list((tmp_path / "run" / "conversations").rglob("*.jsonl"))
