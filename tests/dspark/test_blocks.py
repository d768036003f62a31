"""What reaches a block and what doesn't, for every drafter, in packs and in drafting."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import config_for, extend_context, tiny_target
from torch import Tensor

from dspark.config import SettingError
from dspark.losses.micro_batch import MicroBatch, Teacher, make_micro_batch
from dspark.models.checkpoint import load_drafter, save_drafter
from dspark.models.starting_weights import build_drafter
from storage.cache.shards import StoredRow

DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "vanilla": ("llama", {}),
    "gated": ("qwen3", {"markov_head_type": "gated"}),
    "rnn": ("llama", {"markov_head_type": "rnn"}),
    "dflash": ("llama", {"algorithm": "dflash"}),
    "dflash-mask-first": ("qwen3", {"algorithm": "dflash", "block_layout": "mask-first"}),
    "context-residual": ("llama", {"context_residual": True}),
    "context-residual-mask-first": (
        "qwen3",
        {"algorithm": "dflash", "block_layout": "mask-first", "context_residual": True},
    ),
    "context-residual-gemma4": ("gemma4", {"context_residual": True}),
    "one-slot": ("llama", {"block_size": 1}),
    "gemma4": ("gemma4", {}),
    "eagle3": ("llama", {"algorithm": "eagle3", "num_draft_layers": 1, "block_size": 4}),
    "mtp": ("llama", {"algorithm": "mtp", "num_draft_layers": 1, "block_size": 4, "target_layer_ids": (6,)}),
}
UNROLLED = ("eagle3", "mtp")
LENGTHS, ANCHORS = (19, 8, 15), ([3, 4, 9, 16], [1, 6], [2, 13])


def drafter_of(name: str) -> Any:
    kind, overrides = DRAFTERS[name]
    target = tiny_target(kind)
    drafter = build_drafter(config_for(target, **overrides), target, start="random", seed=1)
    torch.manual_seed(2)
    for parameter in drafter.parameters():
        if parameter.requires_grad:
            # Strong enough that a leak would show.
            torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
    return drafter.eval()


def sample(index: int, length: int, width: int = 96) -> StoredRow:
    generator = torch.Generator().manual_seed(index)
    return StoredRow(
        sample_id=str(index),
        input_ids=torch.randint(0, 97, (length,), generator=generator),
        spans=((1, length),),
        hidden_states=torch.randn(length, width, generator=generator),
        teacher_positions=torch.arange(length),
        teacher=Teacher(last_hidden_state=torch.randn(length, 32, generator=generator)),
    )


def batch_of(drafter: Any, which: tuple[int, ...] = (0, 1, 2)) -> MicroBatch:
    samples = [sample(index, LENGTHS[index], drafter.config.hidden_states_size) for index in which]
    return make_micro_batch(samples, [torch.tensor(ANCHORS[index]).numpy() for index in which], drafter.block_size)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_nothing_from_the_anchor_on_reaches_a_block(name: str) -> None:
    drafter = drafter_of(name)
    batch = batch_of(drafter)
    states = drafter.block_states(batch)
    for block, anchor in enumerate(batch.block_anchor.tolist()):
        sequence = int(batch.block_sequence[block])
        end = int(batch.sequence_starts[sequence + 1])
        hidden_states = batch.hidden_states.clone()
        hidden_states[anchor:end] += 100 * torch.randn_like(hidden_states[anchor:end])
        close(drafter.block_states(replace(batch, hidden_states=hidden_states))[block], states[block])
        hidden_states = batch.hidden_states.clone()
        hidden_states[anchor - 1] += 1
        assert not torch.allclose(
            drafter.block_states(replace(batch, hidden_states=hidden_states))[block], states[block]
        )


@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_no_sequence_reaches_another(name: str) -> None:
    drafter = drafter_of(name)
    batch = batch_of(drafter)
    states = drafter.block_states(batch)
    for sequence in range(len(LENGTHS)):
        start, end = (int(at) for at in batch.sequence_starts[sequence : sequence + 2])
        hidden_states = 100 * torch.randn_like(batch.hidden_states)
        ids, previous = torch.randint_like(batch.input_ids, 97), torch.randint_like(batch.previous_ids, 97)
        own = batch.block_sequence == sequence
        hidden_states[start:end], ids[start:end] = batch.hidden_states[start:end], batch.input_ids[start:end]
        previous[own] = batch.previous_ids[own]
        changed = replace(batch, hidden_states=hidden_states, input_ids=ids, previous_ids=previous)
        close(drafter.block_states(changed)[own], states[own])
        alone = drafter.block_states(batch_of(drafter, (sequence,)))
        close(alone, states[own])


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name not in UNROLLED])
@torch.no_grad()
def test_true_tokens_after_the_anchor_reach_no_block_state(name: str) -> None:
    drafter = drafter_of(name)
    batch = batch_of(drafter)
    previous = batch.previous_ids.clone()
    previous[:, 1:] = 5
    close(drafter.block_states(replace(batch, previous_ids=previous)), drafter.block_states(batch))


@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_a_slot_depends_on_true_tokens_before_it_alone(name: str) -> None:
    drafter = drafter_of(name)
    batch = batch_of(drafter)

    def outputs(previous: Tensor) -> list[Tensor]:
        changed = replace(batch, previous_ids=previous)
        states = drafter.block_states(changed)
        logits = drafter.base_logits(states)
        if drafter.sequential_head is not None:
            logits = logits + drafter.sequential_head.bias(drafter.sequential_head.bias_vectors(states, previous))
        confidence = drafter.confidence_logits(states, previous)
        return [logits] if confidence is None else [logits, confidence]

    before = outputs(batch.previous_ids)
    for slot in range(1, drafter.block_size):
        previous = batch.previous_ids.clone()
        previous[:, slot:] = (previous[:, slot:] + 1) % 97
        for ours, theirs in zip(outputs(previous), before, strict=True):
            close(ours[:, :slot], theirs[:, :slot])


@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_drafting_gives_the_states_of_training(name: str) -> None:
    """Blocks of a pack, drafted one round after another from a growing cache, rows of unequal length side by side."""
    drafter = drafter_of(name)
    batch = batch_of(drafter)
    expected = [drafter.block_states(batch_of(drafter, (row,))) for row in range(3)]
    cache = drafter.new_cache(4, capacity=4)
    for step in range(4):
        rows = [row for row in range(3) if step < len(ANCHORS[row])]
        anchors = [ANCHORS[row][step] for row in rows]
        for row, anchor in zip(rows, anchors, strict=True):
            one, begin = sample(row, LENGTHS[row], drafter.config.hidden_states_size), int(cache.lengths[row])
            new, next_ids = one.hidden_states[None, begin:anchor], one.input_ids[None, begin + 1 : anchor + 1]
            extend_context(drafter, cache, new, [anchor - begin], [row], next_ids=next_ids)
        if rows != list(range(len(rows))):
            for to, row in enumerate(rows):
                cache.move_row(row, to)
        width = drafter.config.hidden_states_size
        texts = [sample(row, LENGTHS[row], width).input_ids for row in rows]
        ids = torch.stack([text[at] for text, at in zip(texts, anchors, strict=True)])
        previous = torch.stack([batch_of(drafter, (row,)).previous_ids[step] for row in rows])
        with torch.inference_mode():
            if name in UNROLLED:
                block = drafter.begin_block(ids, torch.tensor(anchors), cache)
                steps = [block.state]
                steps += [block.feed(previous[:, slot]) for slot in range(1, drafter.block_size)]
                states = torch.stack(steps, dim=1)
            else:
                states = drafter.draft_states(ids, torch.tensor(anchors), cache)
        close(states, torch.stack([expected[row][step] for row in rows]))
        if rows != list(range(len(rows))):
            break  # rows have moved; one such round is what this is about
    assert len(batch.block_anchor) == 8


def test_a_moved_row_drafts_the_same() -> None:
    drafter = drafter_of("vanilla")
    cache = drafter.new_cache(2, capacity=4)
    hidden_states = torch.randn(2, 9, 96)
    extend_context(drafter, cache, hidden_states, [9, 5], [0, 1])
    anchors, positions = torch.tensor([7, 8]), torch.tensor([9, 5])
    both = drafter.draft_states(anchors, positions, cache)
    cache.move_row(1, 0)
    assert cache.lengths.tolist() == [5, 5]
    close(drafter.draft_states(anchors[1:], positions[1:], cache), both[1:])
    cache.lengths[0] = 0
    extend_context(drafter, cache, hidden_states[:1], [9], [0])
    close(drafter.draft_states(anchors[:1], positions[:1], cache), both[:1])


@torch.no_grad()
def test_a_mask_first_block_has_one_more_input_slot() -> None:
    """It is the anchor-first block one slot longer, with the anchor's own output dropped."""
    drafter = drafter_of("dflash-mask-first")
    assert drafter.config.input_slots == drafter.block_size + 1
    batch = batch_of(drafter)
    longer = replace(drafter.config, block_layout="anchor-first", block_size=drafter.block_size + 1)
    twin = type(drafter)(longer)
    twin.load_state_dict(drafter.state_dict())
    wide = make_micro_batch(
        [sample(index, LENGTHS[index]) for index in range(3)],
        [torch.tensor(chosen).numpy() for chosen in ANCHORS],
        longer.block_size,
    )
    close(drafter.block_states(batch), twin.block_states(wide)[:, 1:])


