"""What the evaluation's workers do, in this process: policies for real, step costs, load, baselines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.calibration import sigmoid, survival
from dspark.config import DrafterConfig
from dspark.decoding.scheduling import algorithm_1
from dspark.decoding.step_costs import StepCosts
from dspark.decoding.target import Target
from dspark.manifest import new_folder, write_manifest
from dspark.models.checkpoint import save_drafter
from dspark.models.starting_weights import build_drafter
from pipelines.data.conversations import Prompt
from pipelines.errors import UserError
from pipelines.evaluation.round_log import read_completions, read_events
from pipelines.evaluation.serving import measured_points
from pipelines.settings import load_settings
from pipelines.stages.decoding import DSPARK, FULL, DecodeItem, DecodePlan, DecodeWorker, work_items
from pipelines.stages.evaluate import decodings
from pipelines.stages.serving import ServingItem, ServingWorker
from pipelines.stages.step_costs import CostWorker, needed_temperatures, table_identity
from pipelines.target_spec import resolve_target

PROMPTS = tuple(
    Prompt(
        prompt_id=f"p{index}",
        domain="ab"[index % 2],
        split="evaluation",
        turns=tuple(
            ({"role": "user", "content": text},) for text in [f"hello {index}?", "and then?"][: 2 if index == 0 else 1]
        ),
    )
    for index in range(4)
)


def an_item(prompts: tuple[Prompt, ...], **more: Any) -> DecodeItem:
    return DecodeItem(prompts=prompts, split="evaluation", **{"seed": 0, "temperature": 0.0, **more})


def a_drafter(folder: Path, target: Path, layers: tuple[int, ...], algorithm: str = "dspark", **more: Any) -> str:
    opened = Target.open(target, dtype="float32", device="cpu", target_layer_ids=layers)
    options: dict[str, Any] = {"target_layer_ids": layers, "num_draft_layers": 1, "block_size": 3, **more}
    if algorithm == "dspark":
        options["markov_rank"] = 4
    config = DrafterConfig.for_target(opened.text_config, mask_token_id=2, algorithm=algorithm, **options)
    with new_folder(folder) as staging:
        save_drafter(build_drafter(config, opened, dtype=torch.float32), staging, opened.text_config)
    return str(folder)


@pytest.fixture(scope="module")
def plan(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> DecodePlan:
    folder = tmp_path_factory.mktemp("evaluate")
    words = [
        f"run.directory={folder / 'run'}",
        f"target.model={toy_folder}",
        "drafter.target_layer_ids=[0]",
        "drafter.block_size=3",
        "evaluate.policy=scheduler",
        "evaluate.one_slot=true",
        "evaluate.serving.max_new_tokens=12",
    ]
    settings = load_settings(Path(__file__).parents[3] / "configs" / "tiny.yaml", words)
    return DecodePlan(
        settings=settings,
        spec=resolve_target(settings),
        folder=str(folder / "evaluation"),
        circumstances={"identity": "x"},
        drafter=a_drafter(folder / "drafter", toy_folder, (0,)),
        max_new_tokens=10,
        batch_size=4,
    )


@pytest.fixture(scope="module")
def costs(plan: DecodePlan) -> dict[float, dict[str, Any]]:
    worker = CostWorker(plan)
    return {temperature: worker.run(temperature) for temperature in needed_temperatures(plan.settings.evaluate)}


def test_work_items_are_every_decoding_in_batches(plan: DecodePlan) -> None:
    """Greedy text is decoded with one seed; an item holds four batches."""
    section = plan.settings.evaluate.model_copy(update={"seeds": (1, 2), "batch_size": 1})
    items = work_items(section, [*PROMPTS, *PROMPTS], "evaluation", lambda temperature: [(DSPARK, FULL)])
    assert [(item.temperature, item.seed, item.number, item.size) for item in items] == [
        *[(0.0, 1, number, 4) for number in (0, 1)],
        *[(1.0, seed, number, 4) for seed in (1, 2) for number in (0, 1)],
    ]
    assert len({item.file for item in items}) == len(items)


def test_step_costs_are_measured_at_every_temperature(costs: dict[float, dict[str, Any]], tmp_path: Path) -> None:
    assert sorted(costs) == [0.0, 1.0]
    for temperature, table in costs.items():
        assert table["tokens"] == [1, 8, 16]
        assert min(table["steps_per_second"] + table["draft"]["seconds"]) > 0
        assert table["conditions"]["temperature"] == temperature
        assert table["conditions"]["hardware"]["cores"] >= 1
    path = tmp_path / "elsewhere.json"
    path.write_text(json.dumps(costs[0.0]))
    assert table_identity(str(path))["tokens"] == [1, 8, 16]
    path.write_text('{"tokens": [4, 2], "steps_per_second": [1, 2]}')
    with pytest.raises(UserError, match=r"evaluate.cost.table.*ascend"):
        table_identity(str(path))
    with pytest.raises(UserError, match="No such file"):
        table_identity(str(tmp_path / "none.json"))


def test_a_kill_before_the_record_loses_neither_tokens_nor_seconds(plan: DecodePlan, tmp_path: Path) -> None:
    own = replace(plan, folder=str(tmp_path))
    item = an_item(PROMPTS, variant=DSPARK)
    record = tmp_path / item.file
    DecodeWorker(own).run(item)
    before = json.loads(record.read_text())
    assert before["tokens"] > 0 < before["seconds"]
    record.unlink()
    DecodeWorker(own).run(item)
    assert json.loads(record.read_text()) == {**before, "seconds": pytest.approx(before["seconds"])}
    record.unlink()
    sorted((tmp_path / "parts").iterdir())[0].unlink()  # one answer was not there yet
    DecodeWorker(own).run(item)
    again = json.loads(record.read_text())
    assert again["tokens"] == before["tokens"]
    assert again["seconds"] > 0


@pytest.mark.parametrize("policy", ["static", "threshold", "scheduler", "two-steps-behind"])
def test_a_policy_is_what_decodes(
    plan: DecodePlan, costs: dict[float, dict[str, Any]], policy: str, tmp_path: Path
) -> None:
    """Every policy writes plain greedy text; the lengths are the policy's own, worked out again from the events."""
    wanted = plan.settings.evaluate.model_copy(update={"policy": policy, "static_length": 2, "threshold": 0.4})
    own = replace(
        plan, settings=plan.settings.model_copy(update={"evaluate": wanted}), folder=str(tmp_path), costs=costs
    )
    assert (DSPARK, policy) in decodings(own.settings, 0.0)
    assert (DSPARK, FULL) in decodings(own.settings, 0.0)
    worker = DecodeWorker(own)
    texts = {}
    for variant, chosen in ((DSPARK, policy), (DSPARK, FULL), ("plain", FULL)):
        item = an_item(PROMPTS, variant=variant, policy=chosen)
        worker.run(item)
    worker.log.merge()
    for row in read_completions(f"{tmp_path}/completions-all.parquet").to_pylist():
        texts.setdefault((row["prompt_id"], row["turn"]), set()).add(tuple(row["output_ids"]))
    assert len(texts) == len(PROMPTS) + 1  # one of them has a second turn
    assert all(len(found) == 1 for found in texts.values())
    rows = [r for r in read_events(f"{tmp_path}/events-all.parquet").to_pylist() if r["policy"] == policy]
    assert rows
    for row in rows:
        logits = row["confidence_logits"]
        if policy == "static":
            assert row["scheduled"] == 2
        elif policy == "threshold":
            below = [i for i, c in enumerate(sigmoid(logits)) if c < 0.4]
            assert row["scheduled"] == (below[0] if below else 3)
        elif row["batch_rows"] == 1 and logits and policy == "scheduler":
            table = StepCosts.from_dict(costs[0.0]).at_rows(1)
            assert row["scheduled"] == algorithm_1(survival([logits]), table)[0]


