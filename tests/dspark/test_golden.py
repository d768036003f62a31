"""Every block drafter against the numbers of the paper's reference implementation."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import BLOCK_DRAFTERS, arrays, draft_logits, packed, plain_loss
from small_models import extend_context

from dspark import load_drafter
from dspark.config import DrafterConfig
from dspark.losses.fused_loss import fused_loss
from dspark.losses.losses import LossConfig
from dspark.losses.micro_batch import MicroBatch


@pytest.mark.parametrize("name", BLOCK_DRAFTERS)
def test_training_forward(golden: Path, name: str) -> None:
    drafter = load_drafter(golden / name / "checkpoint")
    case = arrays(golden / name / "train_forward.npz")
    batch = packed(case, drafter.block_size)
    keep = torch.from_numpy(case["block_keep_mask"])
    states = drafter.block_states(batch)
    close = {"atol": 1e-4, "rtol": 0}
    expected = torch.from_numpy(case["draft_logits"])[keep]
    torch.testing.assert_close(draft_logits(drafter, states, batch.previous_ids), expected, **close)
    mask = torch.from_numpy(case["eval_mask"])[keep]
    assert torch.equal(batch.loss_mask, mask)
    assert torch.equal(batch.labels[mask], torch.from_numpy(case["target_ids"])[keep][mask])
    teacher = drafter.base_logits(batch.teacher.last_hidden_state)[batch.teacher_index]
    torch.testing.assert_close(teacher[mask], torch.from_numpy(case["target_logits"])[keep][mask], **close)
    confidence = drafter.confidence_logits(states, batch.previous_ids)
    if "confidence_logits" in case:
        torch.testing.assert_close(confidence, torch.from_numpy(case["confidence_logits"])[keep], **close)
    else:
        assert confidence is None
    alphas = (1.0, 0.0, 0.0) if name.startswith("dflash") else (0.1, 0.9, 1.0)
    loss = plain_loss(drafter, states, batch, alphas)
    assert loss.item() == pytest.approx(float(case["loss"]), rel=1e-5)
    loss.backward()
    check_gradients(drafter, case)


def check_gradients(drafter: Any, case: dict[str, Any]) -> None:
    trained = {n: p for n, p in drafter.named_parameters() if p.requires_grad}
    expected = {key.removeprefix("grad_norm/"): float(v) for key, v in case.items() if key.startswith("grad_norm/")}
    assert set(trained) == set(expected)
    for parameter, norm in expected.items():
        assert trained[parameter].grad.norm().item() == pytest.approx(norm, rel=1e-4, abs=1e-6), parameter
    for key in (key for key in case if key.startswith("grad/")):
        gradient = trained[key.removeprefix("grad/")].grad
        torch.testing.assert_close(gradient, torch.from_numpy(case[key]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", BLOCK_DRAFTERS)
@pytest.mark.parametrize("rows", [1, 3])
def test_drafting_rounds(golden: Path, name: str, rows: int) -> None:
    """Three rounds with a growing cache. With three rows, rows of other lengths stand beside the golden one."""
    drafter = load_drafter(golden / name / "checkpoint")
    case = arrays(golden / name / "draft_rounds.npz")
    sequence, hidden_states = torch.from_numpy(case["sequence"]), torch.from_numpy(case["context_features"])
    cache = drafter.new_cache(rows, capacity=8)
    middle = rows // 2
    others = [9 + 5 * row for row in range(rows)]
    for index in range(3):
        start, anchor = int(case[f"round{index}/new_context_start"]), int(case[f"round{index}/anchor_position"])
        anchors = [anchor if row == middle else others[row] + index for row in range(rows)]
        for row, end in enumerate(anchors):
            begin = int(cache.lengths[row])
            assert row != middle or begin == start
            extend_context(drafter, cache, hidden_states[:, begin:end], [end - begin], [row])
        states = drafter.draft_states(sequence[0, anchors], torch.tensor(anchors), cache)[middle : middle + 1]
        torch.testing.assert_close(states, torch.from_numpy(case[f"round{index}/block_hidden"]), atol=1e-4, rtol=0)
        previous, head_state, tokens, logits = sequence[:1, anchor], None, [], []
        if drafter.sequential_head is not None:
            head_state = drafter.sequential_head.initial_state(1)
        for slot in range(drafter.block_size):
            slot_logits = drafter.base_logits(states[:, slot])
            if drafter.sequential_head is not None:
                vectors, head_state = drafter.sequential_head.step_vector(head_state, previous, states[:, slot])
                slot_logits = slot_logits + drafter.sequential_head.bias(vectors)
            logits.append(slot_logits)
            tokens.append(previous := slot_logits.argmax(-1))
        assert torch.cat(tokens).tolist() == case[f"round{index}/tokens"].tolist()
        expected = torch.from_numpy(case[f"round{index}/logits"])
        torch.testing.assert_close(torch.stack(logits, 1), expected, atol=1e-4, rtol=0)
        before = torch.cat([sequence[:1, anchor], *tokens[:-1]])[None]
        confidence = drafter.confidence_logits(states, before)
        if confidence is not None:
            expected = torch.from_numpy(case[f"round{index}/confidence_logits"])
            torch.testing.assert_close(confidence, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [*BLOCK_DRAFTERS, "eagle3_qwen3"])
def test_config_round_trip(golden: Path, name: str) -> None:
    import json

    values = json.loads((golden / name / "checkpoint" / "config.json").read_text())
    config = DrafterConfig.from_checkpoint(values)
    written = config.to_checkpoint(values)
    assert DrafterConfig.from_checkpoint(written) == config
    assert {key: value for key, value in written.items() if key in values and values[key] != value} == {}
    # What the reference carries over of its target and a drafter does not have; `dtype` is the weights' own.
    left = {"dtype", "max_window_layers", "transformers_version", "use_cache", "vocab_size_per_layer_input"}
    assert {key for key in values.keys() - written.keys() if not key.startswith("target_")} <= left


def eagle_case(golden: Path) -> tuple[Any, Any, dict[str, Any], MicroBatch]:
    drafter = load_drafter(golden / "eagle3_qwen3" / "checkpoint")
    case = arrays(golden / "eagle3_qwen3" / "train_forward.npz")
    rows, length = case["input_ids"].shape
    # Every position t is a block with anchor t + 1.
    every = case | {
        "anchor_positions": np.tile(np.arange(1, length), (rows, 1)),
        "block_keep_mask": np.ones((rows, length - 1), dtype=bool),
    }
    return drafter, drafter.config, case, packed(every, drafter.block_size)


@pytest.mark.parametrize("recomputing", [False, True])
def test_eagle3_unrolled_steps(golden: Path, recomputing: bool) -> None:
    drafter, config, case, batch = eagle_case(golden)
    drafter.gradient_checkpointing = recomputing
    rows, length = case["input_ids"].shape
    lengths = case["attention_mask"].sum(1)
    states = drafter.block_states(batch).unflatten(0, (rows, length - 1))  # [B, t, step, d]
    logits = drafter.base_logits(states)
    teacher = drafter.base_logits(torch.from_numpy(case["target_last_hidden_states"])).softmax(-1)
    supervised = torch.from_numpy(case["loss_mask"]).bool()
    total = torch.zeros(())
    for step in range(config.block_size):
        valid = length - 1 - step  # positions whose token at t + step + 1 exists
        expected = torch.from_numpy(case[f"step{step}/draft_logits"])
        for row, real in enumerate(lengths - 1 - step):
            torch.testing.assert_close(logits[row, :real, step], expected[row, :real], atol=1e-4, rtol=0)
        # The last valid position has no target: the teacher of the token at t + step + 2 is at t + step + 1.
        # The reference asks whether t + step is supervised; a pack asks it of the predicted token.
        counted = supervised[:, step : step + valid - 1]
        target = teacher[:, step + 1 : -1]
        cross_entropy = -(target * logits[:, : valid - 1, step].log_softmax(-1)).sum(-1)
        loss = (cross_entropy * counted).sum() / (rows * length)
        assert loss.item() == pytest.approx(float(case[f"metric/ploss_{step}"]), rel=1e-5)
        total = total + math.exp(-step / config.position_decay) * loss
    assert total.item() == pytest.approx(float(case["loss"]), rel=1e-5)
    total.backward()
    check_gradients(drafter, case)


def test_eagle3_trains_on_the_references_loss(golden: Path) -> None:
    """The fused loss on packed blocks, with the steps' weights as slot weights."""
    drafter, config, case, _ = eagle_case(golden)
    rows, length = case["input_ids"].shape
    everything = {"loss_mask": np.ones_like(case["loss_mask"]), "block_keep_mask": np.ones((rows, length - 1), bool)}
    everything["anchor_positions"] = np.tile(np.arange(1, length), (rows, 1))
    batch = packed(case | everything, config.block_size)
    # The reference asks whether t + step is supervised, a pack whether the predicted token at t + step + 2 is.
    asked = torch.from_numpy(case["loss_mask"])
    at = (batch.positions[batch.block_anchor] - 1)[:, None] + torch.arange(config.block_size)
    counted = asked.bool()[batch.block_sequence[:, None], at.clamp(max=length - 1)] & batch.loss_mask
    terms = LossConfig(ce=0, l1=0, confidence=0, soft_ce=1, position_decay=config.position_decay)
    batch = replace(batch, loss_mask=counted)
    result = fused_loss(drafter, drafter.block_states(batch), batch, terms, normalizer=rows * length)
    assert result.loss.item() == pytest.approx(float(case["loss"]), rel=1e-5)
    result.loss.backward()
    check_gradients(drafter, case)


