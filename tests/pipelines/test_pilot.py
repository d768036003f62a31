"""The pilot as part of a run: it runs by itself, decides what the cache keeps, and belongs to the cache's identity."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from whole_run import dspark, write_config

from pipelines.errors import UserError
from pipelines.progress import Reporter
from pipelines.runs.executor import run_stages
from pipelines.runs.run import Run
from pipelines.settings import Settings, load_settings
from pipelines.stages.capture import Conversation
from pipelines.stages.pilot import pilot_sample, pilot_settings
from pipelines.stages.train import count_steps
from storage.cache.target_cache import TargetCache

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CACHE = ["pilot", "cache"]


def settings_for(folder: Path, toy_folder: Path, **sections: dict[str, Any]) -> Settings:
    """A toy run with two captured layers, whose prompts and settings lie in `folder`."""
    path = write_config(folder, toy_folder)
    values = yaml.safe_load(path.read_text())
    values["drafter"]["target_layer_ids"] = [-1, 0]
    for name, changes in sections.items():
        values.setdefault(name, {}).update(changes)
    path.write_text(yaml.safe_dump(values))
    return load_settings(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pilot")


def run(settings: Settings, stages: list[str], **options: Any) -> dict[str, Any]:
    return {outcome.stage: outcome for outcome in run_stages(settings, Reporter(quiet=True), only=stages, **options)}


PROJECTED = {"hidden_states_codec": "projected", "teacher_codec": "corrected", "components": 0.75}
PILOT = {"share": 0.5, "max_steps": 3, "algorithms": ["dspark", "eagle3"]}


def test_a_projected_cache_is_made_and_trained_from(folder: Path, toy_folder: Path) -> None:
    settings = settings_for(folder, toy_folder, cache=PROJECTED, pilot=PILOT)
    done = run(settings, ["regenerate", *CACHE, "train"])
    assert {name: outcome.state for name, outcome in done.items()} == dict.fromkeys(
        ("regenerate", "pilot", "cache", "train"), "done"
    )
    assert done["pilot"].result["steps"] == {"dspark": 3, "eagle3": 3}
    root = Path(settings.run.directory)
    cache = TargetCache.open(root / "cache")
    kept = load_file(root / "pilot" / "components.safetensors")
    assert cache.projection is not None
    assert torch.equal(cache.projection, kept["projection"][:48])  # three quarters of 64
    row = cache.row(0)
    assert row.hidden_states.shape[1] == 48
    assert row.teacher is not None
    assert row.teacher.top_ids is not None
    measured = cache.manifest["codecs"]["teacher"]["measured"]
    assert measured["acceptance"]["bound"] <= 0.5
    drafter = load_file(root / "checkpoints" / "final" / "model.safetensors")
    assert drafter["fc.weight"].shape == (64, 128)  # as if it had been trained on the captured states
    rank = torch.linalg.matrix_rank(drafter["fc.weight"].double(), rtol=1e-5)
    assert rank <= 48
    again = run(settings, ["regenerate", *CACHE, "train"])
    assert {outcome.state for outcome in again.values()} == {"skipped"}


def test_an_exact_cache_is_recoded_as_the_pilot_found(
    folder: Path, toy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The states that the pilot saw, coded anew as the cache of the run above."""
    settings = settings_for(folder, toy_folder, cache=PROJECTED, pilot=PILOT)
    done, new = settings.run.directory, str(tmp_path / "new")
    command = ["cache", "recode", f"{done}/pilot/cache", new, "--features", "projected:directions=48"]
    assert dspark(*command, "--teacher", "corrected") == 2
    assert "give it too (--target)" in capsys.readouterr().err
    assert dspark(*command, "--pilot", done, "--teacher", "corrected", "--target", str(toy_folder)) == 0
    ours, theirs = TargetCache.open(new), TargetCache.open(f"{done}/cache")
    assert torch.equal(ours.projection, theirs.projection)  # type: ignore[arg-type]
    row = ours.row(0)
    other = theirs.row(theirs.sample_ids.index(row.sample_id))
    assert torch.nn.functional.cosine_similarity(row.hidden_states, other.hidden_states, dim=1).min() > 0.9
    assert row.teacher is not None
    assert row.teacher.top_ids is not None
    stranger = tmp_path / "stranger"
    shutil.copytree(toy_folder, stranger)
    weights = load_file(stranger / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in weights.items()}, stranger / "model.safetensors")
    assert dspark(*command[:4], "--teacher", "corrected", "--target", str(stranger)) == 2
    assert "are not those that" in capsys.readouterr().err


def test_a_pilot_holds_nothing_out_and_has_no_best(folder: Path, toy_folder: Path) -> None:
    settings = settings_for(
        folder, toy_folder, cache=PROJECTED, train={"load_best_model_at_end": True, "validation_samples": 2}
    )
    train = pilot_settings(settings, "dspark").train
    assert (train.load_best_model_at_end, train.validation_samples) == (False, 0)


