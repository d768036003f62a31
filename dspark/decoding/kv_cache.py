"""Key-value storage for rows at different positions, and the attention that reads it.

Tokens of many rows travel through the model back to back as one sequence [1, N], so that linear layers do
exactly N tokens of work whatever each row contributes; only attention sees rows. Keys and values are written
in place into storage allocated once.

R storage rows, B live rows, N tokens of a step, H key-value heads, C capacity, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dspark.errors import DsparkError

ATTENTION_NAME = "dspark_ragged"
_CLEAN_STEP = 128


class CacheFull(DsparkError):
    """A row would grow past the storage; the message says which option gives it more room."""


class RaggedStep:
    """Which tokens of one forward pass belong to which storage row, and what each may see.

    rows: the storage row of each segment; starts: tokens that the row holds already; counts: new tokens.
    A decoding step names the rows 0..B-1 in order and attends to them in one call; a prefill goes row by row.
    """

    def __init__(self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], device: torch.device) -> None:
        self.rows, self.starts, self.counts = list(rows), list(starts), list(counts)
        self.device = device
        self.ends = [start + count for start, count in zip(starts, counts, strict=True)]
        self.longest = max(self.ends)
        self.width = max(counts)
        self.num_tokens = sum(counts)
        self.together = self.rows == list(range(len(self.rows))) and any(self.starts)
        counts_t = torch.tensor(self.counts)
        segment = torch.repeat_interleave(torch.arange(len(self.rows)), counts_t)
        first = counts_t.cumsum(0) - counts_t
        within = torch.arange(self.num_tokens) - first[segment]
        self.positions = (torch.tensor(self.starts)[segment] + within).to(device)  # [N]
        self.token_rows = torch.tensor(self.rows)[segment].to(device)  # [N]
        self.first_tokens = first.tolist()
        self.even = all(count == self.width for count in self.counts)
        if not self.even:
            slot = torch.arange(self.width)
            last = (counts_t - 1)[:, None]
            self.pad_from = (first[:, None] + torch.minimum(slot[None], last)).flatten().to(device)  # [B*width]
            self.pad_to = (segment * self.width + within).to(device)  # [N]
        self._masks: dict[Any, Tensor] = {}

    def padded(self, packed: Tensor) -> Tensor:
        """[N, ...] to [B, width, ...]; unused slots repeat a row's last token."""
        if not self.even:
            packed = packed[self.pad_from]
        return packed.reshape(len(self.rows), self.width, *packed.shape[1:])

    def packed(self, padded: Tensor) -> Tensor:
        """[B, width, ...] to [N, ...], the inverse of `padded`."""
        flat = padded.flatten(0, 1)
        return flat if self.even else flat[self.pad_to]

    def mask(self, groups: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [B, 1, groups*width, longest] for queries packed by key-value head."""
        key = (groups, window, dtype)
        if key not in self._masks:
            queries = self.padded(self.positions)  # [B, width]
            slots = torch.arange(self.longest, device=self.device)
            seen = slots <= queries[..., None]
            if window is not None:
                seen &= slots > queries[..., None] - window
            bias = torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill_(~seen, -torch.inf)
            self._masks[key] = bias[:, None].expand(-1, groups, -1, -1).flatten(1, 2)[:, None].contiguous()
        return self._masks[key]


class RaggedLayer(DynamicLayer):
    """One layer's storage, allocated when the first keys show their shape."""

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__()
        self.rows, self.capacity = rows, capacity
        self.clean = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def allocate(states: Tensor) -> Tensor:
            # Not filled: untouched pages of the tail cost no memory on a CPU.
            shape = (self.rows, states.shape[1], self.capacity, states.shape[3])
            return torch.empty(shape, dtype=states.dtype, device=states.device)

        self.keys, self.values = allocate(key_states), allocate(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [1, H, N, D] where the step says; returns the whole storage [R, H, C, D], which attention slices."""
        step: RaggedStep = kwargs["step"]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        if step.longest > self.clean:
            # Masked slots still meet the softmax's zeros, so they must hold finite numbers.
            upto = min(-(-step.longest // _CLEAN_STEP) * _CLEAN_STEP, self.capacity)
            self.keys[:, :, self.clean : upto] = 0
            self.values[:, :, self.clean : upto] = 0
            self.clean = upto
        if len(step.rows) == 1:
            where = (step.rows[0], slice(None), slice(step.starts[0], step.ends[0]))
            self.keys[where] = key_states[0]
            self.values[where] = value_states[0]
        else:
            self.keys[step.token_rows, :, step.positions] = key_states[0].transpose(0, 1)
            self.values[step.token_rows, :, step.positions] = value_states[0].transpose(0, 1)
        return self.keys, self.values

    def move_row(self, source: int, to: int, length: int) -> None:
        if self.is_initialized:
            assert self.keys is not None
            assert self.values is not None
            self.keys[to, :, :length] = self.keys[source, :, :length]
            self.values[to, :, :length] = self.values[source, :, :length]

    def get_seq_length(self) -> int:
        return 0


class RaggedCache(Cache):
    """Keys and values of up to `rows` sequences of up to `capacity` tokens, each at its own position."""

    def __init__(self, num_layers: int, rows: int, capacity: int) -> None:
        self.storage = [RaggedLayer(rows, capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self.storage))
        self.rows, self.capacity = rows, capacity
        self.step: RaggedStep | None = None

    def begin(self, step: RaggedStep) -> None:
        """Set what the next forward pass writes. Raises CacheFull when a row has no room for it."""
        if step.longest > self.capacity:
            raise CacheFull(
                f"a row would reach {step.longest} tokens; the cache holds {self.capacity} "
                "(raise `max_length` of the decoder)"
            )
        self.step = step

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.storage[layer_idx].update(key_states, value_states, step=self.step)

    def move_row(self, source: int, to: int, length: int) -> None:
        """Copy a row's first `length` tokens over another row, to keep live rows together."""
        for layer in self.storage:
            layer.move_row(source, to, length)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0


class AttentionError(DsparkError):
    """The model asks for an attention that is not computed here; the message names it."""


@dataclass(frozen=True)
class RaggedMask:
    """What a model's mask stands for: a query sees its row's keys up to itself, the last `window` of them if any."""

    window: int | None


def ragged_mask(
    *, mask_function: Callable[..., Any], local_size: int | None = None, attention_mask: Any = None, **_: Any
) -> RaggedMask:
    """Takes the place of the mask that transformers would make. Raises AttentionError for one of another shape."""
    if attention_mask is not None:
        raise AttentionError("the model brings an attention mask of its own")
    if mask_function is not causal_mask_function:
        size = local_size or 64
        far = 2**20
        queries = torch.tensor([0, 1, size - 1, size, size, size + 1, 2 * size, 2 * size, 3 * size + 1, far, far])
        keys = torch.tensor([1, 0, 0, 0, 1, 0, size, size + 1, 2 * size + 2, 0, far - size])
        expected = keys <= queries
        if local_size is not None:
            expected &= keys > queries - local_size
        none = torch.zeros_like(queries)
        try:
            same = torch.equal(mask_function(none, none, queries, keys), expected)
        except (IndexError, RuntimeError, TypeError):  # it reads something that belongs to the input
            same = False
        if not same:
            kind = "" if local_size is None else f" over a window of {local_size}"
            raise AttentionError(f"the model's attention mask is not causal{kind} (chunked, blockwise or two-way)")
    return RaggedMask(local_size)


class _Rule(NamedTuple):
    """How scores [.., n, L] become probabilities."""

    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # [Hq], one more logit for every query of a head, whose probability goes nowhere


# What models hand to their attention for other kernels' sake, or have applied already.
_WITHOUT_EFFECT = {"cache_position", "output_attentions", "output_hidden_states", "position_ids", "use_cache"}


def ragged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: RaggedMask | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    ragged_step: RaggedStep | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of packed queries [1, Hq, N, D] over row storage [R, H, C, D]; returns [1, N, Hq, D].

    Queries of the heads that share a key-value head are laid side by side, so keys and values are never repeated.
    The mask says which keys are seen, as in transformers' own kernels. Raises AttentionError for an argument that is
    not known here.
    """
    kind = type(module).__name__
    if ragged_step is None:
        raise AttentionError(f"{kind} does not hand keyword arguments to its attention function")
    if not isinstance(attention_mask, RaggedMask):
        raise AttentionError(f"{kind} makes its attention mask in its own way")
    unknown = sorted(name for name, given in others.items() if given is not None and name not in _WITHOUT_EFFECT)
    unknown += ["dropout"] * bool(dropout) + ["is_causal"] * (is_causal is False)
    if unknown:
        raise AttentionError(f"{kind} hands {', '.join(unknown)} to its attention function, which is not supported")
    step, rule = ragged_step, _Rule(scaling, attention_mask.window, softcap, s_aux)
    packed = query[0].transpose(0, 1)  # [N, Hq, D]
    if step.together:
        return _attend_rows(step, packed, key, value, rule).contiguous()[None], None
    segments = zip(step.first_tokens, step.counts, step.rows, step.starts, step.ends, strict=True)
    out = [
        _attend_one(packed[first : first + count], key[row, :, :end], value[row, :, :end], start, rule)
        for first, count, row, start, end in segments
    ]
    return torch.cat(out)[None], None


def _attend_rows(step: RaggedStep, packed: Tensor, key: Tensor, value: Tensor, rule: _Rule) -> Tensor:
    heads, live = key.shape[1], len(step.rows)
    groups = packed.shape[1] // heads
    query = step.padded(packed).unflatten(2, (heads, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = step.mask(groups, rule.window, packed.dtype)
    out = _attend(query, key[:live, :, : step.longest], value[:live, :, : step.longest], mask, rule)
    out = out.unflatten(2, (groups, step.width)).permute(0, 3, 1, 2, 4).flatten(2, 3)  # [B, width, Hq, D]
    return step.packed(out)


def _attend_one(query: Tensor, key: Tensor, value: Tensor, start: int, rule: _Rule) -> Tensor:
    """Queries [n, Hq, D] of one row at positions start.. over its keys [H, start+n, D]."""
    count, heads, length = query.shape[0], key.shape[0], key.shape[1]
    groups = query.shape[1] // heads
    plain = rule.softcap is None and rule.sinks is None and (rule.window is None or length <= rule.window)
    if start == 0 and plain:
        key, value = key.repeat_interleave(groups, 0)[None], value.repeat_interleave(groups, 0)[None]
        query = query.transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=rule.scaling)
        return out[0].transpose(0, 1)
    slots = torch.arange(length, device=query.device)
    positions = torch.arange(start, start + count, device=query.device)[:, None]
    seen = slots <= positions
    if rule.window is not None:
        seen &= slots > positions - rule.window
    mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, -torch.inf)
    by_head = query.unflatten(1, (heads, groups)).permute(1, 2, 0, 3).flatten(1, 2)[None]  # [1, H, groups*n, D]
    out = _attend(by_head, key[None], value[None], mask.repeat(groups, 1)[None, None], rule)
    return out[0].unflatten(1, (groups, count)).permute(2, 0, 1, 3).flatten(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, rule: _Rule) -> Tensor:
    """Queries [B, H, groups*n, D] over keys [B, H, L, D] with an additive mask."""
    if rule.softcap is None and rule.sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=rule.scaling)
    scale = query.shape[-1] ** -0.5 if rule.scaling is None else rule.scaling
    scores = query @ key.transpose(-1, -2) * scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores = scores + mask
    if rule.sinks is not None:
        by_head = rule.sinks.view(key.shape[1], -1)  # [H, groups]
        by_query = by_head.repeat_interleave(query.shape[2] // by_head.shape[1], 1)[None, :, :, None]
        scores = torch.cat([scores, by_query.expand(len(scores), -1, -1, -1).to(scores.dtype)], -1)
    return scores.softmax(-1, dtype=torch.float32)[..., : key.shape[2]].to(value.dtype) @ value


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, ragged_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, ragged_mask)


@contextmanager
def ragged_attention_on(text_config: Any) -> Iterator[None]:
    """Let the model whose config this is use `ragged_attention` inside the block."""
    before = text_config._attn_implementation
    text_config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        text_config._attn_implementation = before


@torch.inference_mode()
def ragged_forward(
    target: Any, cache: RaggedCache, step: RaggedStep, tokens: Tensor, *, hidden_states: bool = False
) -> tuple[Tensor, Tensor | None]:
    """One pass of the target over packed tokens [N]: last hidden states [N, d], and captured ones [N, m*d] if asked.

    Keys and values of the tokens are in the cache afterwards. Raises CacheFull when they don't fit.
    """
    cache.begin(step)
    inputs: dict[str, Any] = {
        "input_ids": tokens[None],
        "position_ids": step.positions[None],
        "cache": cache,
        "use_cache": True,
        "ragged_step": step,
    }
    with ragged_attention_on(target.text_config):
        if not hidden_states:
            return target.decoder(**inputs).last_hidden_state[0], None
        with target.capturing() as sink:
            last = target.decoder(**inputs).last_hidden_state[0]
            return last, target.hidden_states_of(sink)[0]
