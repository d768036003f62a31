"""Trainings that cannot work are told apart from those that can, from made-up states whose teacher is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.decoding.target import Target
from dspark.losses.anchors import draw_anchors, loss_mask_of
from dspark.losses.micro_batch import MicroBatch, Teacher, make_micro_batch
from dspark.losses.output_head import OutputHead
from dspark.losses.teacher_check import constant_acceptance, with_own_teacher
from pipelines.training.loader import Rows, StepPlan
from pipelines.training.sanity_checks import SanityChecks, check_masks, check_teacher
from storage.cache.shards import StoredRow

VOCABULARY, HIDDEN, LENGTH, BLOCK = 61, 16, 40, 4
SPAN = (8, LENGTH)


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    return torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(0))


def batch_of(weight: torch.Tensor, *, shift: int = 0, seed: int = 1, sparse: bool = False) -> MicroBatch:
    """One conversation; the state at p speaks of the token at p + 1 + shift, of the text of `seed`."""
    tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(1))
    spoken = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(SPAN[0] - 1, SPAN[1] - 1)
    states = weight[spoken[(positions + 1 + shift).clamp(max=LENGTH - 1)]]
    teacher = Teacher(last_hidden_state=states)
    if sparse:
        top = (states @ weight.T).log_softmax(-1).topk(9)
        tail = 1 - top.values.exp().sum(-1)
        teacher = Teacher(top_ids=top.indices, top_values=top.values, tail_mass=tail)
    sample = StoredRow(
        sample_id="one",
        input_ids=tokens,
        spans=(SPAN,),
        hidden_states=torch.zeros(LENGTH, 1),
        teacher_positions=positions,
        teacher=teacher,
    )
    return make_micro_batch(
        [sample], [draw_anchors(loss_mask_of([SPAN], LENGTH), 99, seed=0, epoch=0, sample_id="one")], BLOCK
    )


@pytest.mark.parametrize("sparse", [False, True])
def test_a_teacher_of_the_text_passes(weight: torch.Tensor, sparse: bool):
    assert check_teacher(batch_of(weight, sparse=sparse), OutputHead.create(weight)) == []


@pytest.mark.parametrize(("shift", "place"), [(-1, "before"), (1, "after")])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_teacher_one_position_off_is_refused(weight: torch.Tensor, shift: int, place: str, sparse: bool):
    with pytest.raises(ValueError, match=f"the token {place} .*out of step by a position"):
        check_teacher(batch_of(weight, shift=shift, sparse=sparse), OutputHead.create(weight))


def test_an_untrained_target_that_repeats_what_it_reads_is_no_fault():
    """Tied and random, it gives the token just read the most: so does a teacher of the position before."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2))
    target = Target(model, target_layer_ids=(0,), name="tied")
    ids = torch.randint(0, 97, (1, LENGTH), generator=torch.Generator().manual_seed(5))
    last = target.capture(ids).last_hidden_state[0]
    head = OutputHead.create(target.lm_head.weight)

    def batch(shift: int) -> MicroBatch:
        positions = torch.arange(SPAN[0] - 1, SPAN[1] - 1)
        sample = StoredRow(
            sample_id="one",
            input_ids=ids[0],
            spans=(SPAN,),
            hidden_states=torch.zeros(LENGTH, 1),
            teacher_positions=positions,
            teacher=Teacher(last_hidden_state=last[(positions + shift).clamp(max=LENGTH - 1)]),
        )
        return make_micro_batch([sample], [np.arange(SPAN[0], SPAN[1] - 1)], BLOCK)

    with pytest.raises(ValueError, match="the token before"):
        check_teacher(batch(0), head)
    assert check_teacher(batch(0), head, lambda found: with_own_teacher(found, target)) == []
    with pytest.raises(ValueError, match="the token after"):  # the target itself does not do that
        check_teacher(batch(2), head, lambda found: with_own_teacher(found, target))


def test_a_teacher_of_another_text_is_told(weight: torch.Tensor):
    (warning,) = check_teacher(batch_of(weight, seed=2), OutputHead.create(weight))
    assert "was it built for this text and target" in warning


def plan_of(*spans: tuple[tuple[int, int], ...]) -> StepPlan:
    count = len(spans)
    rows = Rows(
        sample_ids=tuple(map(str, range(count))),
        lengths=(LENGTH,) * count,
        spans=spans,
        numbers=tuple(range(count)),
        shards=(0,) * count,
    )
    return StepPlan(
        rows=rows,
        seed=0,
        global_batch_size=2,
        num_anchors=4,
        anchor_rule="paper",
        block_size=BLOCK,
        position_decay=4.0,
        max_tokens_per_micro_batch=100,
        total_steps=1,
    )


def test_masks_that_leave_everything_out_are_refused_and_many_are_told():
    with pytest.raises(ValueError, match="none of the 3 conversations"):
        check_masks(plan_of((), (), ((5, 6),)))  # a single supervised token gives no anchor
    (warning,) = check_masks(plan_of((), (), (SPAN,)))
    assert "only 1 of 3" in warning
    assert check_masks(plan_of((), (SPAN,), (SPAN,))) == []


def test_a_constant_drafter_is_accepted_as_a_plain_loop_says(weight: torch.Tensor):
    batch = batch_of(weight)
    assert batch.teacher.last_hidden_state is not None
    probs = (batch.teacher.last_hidden_state[batch.teacher_index[:, 0]] @ weight.T).softmax(-1)
    for drafted in (None, torch.arange(0, VOCABULARY, 2)):
        inside = probs if drafted is None else probs[:, drafted]
        draft = inside.mean(0) / inside.mean(0).sum()
        rows = [sum(min(float(p), float(q)) for p, q in zip(row, draft, strict=True)) for row in inside]
        found = constant_acceptance(batch, OutputHead.create(weight, draft_token_ids=drafted))
        assert found == pytest.approx(sum(rows) / len(rows), abs=1e-5)


def signs_of(weight: torch.Tensor, *, warmup_steps: int) -> SanityChecks:
    batch, head = batch_of(weight), OutputHead.create(weight)
    return SanityChecks(plan_of((SPAN,)), batch, head, warmup_steps=warmup_steps, first=0, first_line=10)


def test_slot_zero_below_a_constant_is_told_once_after_the_first_steps(weight: torch.Tensor):
    signs = signs_of(weight, warmup_steps=40)
    low, high = signs.baseline / 2, signs.baseline + 0.1
    assert signs.at(60, low) == []  # still within twice the warm-up
    (warning,) = signs.at(80, low)
    assert f"a rate of {low:.3f}" in warning
    assert signs.at(90, low) == []
    fine = signs_of(weight, warmup_steps=4)
    assert fine.at(80, high) == fine.at(90, low) == []