@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_saved_and_loaded(name: str, tmp_path: Any) -> None:
    drafter = drafter_of(name)
    target = tiny_target(DRAFTERS[name][0])
    save_drafter(drafter, tmp_path, target.text_config)
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode
    again = load_drafter(tmp_path)
    assert again.config == drafter.config
    assert {p for p, q in again.named_parameters() if q.requires_grad} == {
        p for p, q in drafter.named_parameters() if q.requires_grad
    }
    batch = batch_of(drafter)
    assert torch.equal(again.block_states(batch), drafter.block_states(batch))


def test_features_of_another_width_are_refused() -> None:
    for name in ("vanilla", "eagle3"):
        drafter = drafter_of(name)
        batch = batch_of(drafter)
        with pytest.raises(SettingError, match=r"64 wide.*3 layers of hidden size 32, 96.*target_layer_ids"):
            drafter.block_states(replace(batch, hidden_states=batch.hidden_states[:, :64]))


def test_eagle3_needs_a_token_before_the_anchor() -> None:
    drafter = drafter_of("eagle3")
    first = make_micro_batch([sample(0, 19)], [torch.tensor([0, 3]).numpy()], drafter.block_size)
    with pytest.raises(ValueError, match="first token cannot be an anchor"):
        drafter.block_states(first)