@pytest.mark.parametrize("rows", [1, 3])
def test_eagle3_drafting_rounds(golden: Path, rows: int) -> None:
    drafter = load_drafter(golden / "eagle3_qwen3" / "checkpoint")
    case = arrays(golden / "eagle3_qwen3" / "draft_rounds.npz")
    sequence, hidden_states = torch.from_numpy(case["sequence"]), torch.from_numpy(case["context_features"])
    cache, middle = drafter.new_cache(rows, capacity=8), rows // 2
    for index in range(2):
        anchor = int(case[f"round{index}/anchor_position"])
        anchors = [anchor if row == middle else 9 + 5 * row + index for row in range(rows)]
        for row, end in enumerate(anchors):
            begin = int(cache.lengths[row])
            new = slice(begin, end)
            next_ids = sequence[:, begin + 1 : end + 1]
            extend_context(drafter, cache, hidden_states[:, new], [end - begin], [row], next_ids=next_ids)
        block = drafter.begin_block(sequence[0, anchors], torch.tensor(anchors), cache)
        tokens, logits = [], []
        for slot in range(drafter.block_size):
            logits.append(drafter.base_logits(block.state)[middle])
            every = drafter.base_logits(block.state).argmax(-1)
            tokens.append(int(every[middle]))
            if slot + 1 < drafter.block_size:
                block.feed(every)
        assert tokens == case[f"round{index}/tokens"].tolist()
        torch.testing.assert_close(
            torch.stack(logits)[None], torch.from_numpy(case[f"round{index}/logits"]), atol=1e-4, rtol=0
        )
