"""Attention of packed draft blocks, from one description of who sees whom.

T context tokens of Q sequences, N blocks of G slots and G' own keys (as many, except in EAGLE-3's unrolled steps),
H heads, K key heads, D head size. A slot sees the context tokens of its own sequence strictly before its block's
anchor, and every slot of its own block, both ways.
`BlockAttention.allows` states exactly that; the three implementations are flex attention (GPU), a two-part product
that never computes a masked block-to-block score (CPU), and dense SDPA (the plain statement, for comparison).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Implementation = Literal["auto", "flex", "two-part", "sdpa"]

# Slots of one product in the two-part path: the context of its blocks is cut at the last of their anchors.
_SLOTS_A_CHUNK = 112


@dataclass(frozen=True)
class _Chunk:
    """Blocks [first, last) of one sequence, over its context tokens [start, stop)."""

    first: int
    last: int
    start: int
    stop: int
    hidden: Tensor | None  # [n, 1, L] True where a block may not look; None when every block sees all


@dataclass(frozen=True)
class BlockAttention:
    """Where every context token and block of a pack belongs. Indices are into the packed T tokens."""

    sequence_starts: Tensor  # [Q+1] i64
    block_starts: Tensor  # [Q+1] i64, blocks are grouped by sequence
    block_sequence: Tensor  # [N] i64
    block_anchor: Tensor  # [N] i64, index of the anchor token
    slots: int  # G, queries of a block
    own_keys: int | None = None  # keys of a block, all visible to its queries; None for as many as queries
    implementation: Implementation = "auto"
    _flex_mask: list[Any] = field(default_factory=list, repr=False)

    @cached_property
    def index_arrays(self) -> dict[str, Tensor]:
        """The mask as per-index arrays: queries are the N*G slots, keys the T context tokens, then the blocks' own."""
        device, blocks = self.block_anchor.device, len(self.block_anchor)
        tokens = int(self.sequence_starts[-1])
        lengths = self.sequence_starts.diff()
        token_sequence = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
        query_block = torch.arange(blocks, device=device).repeat_interleave(self.slots)
        own_block = torch.arange(blocks, device=device).repeat_interleave(self.own_keys or self.slots)
        return {
            "query_sequence": self.block_sequence[query_block],
            "query_block": query_block,
            "query_anchor": self.block_anchor[query_block],
            "key_sequence": torch.cat([token_sequence, self.block_sequence[own_block]]),
            "key_block": torch.cat([torch.full((tokens,), -1, device=device), own_block]),
            "key_token": torch.cat([torch.arange(tokens, device=device), torch.full_like(own_block, tokens)]),
        }

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether slot `query` sees key `key` (broadcast indices): the one statement of the mask."""
        a = self.index_arrays
        before_anchor = (a["key_block"][key] < 0) & (a["key_token"][key] < a["query_anchor"][query])
        own_block = a["key_block"][key] == a["query_block"][query]
        return (a["query_sequence"][query] == a["key_sequence"][key]) & (before_anchor | own_block)

    def dense_mask(self) -> Tensor:
        """[N*G, T + N*G'] bool."""
        a, device = self.index_arrays, self.block_anchor.device
        queries = torch.arange(len(a["query_block"]), device=device)
        keys = torch.arange(len(a["key_block"]), device=device)
        return self.allows(queries[:, None], keys[None, :])

    @cached_property
    def chunks(self) -> list[_Chunk]:
        """The work list of the two-part path."""
        starts, blocks = self.sequence_starts.tolist(), self.block_starts.tolist()
        anchors = self.block_anchor.tolist()
        found, at_once = [], max(1, _SLOTS_A_CHUNK // self.slots)
        for sequence, start in enumerate(starts[:-1]):
            for first in range(blocks[sequence], blocks[sequence + 1], at_once):
                last = min(first + at_once, blocks[sequence + 1])
                stop = max(anchors[first:last])
                hidden = None
                if min(anchors[first:last]) < stop:
                    tokens = torch.arange(start, stop, device=self.block_anchor.device)
                    hidden = (tokens >= self.block_anchor[first:last, None])[:, None, :]
                found.append(_Chunk(first, last, start, stop, hidden))
        return found

    def attend(self, q: Tensor, context_kv: tuple[Tensor, Tensor], k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention output [N, G, H, D] of slot queries q [N, G, H, D].

        context_kv are keys and values [T, K, D] of the context; k, v [N, G', K, D] those of the block itself.
        """
        chosen = self.implementation
        if chosen == "auto":
            chosen = "flex" if q.is_cuda else "two-part"
        if chosen == "two-part":
            return _TwoPart.apply(q, *context_kv, k, v, scale, self)
        shape = q.shape
        q = q.flatten(0, 1).transpose(0, 1)[None]  # [1, H, N*G, D]
        keys, values = (
            torch.cat([context, own.flatten(0, 1)]).transpose(0, 1)[None]
            for context, own in zip(context_kv, (k, v), strict=True)
        )
        if chosen == "flex":
            out = self._flex(q, keys, values, scale)
        else:
            out = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=self.dense_mask(), scale=scale, enable_gqa=q.shape[1] != keys.shape[1]
            )
        return out[0].transpose(0, 1).reshape(shape)

    def _flex(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if not self._flex_mask:
            self._flex_mask.append(
                create_block_mask(
                    lambda _batch, _head, query, key: self.allows(query, key),
                    B=None,
                    H=None,
                    Q_LEN=q.shape[2],
                    KV_LEN=keys.shape[2],
                    device=q.device,
                )
            )
        run = _compiled_flex() if q.is_cuda else flex_attention
        gqa = q.shape[1] != keys.shape[1]
        return run(q, keys, values, block_mask=self._flex_mask[0], scale=scale, enable_gqa=gqa)


_COMPILED: list[Any] = []


def _compiled_flex() -> Any:
    if not _COMPILED:
        from torch.nn.attention.flex_attention import flex_attention

        _COMPILED.append(torch.compile(flex_attention, dynamic=True))
    return _COMPILED[0]


class _TwoPart(torch.autograd.Function):
    """Scores against the context and against the own block, one softmax over both; probabilities are recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        context_k: Tensor,
        context_v: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        layout: BlockAttention,
    ) -> Tensor:
        blocks, slots, heads, size = q.shape
        key_heads = k.shape[2]
        group = heads // key_heads
        # [K, N, group*G, D]: one product a key head takes all its query heads, slots and blocks at once.
        q_rows = (
            (q * scale)
            .view(blocks, slots, key_heads, group, size)
            .permute(2, 0, 3, 1, 4)
            .reshape(key_heads, blocks, group * slots, size)
        )
        ck, cv = (tensor.transpose(0, 1).contiguous() for tensor in (context_k, context_v))  # [K, T, D]
        own_k, own_v = (tensor.permute(2, 0, 1, 3).contiguous() for tensor in (k, v))  # [K, N, G', D]
        out = torch.empty_like(q_rows)
        for chunk in layout.chunks:
            far, near = _probabilities(q_rows, ck, own_k, chunk)
            rows = slice(chunk.first, chunk.last)
            part = near @ own_v[:, rows]
            if chunk.stop > chunk.start:
                part += (far.flatten(1, 2) @ cv[:, chunk.start : chunk.stop]).view_as(part)
            out[:, rows] = part
        ctx.save_for_backward(q_rows, ck, cv, own_k, own_v, out)
        ctx.layout, ctx.scale, ctx.shape = layout, scale, q.shape
        return _from_rows(out, q.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q_rows, ck, cv, own_k, own_v, out = ctx.saved_tensors
        blocks, slots, heads, size = ctx.shape
        key_heads = own_k.shape[0]
        g_rows = (
            grad.reshape(blocks, slots, key_heads, heads // key_heads, size)
            .permute(2, 0, 3, 1, 4)
            .reshape(q_rows.shape)
        )
        delta = (g_rows * out).sum(-1, keepdim=True)  # [K, N, group*G, 1]
        dq, dk, dv = torch.empty_like(q_rows), torch.empty_like(own_k), torch.empty_like(own_v)
        dck, dcv = torch.zeros_like(ck), torch.zeros_like(cv)
        for chunk in ctx.layout.chunks:
            rows, tokens = slice(chunk.first, chunk.last), slice(chunk.start, chunk.stop)
            far, near = _probabilities(q_rows, ck, own_k, chunk)
            g, queries = g_rows[:, rows], q_rows[:, rows]
            dv[:, rows] = near.transpose(-1, -2) @ g
            d_near = (g @ own_v[:, rows].transpose(-1, -2)).sub_(delta[:, rows]).mul_(near)
            dk[:, rows] = d_near.transpose(-1, -2) @ queries
            part = d_near @ own_k[:, rows]
            if chunk.stop > chunk.start:
                flat_far, flat_g = far.flatten(1, 2), g.flatten(1, 2)
                dcv[:, tokens].baddbmm_(flat_far.transpose(-1, -2), flat_g)
                d_far = torch.bmm(flat_g, cv[:, tokens].transpose(-1, -2))
                d_far.sub_(delta[:, rows].flatten(1, 2)).mul_(flat_far)
                dck[:, tokens].baddbmm_(d_far.transpose(-1, -2), queries.flatten(1, 2))
                part += torch.bmm(d_far, ck[:, tokens]).view_as(part)
            dq[:, rows] = part
        grads = _from_rows(dq, ctx.shape) * ctx.scale, dck.transpose(0, 1), dcv.transpose(0, 1)
        return *grads, dk.permute(1, 2, 0, 3), dv.permute(1, 2, 0, 3), None, None


def _probabilities(q_rows: Tensor, ck: Tensor, own_k: Tensor, chunk: _Chunk) -> tuple[Tensor, Tensor]:
    """Softmax over context and own block together: [K, n, group*G, L] and [K, n, group*G, G']."""
    rows = slice(chunk.first, chunk.last)
    queries = q_rows[:, rows]
    near = queries @ own_k[:, rows].transpose(-1, -2)
    length = chunk.stop - chunk.start
    if length == 0:
        return near.new_empty(*near.shape[:-1], 0), near.softmax(-1)
    far = torch.bmm(queries.flatten(1, 2), ck[:, chunk.start : chunk.stop].transpose(-1, -2))
    far = far.view(*near.shape[:-1], length)
    if chunk.hidden is not None:
        far.masked_fill_(chunk.hidden, -torch.inf)
    top = torch.maximum(far.amax(-1, keepdim=True), near.amax(-1, keepdim=True))
    far.sub_(top).exp_()
    near.sub_(top).exp_()
    total = far.sum(-1, keepdim=True) + near.sum(-1, keepdim=True)
    return far.div_(total), near.div_(total)


def _from_rows(rows: Tensor, shape: torch.Size) -> Tensor:
    """[K, N, group*G, D] back to [N, G, H, D]."""
    blocks, slots, heads, size = shape
    key_heads = rows.shape[0]
    return rows.view(key_heads, blocks, heads // key_heads, slots, size).permute(1, 3, 0, 2, 4).reshape(shape)
