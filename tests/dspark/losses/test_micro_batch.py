"""Packed batches hold each sample's blocks exactly, whatever they are packed with."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.losses.anchors import draw_anchors, loss_mask_of
from dspark.losses.micro_batch import MicroBatch, Teacher, make_micro_batch, plan_micro_batches, work_of
from storage.cache.shards import StoredRow


def make_sample(index: int, length: int, spans: list[tuple[int, int]], *, sparse: bool = False) -> StoredRow:
    generator = torch.Generator().manual_seed(index)
    mask = loss_mask_of(spans, length)
    positions = torch.from_numpy(np.flatnonzero(np.append(mask[1:], False)))
    states = torch.randn(len(positions), 5, generator=generator)
    teacher = Teacher(
        top_ids=torch.arange(3).repeat(len(positions), 1),
        top_values=states[:, :3].log_softmax(-1) - 0.5,
        tail_mass=torch.full((len(positions),), 1 - float(np.exp(-0.5))),
    )
    return StoredRow(
        sample_id=f"sample-{index}",
        input_ids=torch.randint(1, 50, (length,), generator=generator),
        spans=tuple(spans),
        hidden_states=torch.randn(length, 6, generator=generator),
        teacher_positions=positions,
        teacher=teacher if sparse else Teacher(last_hidden_state=states),  # type: ignore[arg-type]
    )


SAMPLES = [
    make_sample(0, 20, [(8, 20)]),
    make_sample(1, 9, [(2, 4), (6, 9)]),
    make_sample(2, 30, [(5, 14), (20, 29)]),
    make_sample(3, 12, []),
    make_sample(4, 7, [(3, 7)]),
]


def anchors_of(samples: list[StoredRow], count: int = 5) -> list[np.ndarray]:
    return [
        draw_anchors(loss_mask_of(s.spans, len(s.input_ids)), count, seed=0, epoch=0, sample_id=s.sample_id)
        for s in samples
    ]


def blocks_of(batch: MicroBatch) -> dict[tuple[str, int], dict[str, torch.Tensor]]:
    """Everything that a block may use, keyed by sample and anchor position."""
    blocks = {}
    for n in range(batch.num_blocks):
        q, at = int(batch.block_sequence[n]), int(batch.block_anchor[n])
        start = int(batch.sequence_starts[q])
        assert batch.block_starts[q] <= n < batch.block_starts[q + 1]
        assert start <= at < batch.sequence_starts[q + 1]
        on = batch.loss_mask[n]
        blocks[batch.sample_ids[q], int(batch.positions[at])] = {
            "context_ids": batch.input_ids[start:at],
            "context": batch.hidden_states[start:at],
            "positions": batch.positions[start : at + 1],
            "previous": batch.previous_ids[n],
            "labels": batch.labels[n],
            "loss_mask": on,
            "teacher": batch.teacher.last_hidden_state[batch.teacher_index[n]] * on[:, None],
        }
    return blocks


def assert_same_blocks(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for key, block in ours.items():
        for name, value in block.items():
            assert torch.equal(value, theirs[key][name]), (key, name)


@given(st.permutations(range(len(SAMPLES))), st.integers(0, len(SAMPLES)))
@settings(deadline=None)
def test_order_and_splitting_change_no_block(order: list[int], cut: int) -> None:
    anchors = anchors_of(SAMPLES)
    whole = blocks_of(make_micro_batch(SAMPLES, anchors, 7))
    parts: dict = {}
    for indices in (order[:cut], order[cut:]):
        if any(len(anchors[i]) for i in indices):
            batch = make_micro_batch([SAMPLES[i] for i in indices], [anchors[i] for i in indices], 7)
            parts |= blocks_of(batch)
    assert_same_blocks(whole, parts)


def test_blocks_restated_from_the_sample() -> None:
    anchors = anchors_of(SAMPLES)
    blocks = blocks_of(make_micro_batch(SAMPLES, anchors, 4))
    for sample, chosen in zip(SAMPLES, anchors, strict=True):
        mask = loss_mask_of(sample.spans, len(sample.input_ids))
        state_at = dict(zip(sample.teacher_positions.tolist(), sample.teacher.last_hidden_state, strict=True))
        for a in chosen.tolist():
            block = blocks.pop((sample.sample_id, a))
            assert torch.equal(block["context"], sample.hidden_states[:a])
            assert torch.equal(block["positions"], torch.arange(a + 1))
            assert block["previous"][0] == sample.input_ids[a]
            alive = True
            for k in range(4):
                alive = alive and a + k + 1 < len(mask) and bool(mask[a + k + 1])
                assert bool(block["loss_mask"][k]) == alive
                if alive:
                    assert block["labels"][k] == sample.input_ids[a + k + 1]
                    assert torch.equal(block["teacher"][k], state_at[a + k])
    assert not blocks


def test_a_batch_costs_what_it_holds() -> None:
    anchors = anchors_of(SAMPLES)
    batch = make_micro_batch(SAMPLES, anchors, 7)
    assert batch.sample_ids == ["sample-0", "sample-1", "sample-2", "sample-4"]
    assert batch.num_context_tokens == sum(int(chosen[-1]) + 1 for chosen in anchors if len(chosen))
    used = batch.teacher_index[batch.loss_mask].unique()
    assert torch.equal(used, torch.arange(len(batch.teacher)))
    assert batch.num_blocks == sum(map(len, anchors)) < 5 * len(SAMPLES)


def test_sparse_teachers_are_packed_alike() -> None:
    dense = [make_sample(i, 20, [(4, 18)]) for i in range(2)]
    sparse = [make_sample(i, 20, [(4, 18)], sparse=True) for i in range(2)]
    a, b = make_micro_batch(dense, anchors_of(dense), 7), make_micro_batch(sparse, anchors_of(sparse), 7)
    assert b.teacher.sparse
    assert torch.equal(a.teacher_index, b.teacher_index)
    expected = a.teacher.last_hidden_state[:, :3].log_softmax(-1) - 0.5  # type: ignore[union-attr]
    torch.testing.assert_close(b.teacher.top_values, expected)
    with pytest.raises(ValueError, match="one micro-batch takes one kind"):
        make_micro_batch([dense[0], sparse[1]], anchors_of(dense), 7)


def test_moving_a_batch_moves_every_tensor() -> None:
    batch = make_micro_batch(SAMPLES, anchors_of(SAMPLES), 7).to("meta")
    assert batch.hidden_states.device.type == batch.teacher.last_hidden_state.device.type == "meta"  # type: ignore[union-attr]
    assert batch.teacher_index.device.type == "meta"


def test_refusals() -> None:
    sample = make_sample(0, 20, [(4, 18)])
    other_spans = StoredRow(**{**vars(sample), "spans": ((4, 20),)})
    with pytest.raises(ValueError, match=r"sample-0.*no teacher at positions \[17"):
        make_micro_batch([other_spans], [np.array([15])], 7)
    with pytest.raises(ValueError, match="none of the samples has an anchor"):
        make_micro_batch([sample], [np.array([], dtype=np.int64)], 7)
    wide = StoredRow(**{**vars(sample), "hidden_states": torch.zeros(20, 8)})
    with pytest.raises(ValueError, match=r"widths \[6, 8\]"):
        make_micro_batch([sample, wide], [np.array([5])] * 2, 7)
    short = StoredRow(**{**vars(sample), "hidden_states": torch.zeros(19, 6)})
    with pytest.raises(ValueError, match="20 tokens but hidden states for 19"):
        make_micro_batch([short], [np.array([5])], 7)


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 20)), max_size=40),
    st.integers(1, 600),
    st.integers(1, 4),
)
@settings(deadline=None)
def test_plans_hold_each_sample_once_within_the_budget(sizes: list[tuple[int, int]], budget: int, ranks: int) -> None:
    lengths, counts = [size[0] for size in sizes], [size[1] for size in sizes]
    packs = plan_micro_batches(lengths, counts, block_size=7, max_tokens=budget, ranks=ranks)
    assert sorted(i for chosen in packs for i in chosen) == [i for i, count in enumerate(counts) if count]
    assert len(packs) % ranks == 0
    for chosen in packs:
        load = sum(work_of(lengths[i], counts[i], 7) for i in chosen)
        assert load <= budget or len(chosen) == 1
