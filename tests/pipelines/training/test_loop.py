"""Whole trainings of a toy: every split takes the same steps, and what is killed goes on as if it had not been."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy_training import EVERYTHING, ROWS, Toy, start, train, wait

from dspark.models.eagle3 import Eagle3
from pipelines.errors import UserError
from pipelines.training.loader import Rows
from pipelines.training.log import LOG, VALIDATION, read_log
from pipelines.training.loop import FINAL
from pipelines.training.task import TrainingTask, step_plan
from storage.checkpoints import complete_checkpoints, load_checkpoint, newest_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TIMES = ("slots_per_second", "tokens_per_second", "seconds_per_step", "loader_wait_share", "memory_bytes")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def straight(toy: Toy) -> TrainingTask:
    task = toy.task("straight")
    train(task)
    return task


def state(task: TrainingTask) -> dict[str, torch.Tensor]:
    newest = newest_checkpoint(task.output)
    assert newest is not None
    return load_checkpoint(newest).tensors


def log(task: TrainingTask, name: str = LOG) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if key not in TIMES} for line in read_log(Path(task.output, name))
    ]


def farthest(task: TrainingTask, expected: TrainingTask) -> float:
    ours, theirs = state(task), state(expected)
    assert ours.keys() == theirs.keys()
    return max(float((ours[key].double() - theirs[key].double()).abs().max()) for key in theirs)


def dies_at(step: int) -> Callable[[], None]:
    """Kills its process when it begins this step."""

    def prepare() -> None:
        from cluster.engine import TrainEngine

        real = TrainEngine.train_step

        def train_step(self: TrainEngine, number: int, *arguments: Any, **options: Any) -> Any:
            if number == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, number, *arguments, **options)

        TrainEngine.train_step = train_step  # type: ignore[method-assign]

    return prepare


def killed(task: TrainingTask, ranks: int, step: int) -> TrainingTask:
    codes = wait(start(task, ranks, dies_at(step)))
    assert set(codes) <= {-signal.SIGKILL, 1}
    assert -signal.SIGKILL in codes
    return task


def test_a_kill_and_a_resume_are_not_seen_in_weights_state_or_log(toy: Toy, straight: TrainingTask):
    """Killed at step 4 of 6 (counted from 1), with the last checkpoint after step 3: bit-equal."""
    task = killed(toy.task("killed", save_steps=3, logging_steps=1), ranks=1, step=4)
    assert [info.step for info in complete_checkpoints(task.output)] == [3]
    assert [line["step"] for line in log(task)] == [1, 2, 3, 4]
    train(task)
    assert farthest(task, straight) == 0
    assert log(task) == log(straight)
    final, expected = (load_file(Path(one.output, FINAL, "model.safetensors")) for one in (task, straight))
    assert all(torch.equal(final[name], expected[name]) for name in expected)


def test_lines_of_the_log_that_span_a_resume_tell_of_all_their_steps(toy: Toy):
    """A line every 4 steps, a checkpoint every 3: the first line spans the resume at step 3."""
    undisturbed = toy.task("line-undisturbed", logging_steps=4, save_steps=3)
    train(undisturbed)
    task = killed(toy.task("line-killed", logging_steps=4, save_steps=3), ranks=1, step=3)
    train(task)
    assert [line["step"] for line in log(task)] == [4, 6]
    assert log(task) == log(undisturbed)
    assert log(task, VALIDATION) == log(undisturbed, VALIDATION)


def stops_after(step: int) -> Callable[[], None]:
    """SIGTERM is heard after this many steps, as the training group would pass it on."""

    def prepare() -> None:
        from pipelines.training import loop

        asked = itertools.count(1)
        loop.stop_wanted = lambda: next(asked) == step

    return prepare


def test_a_request_to_stop_writes_a_checkpoint_at_once_and_leaves_no_trace(toy: Toy, straight: TrainingTask):
    task = toy.task("stopped", checkpoint_in_background=True)
    train(task, prepare=stops_after(3))
    assert [info.step for info in complete_checkpoints(task.output)] == [2, 3]
    assert not Path(task.output, FINAL).exists()
    train(task)
    assert farthest(task, straight) == 0
    assert log(task) == log(straight)
    assert log(task, VALIDATION) == log(straight, VALIDATION)


@pytest.mark.parametrize(
    ("ranks", "stage", "then_ranks", "then_stage"), [(2, 1, 1, 0), (1, 0, 2, 2), (2, 2, 2, 3), (2, 3, 1, 1)]
)
def test_other_ranks_stages_packs_and_workers_go_on_with_the_same_training(
    toy: Toy, straight: TrainingTask, ranks: int, stage: int, then_ranks: int, then_stage: int
):
    name = f"moved-{stage}-{then_stage}"
    task = killed(toy.task(name, num_workers=ranks, zero_stage=stage, save_steps=3), ranks, step=3)
    workers = 1 if then_stage == 3 else 0
    resumed = toy.task(
        name,
        num_workers=then_ranks,
        zero_stage=then_stage,
        save_steps=3,
        max_tokens_per_micro_batch=40,
        dataloader_num_workers=workers,
    )
    train(resumed, then_ranks)
    assert farthest(task, straight) < 1e-4
    for ours, theirs in zip(log(task), log(straight), strict=True):
        assert {key: ours[key] for key in ("step", "epoch", "learning_rate", "anchors", "skipped_steps")} == {
            key: theirs[key] for key in ("step", "epoch", "learning_rate", "anchors", "skipped_steps")
        }
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)


def test_the_best_is_kept_and_published_where_asked(toy: Toy):
    task = toy.task(
        "best", load_best_model_at_end=True, save_total_limit=1, save_steps=1, checkpoint_in_background=True
    )
    train(task)
    scores = {line["step"]: line["tau_probabilistic"] for line in log(task, VALIDATION)}
    assert list(scores) == [1, 2, 3, 4, 5, 6]
    best = max(scores, key=lambda step: (scores[step], step))
    kept = complete_checkpoints(task.output)
    assert {info.step for info in kept} == {best, 6}
    assert {info.step: info.metric for info in kept} == {step: scores[step] for step in {best, 6}}
    published = load_file(Path(task.output, FINAL, "model.safetensors"))
    weights = load_checkpoint(next(info.path for info in kept if info.step == best)).tensors
    assert torch.equal(published["fc.weight"], weights["weight/drafter.fc.weight"])


def test_checkpointing_and_bf16_change_what_they_should(toy: Toy, straight: TrainingTask):
    task = toy.task("recomputed", gradient_checkpointing=True, zero_stage=3)
    train(task)
    assert farthest(task, straight) < 1e-5
    task = toy.task("bf16", precision="bfloat16", zero_stage=1, accumulate_float32=True)
    train(task)
    masters = state(task)["weight/drafter.fc.weight"]
    assert masters.dtype == torch.float32
    assert not torch.equal(masters, masters.bfloat16().float())
    exact = state(straight)
    for name, weight in state(task).items():
        if name.startswith("weight/"):
            torch.testing.assert_close(weight, exact[name], atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("optimizer", "stage"), [("adamw", 1), ("adam", 0)])
def test_weight_decay_leaves_the_reserved_column_alone(toy: Toy, optimizer: str, stage: int):
    task = toy.task(f"decay-{optimizer}", optimizer=optimizer, zero_stage=stage, weight_decay=0.5, max_steps=3)
    train(task)
    weights = state(task)
    first, second = (weights[f"weight/drafter.markov_head.markov_{name}.weight"][:, -1] for name in ("w1", "w2"))
    assert torch.equal(first, torch.ones_like(first))
    assert (second == 0).sum() == 128
    assert (second == -1e4).sum() == len(second) - 128


def test_eagle3_trains_on_a_conversation_that_is_supervised_from_its_first_token(toy: Toy):
    drafter = {"algorithm": "eagle3", "num_draft_layers": 1}
    task = toy.task(
        "eagle3", drafter=drafter, validation_samples=0, anchor_rule="any_prefix", num_anchors=99, max_steps=4
    )
    cache = task.open_cache()
    assert cache.spans(EVERYTHING)[0][0] == 0
    train(task)  # an epoch
    plan = step_plan(task.settings, Rows.of(cache), 4, Eagle3.first_anchor)
    packs = [planned for number in range(4) for planned in plan.step(number).micro_batches]
    (anchors,) = [
        a for planned in packs for row, a in zip(planned.rows, planned.anchors, strict=True) if row == EVERYTHING
    ]
    assert anchors.tolist() == list(range(1, int(cache.lengths[EVERYTHING]) - 1))
    assert log(task)[-1]["loss"] > 0


TERM = """
from dspark.losses.losses import LossTerm, loss_terms


