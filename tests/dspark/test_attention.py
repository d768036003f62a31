"""Three implementations of one mask, and the mask against its definition in words."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.models import kernels
from dspark.models.kernels import BlockAttention

Shapes = tuple[list[int], list[list[int]]]


def layout_of(lengths: list[int], anchors: list[list[int]], **options: Any) -> BlockAttention:
    starts = torch.tensor([0, *lengths]).cumsum(0)
    counts = torch.tensor([len(chosen) for chosen in anchors])
    flat = [start + anchor for start, chosen in zip(starts.tolist(), anchors, strict=False) for anchor in chosen]
    return BlockAttention(
        sequence_starts=starts,
        block_starts=torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]),
        block_sequence=torch.arange(len(lengths)).repeat_interleave(counts),
        block_anchor=torch.tensor(flat, dtype=torch.long),
        **options,
    )


@st.composite
def packs(draw: st.DrawFn) -> Shapes:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    anchors = [draw(st.lists(st.integers(0, n - 1), max_size=5, unique=True).map(sorted)) for n in lengths]
    anchors[0] = anchors[0] or [0]
    return lengths, anchors


@given(packs(), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_the_mask_says_what_the_words_say(shapes: Shapes, slots: int, own: int) -> None:
    lengths, anchors = shapes
    mask = layout_of(lengths, anchors, slots=slots, own_keys=own).dense_mask()
    blocks = [(sequence, anchor) for sequence, chosen in enumerate(anchors) for anchor in chosen]
    tokens = [(sequence, position) for sequence, length in enumerate(lengths) for position in range(length)]
    for query in range(len(blocks) * slots):
        sequence, anchor = blocks[query // slots]
        expected = [owner == sequence and position < anchor for owner, position in tokens]
        expected += [key // own == query // slots for key in range(len(blocks) * own)]
        assert mask[query].tolist() == expected


def inputs(layout: BlockAttention, heads: int = 6, key_heads: int = 2, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks, tokens = len(layout.block_anchor), int(layout.sequence_starts[-1])
    own = layout.own_keys or layout.slots
    shapes = [
        (blocks, layout.slots, heads, size),
        *[(tokens, key_heads, size)] * 2,
        *[(blocks, own, key_heads, size)] * 2,
    ]
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def run(layout: BlockAttention, tensors: list[Tensor]) -> list[Tensor]:
    q, context_k, context_v, k, v = tensors
    out = layout.attend(q, (context_k, context_v), k, v, 0.3)
    weight = torch.arange(out.numel(), dtype=out.dtype).view_as(out).sin()
    return [out, *torch.autograd.grad((out * weight).sum(), tensors)]


@pytest.mark.parametrize(("slots", "own"), [(4, None), (1, 3), (1, 1), (5, 2)])
@pytest.mark.parametrize("at_once", [1, 8, 1000])
def test_two_part_equals_dense(monkeypatch: pytest.MonkeyPatch, slots: int, own: int | None, at_once: int) -> None:
    monkeypatch.setattr(kernels, "_SLOTS_A_CHUNK", at_once)
    # A sequence without blocks, a block without context, one sequence of a single token.
    lengths, anchors = [12, 5, 1, 9], [[0, 3, 4, 11], [], [0], [2, 7]]
    results = []
    for implementation in ("sdpa", "two-part"):
        layout = layout_of(lengths, anchors, slots=slots, own_keys=own, implementation=implementation)
        results.append(run(layout, inputs(layout)))
    for dense, two_part in zip(*results, strict=True):
        torch.testing.assert_close(two_part, dense, atol=1e-12, rtol=1e-10)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_equals_dense() -> None:
    """The description that the GPU path compiles, run without compiling; there is no backward on a CPU."""
    lengths, anchors = [12, 9], [[0, 3, 4, 11], [2, 7]]
    outputs = []
    for implementation in ("sdpa", "flex"):
        layout = layout_of(lengths, anchors, slots=4, implementation=implementation)
        q, context_k, context_v, k, v = (tensor.detach().float() for tensor in inputs(layout))
        outputs.append(layout.attend(q, (context_k, context_v), k, v, 0.3))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)


def test_large_scores_stay_finite() -> None:
    layout = layout_of([6], [[2, 5]], slots=3)
    tensors = [tensor.detach().mul(300).requires_grad_() for tensor in inputs(layout)]
    assert all(torch.isfinite(tensor).all() for tensor in run(layout, tensors))