def test_every_policy_under_load(plan: DecodePlan, costs: dict[float, dict[str, Any]], tmp_path: Path) -> None:
    worker = ServingWorker(replace(plan, folder=str(tmp_path), costs=costs))
    for policy in ("none", "one-slot", "static", "full", "threshold", "scheduler", "two-steps-behind"):
        worker.run(ServingItem(policy=policy, users=2, prompts=PROMPTS))
    worker.log.merge()
    points = {point["policy"]: point for point in measured_points(read_events(f"{tmp_path}/events-all.parquet"))}
    assert points["none"]["drafts"] == 0
    assert points["none"]["accepted_length"] == pytest.approx(1)
    assert points["one-slot"]["drafts"] == 1
    assert points["full"]["drafts"] == 3
    assert all(point["tokens_per_second"] > 0 for point in points.values())
    assert 0 <= points["scheduler"]["drafts"] <= 3


def test_other_drafters_are_decoded_beside(plan: DecodePlan, toy_folder: Path, tmp_path: Path) -> None:
    """A baseline may read other layers of the target; one for another target is refused by name."""
    baselines = {
        "eagle3": a_drafter(tmp_path / "eagle3", toy_folder, (0,), "eagle3", block_size=4),
        "dflash": a_drafter(tmp_path / "dflash", toy_folder, (0, -1), "dflash"),
    }
    own = replace(plan, folder=str(tmp_path / "out"), baselines=baselines)
    worker = DecodeWorker(own)
    for variant in (*baselines, "one-slot", "plain"):
        item = an_item(PROMPTS[1:], variant=variant)
        worker.run(item)
    worker.log.merge()
    events = read_events(f"{own.folder}/events-all.parquet").to_pylist()
    assert {row["drafter"] for row in events} == {"eagle3", "dflash", "one-slot"}
    assert {row["scheduled"] for row in events if row["drafter"] == "one-slot"} == {1}
    broken = tmp_path / "broken"
    a_drafter(broken, toy_folder, (0,))
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "hidden_size": config["hidden_size"] * 2}))
    with pytest.raises(UserError, match=r"evaluate.baselines.old: .*broken cannot draft for this target"):
        DecodeWorker(replace(plan, baselines={"old": str(broken)}))
    contract = plan.spec.contract(plan.settings, with_block=True)
    (Path(baselines["dflash"]) / "contract.json").write_text(json.dumps({**contract, "weights_sha256": "0" * 64}))
    write_manifest(Path(baselines["dflash"]))
    with pytest.raises(UserError, match=r"evaluate.baselines.dflash: .*weights_sha256"):
        DecodeWorker(own)