@loss_terms.register("toy_variation")
class ToyVariation(LossTerm):
    reads = ("l1",)
    options = {"toy_power": 2.0}

    def value(self, slots):
        return (slots.l1 / 2) ** self.toy_power
"""


def test_a_loss_term_from_a_file_of_ones_own_is_trained(toy: Toy):
    """From the settings to a step: alone it is the loss, in the log under its name, and it moves the drafter."""
    plugin = toy.folder / "toy_variation.py"
    plugin.write_text(TERM)
    loss = {"ce": 0, "l1": 0, "confidence": 0, "toy_variation": 0.5, "toy_power": 3}
    task = toy.task("toy-term", plugins=[str(plugin)], loss=loss, max_steps=2, validation_samples=0)
    train(task)
    line = log(task)[0]
    assert line["loss"] == pytest.approx(0.5 * line["toy_variation"], rel=1e-5)
    assert 0 < line["toy_variation"] < (line["l1"] / 2) < 1
    assert log(task)[0]["gradient_norm"] > 0
    with pytest.raises(UserError, match=r"no loss term 'toy_variations'; did you mean toy_variation\?"):
        toy.task("toy-term", plugins=[str(plugin)], loss={"toy_variations": 1})


def not_finite_from(step: int) -> Callable[[], None]:
    """Losses of one sample are NaN from this step on."""

    def prepare() -> None:
        from dspark.losses.fused_loss import BlockLoss

        real = BlockLoss.forward

        def forward(self: BlockLoss, batch: Any, normalizer: float, progress: float = 1.0) -> Any:
            loss, sums = real(self, batch, normalizer, progress)
            if "toy-7" in batch.sample_ids and torch.is_grad_enabled():
                loss = loss * float("nan")
                sums = {**sums, "ce": float("nan")}
            return loss, sums

        if step == 0:
            BlockLoss.forward = forward  # type: ignore[method-assign]

    return prepare


def test_steps_that_are_not_finite_are_skipped_counted_and_at_last_named(toy: Toy):
    task = toy.task("nan", max_bad_steps=2)
    train(task, prepare=not_finite_from(0))
    lines = log(task)
    assert lines[-1]["skipped_steps"] == 2  # once an epoch
    assert [line["step"] for line in lines if line["loss"] is None] != []
    everything = toy.task("nan-always", max_bad_steps=2, global_batch_size=ROWS - 2)
    codes = wait(start(everything, prepare=not_finite_from(0)))
    assert codes == [1]
    text = Path(everything.output, "rank-0.err").read_text()
    assert "not finite in 2 steps in a row" in text
    assert "toy-7" in text
