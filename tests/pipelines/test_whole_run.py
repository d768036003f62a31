"""The whole pipeline as a user starts it: every output is there, and a second run finds them all."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from whole_run import (
    PROMPTS,
    ROOT,
    STAGES,
    finish,
    leftovers,
    report_figures,
    sample_ids,
    write_config,
)

from dspark.manifest import damaged_files
from storage.cache.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

OUTPUTS = {
    "conversations": ("train.jsonl", "calibration.jsonl", "evaluation.jsonl", "manifest.json"),
    "cache": ("manifest.json", "samples.arrow", "dataset_info.json"),
    "checkpoints": ("log.jsonl", "final/config.json", "final/model.safetensors", "final/contract.json"),
    "calibration": ("temperatures.json", "events-all.parquet"),
    "evaluation": ("timings.json", "step_costs.json", "events-all.parquet", "serving/events-all.parquet"),
    "report": ("report.json", "index.html", "report.md"),
    "published": ("manifest.json", "config.json", "model.safetensors", "temperatures.json", "README.md", "report.json"),
}


@pytest.fixture(scope="module")
def config(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("settings"), toy_folder)


@pytest.fixture(scope="module")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "run"
    assert finish(config, directory) == dict.fromkeys(STAGES, "done")
    return directory


def test_every_stage_leaves_its_output(undisturbed: Path) -> None:
    missing = [f"{folder}/{name}" for folder, names in OUTPUTS.items() for name in names]
    assert [name for name in missing if not (undisturbed / name).is_file()] == []
    summary = json.loads((undisturbed / "run.json").read_text())
    assert {stage: record["complete"] for stage, record in summary["stages"].items()} == dict.fromkeys(STAGES, True)
    assert damaged_files(undisturbed / "published") == []
    assert leftovers(undisturbed) == []


def test_the_report_has_its_figures_and_the_text_is_the_targets_own(undisturbed: Path) -> None:
    report = json.loads((undisturbed / "report" / "report.json").read_text())
    equality = report["equality"]
    assert equality["compared"] == PROMPTS["evaluation"]
    assert equality["equal"] == equality["compared"]
    lengths = {(row["drafter"], row["temperature"]): row["value"] for row in report["accepted_length"]}
    assert {("dspark", 0.0), ("dspark", 1.0), ("no-sequential-head", 0.0)} <= lengths.keys()
    assert all(1 <= value <= 4 for value in lengths.values() if value is not None)  # three draft tokens and the bonus
    served = {(point["policy"], point["users"]) for point in report["serving"]["measured"]}
    assert {("none", 2), ("scheduler", 2), ("two-steps-behind", 2)} <= served
    for section in ("speed", "positions", "confidence", "calibration", "training", "cache", "data", "provenance"):
        assert report[section], section
    assert len(report["training"]["series"]["loss"]) == 6


def test_a_second_run_finds_everything_done(config: Path, undisturbed: Path) -> None:
    def contents() -> dict[str, int]:
        outputs = (path for folder in OUTPUTS for path in (undisturbed / folder).rglob("*") if path.is_file())
        return {str(path): path.stat().st_mtime_ns for path in outputs}

    before = contents()
    assert finish(config, undisturbed) == dict.fromkeys(STAGES, "skipped")
    assert contents() == before


def test_outputs_that_were_finished_but_not_recorded_are_taken_up(
    config: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """A kill between a stage's last file and its record: the narrowest moment, made here for every stage at once."""
    directory = tmp_path / "run"
    shutil.copytree(undisturbed, directory)
    for path in (directory / "stages").iterdir():
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "complete": False, "result": {}}))
    assert finish(config, directory) == dict.fromkeys(STAGES, "done")
    assert sample_ids(directory) == sample_ids(undisturbed)
    assert report_figures(directory) == report_figures(undisturbed)
    assert damaged_files(directory / "published") == []
    assert leftovers(directory) == []


def test_a_damaged_cache_is_repaired_to_the_bytes_that_it_had(config: Path, undisturbed: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(undisturbed, directory)
    shard = sorted((directory / "cache" / "shards").iterdir())[1]
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
    command = [sys.executable, "-m", "pipelines.cli", "cache", str(config), f"run.directory={directory}", "--repair"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"damaged: shards/{shard.name}" in done.stderr
    assert shard.read_bytes() == data
    assert verify(directory / "cache") == []
    assert finish(config, directory) == dict.fromkeys(STAGES, "skipped")
    (directory / "cache" / "samples.arrow").unlink()  # what every row depends on
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "samples.arrow: missing" in done.stderr
    assert f"the old one goes to {directory}/damaged/cache-" in done.stderr
    assert shard.read_bytes() == data
    assert finish(config, directory) == dict.fromkeys(STAGES, "skipped")
