"""Every kind of drafter through the product: trained on one cache, decoded, reported, published, opened again."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from whole_run import write_config

from dspark.manifest import damaged_files
from dspark.models.checkpoint import load_drafter
from pipelines.errors import UserError
from pipelines.progress import Reporter
from pipelines.runs.executor import run_stages
from pipelines.settings import Settings, load_settings
from pipelines.workers import session

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Name: (settings, draft tokens a round, architecture).
PLUGIN = Path(__file__).parents[1] / "plugins" / "slotwise.py"
KINDS: dict[str, tuple[list[str], int, str]] = {
    "a plugin's": (
        [f"plugins=[{PLUGIN}]", "drafter.algorithm=slotwise", "drafter.options={state_scale: 0.5}"],
        3,
        "SlotwiseModel",
    ),
    "eagle3": (["drafter.algorithm=eagle3", "drafter.block_size=4"], 4, "Qwen3Eagle3Model"),
    "dflash": (["drafter.algorithm=dflash"], 3, "Qwen3DSparkModel"),
    "dflash, mask-first": (["drafter.algorithm=dflash", "drafter.block_layout=mask-first"], 3, "DFlashDraftModel"),
    "one slot": (["drafter.algorithm=dflash", "drafter.block_size=1"], 1, "Qwen3DSparkModel"),
    "rnn, no confidence": (
        ["drafter.markov_head_type=rnn", "drafter.enable_confidence_head=false", "drafter.draft_vocab_size=null"],
        3,
        "Qwen3DSparkModel",
    ),
}


def settings_for(config: Path, directory: Path, *words: str) -> Settings:
    shorter = ["evaluate.temperatures=[0.0]", "evaluate.serving=null", "train.max_steps=2", "train.save_steps=2"]
    return load_settings(config, [f"run.directory={directory}", *shorter, *words])


@pytest.fixture(scope="module")
def started(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The toy's settings file, and a run with conversations and cache, in a Ray session for the whole module."""
    folder = tmp_path_factory.mktemp("algorithms")
    config = write_config(folder, toy_folder)
    settings = settings_for(config, folder / "start")
    before = os.getcwd()
    with session(settings, str(folder)):
        run_stages(settings, Reporter(), only=["regenerate", "cache"])
        yield config, folder / "start"
    os.chdir(before)


MTP = ["drafter.algorithm=mtp", "drafter.target_layer_ids=null", "drafter.block_size=2"]


def test_mtp_trains_from_a_cache_of_last_hidden_states(started: tuple[Path, Path], tmp_path: Path) -> None:
    """Refused with a pilot's cache and in the speculators layout; everything else as any other drafter."""
    config, start = started
    directory = tmp_path / "run"
    shutil.copytree(start, directory, ignore=lambda _folder, names: {"cache", "cache.json"} & set(names))
    with pytest.raises(
        UserError, match=r"codec is \w+, which begins with a pilot, and mtp has none: .*cache.hidden_states_codec=int8"
    ):
        settings_for(config, directory, *MTP, "cache.hidden_states_codec=projected")
    words = [*MTP, "cache.hidden_states_codec=int8", "cache.teacher_codec=recomputed", "publish.layouts=[]"]
    states = {one.stage: one.state for one in run_stages(settings_for(config, directory, *words), Reporter())}
    assert states.pop("regenerate") == "skipped"
    assert set(states.values()) == {"done"}
    report = json.loads((directory / "report" / "report.json").read_text())
    assert report["equality"]["equal"] == report["equality"]["compared"] > 0
    published = directory / "published"
    assert damaged_files(published) == []
    drafter = load_drafter(published)
    assert (drafter.config.algorithm, drafter.block_size) == ("mtp", 2)
    assert "target's last hidden state" in (published / "README.md").read_text()
    with pytest.raises(ValueError, match="mtp has no form in speculators"):
        run_stages(settings_for(config, directory, *words[:-1], "publish.layouts=[speculators]"), Reporter())


@pytest.mark.parametrize("kind", KINDS)
def test_trains_decodes_and_publishes(kind: str, started: tuple[Path, Path], tmp_path: Path) -> None:
    words, tokens, architecture = KINDS[kind]
    config, start = started
    directory = tmp_path / "run"
    shutil.copytree(start, directory)
    has_form = architecture != "SlotwiseModel"
    speculators = f"publish.layouts={'[speculators]' if has_form else '[]'}"
    outcomes = run_stages(settings_for(config, directory, *words, speculators), Reporter())
    states = {outcome.stage: outcome.state for outcome in outcomes}
    assert states.pop("regenerate") == states.pop("cache") == "skipped"  # one cache serves them all
    assert set(states.values()) == {"done"}

    report = json.loads((directory / "report" / "report.json").read_text())
    equality = report["equality"]
    assert equality["equal"] == equality["compared"] > 0
    lengths = [row["value"] for row in report["accepted_length"] if row["value"] is not None]
    assert lengths
    assert all(1 <= value <= tokens + 1 for value in lengths)
    losses = [value for _, value in report["training"]["series"]["loss"]]
    assert len(losses) == 2
    assert min(losses) > 0

    published = directory / "published"
    assert damaged_files(published) == []
    assert json.loads((published / "config.json").read_text())["architectures"] == [architecture]
    drafter = load_drafter(published)
    assert drafter.block_size == tokens
    checked: dict[str, Any] = json.loads((published / "publish_checks.json").read_text())
    compared = [found["tensors"] for name, found in checked.items() if name.startswith("4 reads back")]
    assert len(compared) == 1 + has_form
    assert min(compared) > 0
    states = {outcome.state for outcome in run_stages(settings_for(config, directory, *words, speculators), Reporter())}
    assert states == {"skipped"}


def test_an_algorithm_brings_its_own_loss(toy_folder: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, toy_folder)

    def loss(*words: str) -> dict[str, float]:
        settings = load_settings(config, [f"run.directory={tmp_path}", *words])
        return {name: value for name, value in settings.train.loss.model_dump().items() if value}

    kept = {"lk_hybrid_decay": 3.0}
    assert loss() == {**kept, "ce": 0.1, "l1": 0.9, "confidence": 1.0, "position_decay": 4.0}
    assert loss("drafter.algorithm=dflash") == {**kept, "ce": 1.0, "position_decay": 4.0}
    eagle = loss("drafter.algorithm=eagle3")  # a step weighs 0.8 of the one before
    assert eagle == {**kept, "soft_ce": 1.0, "position_decay": pytest.approx(4.4814201)}
    assert loss("drafter.algorithm=dflash", "train.loss.kl=0.5") == {
        **kept,
        "ce": 1.0,
        "kl": 0.5,
        "position_decay": 4.0,
    }
    with pytest.raises(UserError, match=r"train\.loss\.confidence is 1.*drafter\.algorithm=dflash"):
        loss("drafter.algorithm=dflash", "train.loss.confidence=1.0")
