"""What is trained: groups of parameters for a layer-wise learning rate, and the two ways to trade time for memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy_training import Toy

from dspark.losses.fused_loss import BlockLoss
from dspark.losses.losses import LossConfig
from pipelines.training.loader import MicroBatchReader, Rows
from pipelines.training.model import make_drafter, parameter_groups, speed_up
from pipelines.training.task import TrainingTask, step_plan

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"))


def module_of(task: TrainingTask) -> BlockLoss:
    module = BlockLoss(make_drafter(task, task.open_cache()), LossConfig())
    speed_up(module.drafter, task.settings.train)
    module.take_head()
    return module


def loss_and_gradients(task: TrainingTask) -> tuple[float, dict[str, torch.Tensor]]:
    module, cache = module_of(task), task.open_cache()
    plan = step_plan(task.settings, Rows.of(cache), 1)
    planned = next(planned for planned in plan.step(0).micro_batches if planned.rows)
    loss, _ = module(MicroBatchReader(dtype=torch.float32, block_size=plan.block_size)(cache, planned), 10.0)
    loss.backward()
    names = dict(module.named_parameters())
    return loss.item(), {name: p.grad for name, p in names.items() if p.grad is not None}


def test_learning_rates_fall_from_the_heads_to_the_projection(toy: Toy):
    module = module_of(toy.task("groups"))
    groups = parameter_groups(module, 0.5)
    scale_of = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    scales = {name: scale_of[id(p)] for name, p in module.drafter.named_parameters()}
    assert len(scales) == sum(len(group["params"]) for group in groups)
    assert scales["markov_head.markov_w2.weight"] == scales["norm.weight"] == 1.0
    assert scales["confidence_head.proj.weight"] == 1.0
    assert scales["layers.1.mlp.up_proj.weight"] == 0.5
    assert scales["layers.0.self_attn.q_proj.weight"] == 0.25
    assert scales["fc.weight"] == scales["hidden_norm.weight"] == 0.125
    assert {group["lr_scale"] for group in parameter_groups(module, 1.0)} == {1.0}


def test_what_no_gradient_reaches_takes_no_weight_decay(toy: Toy):
    def still(loss: LossConfig, **drafter: Any) -> set[str]:
        task = toy.task("still", drafter=drafter)
        module = BlockLoss(make_drafter(task, task.open_cache()), loss)
        names = {id(parameter): name for name, parameter in module.drafter.named_parameters()}
        groups = parameter_groups(module, 0.5)
        return {names[id(p)] for group in groups if group.get("weight_decay") == 0 for p in group["params"]}

    markov = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    confidence = {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert still(LossConfig()) == markov
    assert still(LossConfig(confidence=0.0)) == markov | confidence
    assert still(LossConfig(), draft_vocab_size=None) == set()


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"gradient_checkpointing": True}, {"torch_compile": True}])
def test_neither_recomputing_nor_compiling_changes_loss_and_gradients(toy: Toy, change: dict[str, Any]):
    loss, gradients = loss_and_gradients(toy.task("plain"))
    other, others = loss_and_gradients(toy.task("changed", **change))
    assert other == pytest.approx(loss, abs=1e-6)
    assert others.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, atol=1e-5, rtol=1e-4)


def test_recomputing_keeps_less(toy: Toy):
    """Bytes that autograd keeps for the backward pass of the layers, as it is told of each tensor."""

    def kept(task: TrainingTask) -> int:
        sizes: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        module, cache = module_of(task), task.open_cache()
        plan = step_plan(task.settings, Rows.of(cache), 1)
        planned = next(planned for planned in plan.step(0).micro_batches if planned.rows)
        batch = MicroBatchReader(dtype=torch.float32, block_size=plan.block_size)(cache, planned)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            states = module.drafter.block_states(batch)
        weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        assert states.requires_grad
        return sum(size for place, size in sizes.items() if place not in weights)

    assert kept(toy.task("recomputing", gradient_checkpointing=True)) < kept(toy.task("keeping")) / 3