def test_a_stopped_unit_goes_on_with_the_prompts_that_are_missing(plan: DecodePlan, tmp_path: Path) -> None:
    worker = DecodeWorker(replace(plan, folder=str(tmp_path)))
    item = an_item(PROMPTS, variant="plain", temperature=1.0)
    worker.run(item)
    worker.log.merge()
    before = read_completions(f"{tmp_path}/completions-all.parquet").to_pylist()
    parts = sorted((tmp_path / "parts").iterdir())
    (tmp_path / item.file).unlink()
    for path in parts[:2]:
        path.unlink()
    kept = {path: path.stat().st_mtime_ns for path in parts[2:]}
    worker.run(item)
    worker.log.merge()
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    after = read_completions(f"{tmp_path}/completions-all.parquet").to_pylist()
    assert [row["output_ids"] for row in after] == [row["output_ids"] for row in before]
    assert json.loads((tmp_path / item.file).read_text())["tokens"] == sum(len(row["output_ids"]) for row in before)


def test_a_prompt_longer_than_the_context_is_skipped_and_counted(plan: DecodePlan, tmp_path: Path) -> None:
    long = replace(PROMPTS[1], prompt_id="long", turns=(({"role": "user", "content": "word " * 3000},),))
    worker = DecodeWorker(replace(plan, folder=str(tmp_path)))
    item = an_item((long, PROMPTS[2]), variant=DSPARK)
    worker.run(item)
    record = json.loads((tmp_path / item.file).read_text())
    assert list(record["skipped"]) == ["long"]
    assert "context" in record["skipped"]["long"]
    worker.log.merge()
    assert len(read_completions(f"{tmp_path}/completions-all.parquet")) == 1


def test_a_checkpoint_of_another_block_is_refused(plan: DecodePlan, toy_folder: Path, tmp_path: Path) -> None:
    folder = a_drafter(tmp_path / "five", toy_folder, (0,), block_size=5)
    with pytest.raises(UserError, match="blocks of 5, these settings ask for 3"):
        DecodeWorker(replace(plan, drafter=folder))
