"""A target is found by package, folder or hub commit, on the driver's machine and on another one."""

import json
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants as hub
import pytest

from pipelines.errors import UserError
from pipelines.settings import Settings, settings_from_dict
from pipelines.target_facts import examine_target, local_folder

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
    facts = examine_target(settings("some/toy"))
    assert (facts.name, facts.path, facts.revision) == ("some/toy", str(hub_cache), COMMIT)
    elsewhere = replace(facts, path="/not/on/this/machine")
    assert local_folder(elsewhere) == str(hub_cache)


def test_a_hub_model_that_was_never_fetched_names_the_cure(hub_cache: Path) -> None:
    with pytest.raises(UserError, match="could not be fetched from the Hugging Face hub"):
        examine_target(settings("some/other"))


def test_a_folder_of_the_drivers_machine_alone_is_refused_elsewhere(toy_folder: Path) -> None:
    facts = examine_target(settings(str(toy_folder)))
    assert local_folder(facts) == str(toy_folder)
    assert json.loads((toy_folder / "config.json").read_text())["model_type"] == facts.text_config["model_type"]
    with pytest.raises(UserError, match="storage that every machine sees"):
        local_folder(replace(facts, path="/not/on/this/machine"))


def test_a_revision_of_a_folder_is_refused(toy_folder: Path) -> None:
    with pytest.raises(UserError, match="drop it"):
        examine_target(settings(str(toy_folder), revision="main"))
    with pytest.raises(UserError, match="drop it"):
        examine_target(settings("package:smollm2-135m-instruct", revision="main"))