def test_few_conversations_make_no_weak_pilot(folder: Path, toy_folder: Path) -> None:
    settings = settings_for(folder, toy_folder, cache=PROJECTED, train={"max_steps": None, "global_batch_size": 3})
    conversations = [Conversation(sample_id=f"{i}", input_ids=[1] * 10, spans=[(5, 10)], extra={}) for i in range(400)]
    assert len(pilot_sample(settings, conversations)) == 40
    assert len(pilot_sample(settings, conversations[:100])) == 24
    assert len(pilot_sample(settings, conversations[:8])) == 8
    with pytest.raises(UserError, match="two conversations"):
        pilot_sample(settings, conversations[:1])
    assert count_steps(pilot_settings(settings, "dspark", (8, 400)), 8) == 96
    assert count_steps(pilot_settings(settings, "dspark", (400, 400)), 400) == 402  # three epochs are more than that
    assert count_steps(pilot_settings(settings, "dspark", (8, 30)), 8) == 30  # no more than the training has
    fixed = settings_for(
        folder, toy_folder, cache=PROJECTED, pilot={"num_train_epochs": 2.0}, train={"max_steps": None}
    )
    assert pilot_settings(fixed, "dspark", (8, 400)).train.num_train_epochs == 2.0


def test_another_pilot_is_another_cache(folder: Path, toy_folder: Path) -> None:
    settings = settings_for(folder, toy_folder, cache=PROJECTED, pilot={**PILOT, "share": 0.9})
    with pytest.raises(UserError, match="share"):
        run(settings, CACHE)
    changed, plain = Run(settings), Run(settings_for(folder, toy_folder))
    before = Run(settings_for(folder, toy_folder, cache=PROJECTED, pilot=PILOT))
    assert changed.identity("cache") != before.identity("cache")
    assert "pilot" not in plain.stages
    wider = Run(settings_for(folder, toy_folder, cache={**PROJECTED, "components": 1.0}, pilot=PILOT))
    assert wider.identity("pilot") == before.identity("pilot")
    assert wider.identity("cache") != before.identity("cache")


def test_an_eagle3_drafter_is_trained_from_the_same_cache(folder: Path, toy_folder: Path) -> None:
    """Both pilots had their say in the components, so the cache is the same one for either drafter."""
    settings = settings_for(folder, toy_folder, cache=PROJECTED, pilot=PILOT)
    other = pilot_settings(settings, "eagle3")
    assert other.drafter.algorithm == "eagle3"
    assert other.train.loss.soft_ce == 1.0
    assert settings.train.loss.soft_ce == 0.0


def test_automatic_codecs_stay_within_the_bound(folder: Path, toy_folder: Path, tmp_path: Path) -> None:
    settings = settings_for(
        folder,
        toy_folder,
        cache={"hidden_states_codec": "auto", "teacher_codec": "auto", "acceptance_bound": 0.02},
        pilot={"share": 0.5, "max_steps": 3},
    )
    done = run(settings, ["regenerate", *CACHE], redo=True)
    found = done["pilot"].result
    for part in ("features", "teacher"):
        within = [entry for entry in found["measured"][part] if entry["error"] <= 0.02]
        smallest = min(within, key=lambda entry: entry["bytes_per_token"])
        assert found["chosen"][part]["name"] == smallest["name"]
        assert done["cache"].result["codecs"][part]["name"] == smallest["name"]
    findings = json.loads((Path(settings.run.directory) / "pilot" / "findings.json").read_text())
    assert findings["chosen"] == found["chosen"]


def test_a_bound_that_no_loss_meets_keeps_everything(folder: Path, toy_folder: Path) -> None:
    settings = settings_for(
        folder, toy_folder, cache={"hidden_states_codec": "bf16", "teacher_codec": "auto", "acceptance_bound": 1e-9}
    )
    done = run(settings, ["regenerate", *CACHE], redo=True)
    assert done["pilot"].result["steps"] == {}  # the hidden states need no pilot
    assert done["cache"].result["codecs"]["teacher"]["name"] == "bf16-planes"


@pytest.mark.parametrize(
    ("teacher", "precision"), [("recomputed", "bfloat16"), ("sparse", "float32"), ("corrected", "bfloat16")]
)
def test_other_teachers_and_unfolded_transforms_are_trained_from(
    toy_folder: Path, tmp_path: Path, teacher: str, precision: str
) -> None:
    """A cache for any drafter: all of the states, in transformed components, without a pilot."""
    settings = settings_for(
        tmp_path,
        toy_folder,
        cache={
            "hidden_states_codec": "transform",
            "hidden_states_options": {"output": "coordinates"},
            "teacher_codec": teacher,
            "teacher_options": {"top": 8} if teacher == "sparse" else {},
        },
        train={"max_steps": 2, "precision": precision, "zero_stage": 1},
    )
    done = run(settings, ["regenerate", "cache", "train"])
    assert list(done) == ["regenerate", "cache", "train"]
    assert done["cache"].result["audit"]["mean_total_variation"] < 0.15
    drafter = load_file(Path(settings.run.directory) / "checkpoints" / "final" / "model.safetensors")
    assert drafter["fc.weight"].shape == (64, 128)
    assert bool(torch.isfinite(drafter["fc.weight"]).all())
