"""Keys and values of context positions for drafting: one row a request, rows of any length.

B rows, K key heads, H query heads, G block slots, D head size, M new tokens of all rows together.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class DraftCache:
    """Grows as needed; a drafted block is written behind a row's end and forgotten by not counting it."""

    def __init__(
        self,
        *,
        layers: int,
        rows: int,
        key_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int = 256,
    ) -> None:
        shape = (rows, key_heads, capacity, head_dim)
        # Zeros, since a masked key still takes part in a product and must be finite.
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.lengths = torch.zeros(rows, dtype=torch.long)  # [B] context tokens, on the CPU
        # [B, d] projected state of each row's last context token, where the drafter starts from it
        self.last_states: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    def move_row(self, source: int, to: int) -> None:
        """Row `source` takes the place of row `to`."""
        length = int(self.lengths[source])
        for tensor in (*self.keys, *self.values):
            tensor[to, :, :length] = tensor[source, :, :length]
        self.lengths[to] = length
        if self.last_states is not None:
            self.last_states[to] = self.last_states[source]

    def keep_last_states(self, token_rows: Tensor, states: Tensor) -> None:
        """Of states [M, d] at token_rows [M], keep each row's last one."""
        assert self.last_states is not None
        # Rows come one after another: a token is its row's last where the next one belongs to another row.
        ends = torch.ones_like(token_rows, dtype=torch.bool)
        ends[:-1] = token_rows[1:] != token_rows[:-1]
        self.last_states[token_rows[ends]] = states[ends]

    @torch.inference_mode(False)  # what grows inside inference mode is written to outside it too
    def reserve(self, length: int) -> None:
        """Room for rows of `length` tokens; grows by half at least, so that growing stays rare."""
        if length > self.capacity:
            more = max(length - self.capacity, self.capacity // 2)
            self.keys = [F.pad(keys, (0, 0, 0, more)) for keys in self.keys]
            self.values = [F.pad(values, (0, 0, 0, more)) for values in self.values]

    def write(self, layer: int, rows: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys, values [..., K, D] at rows and slots that broadcast to [...]."""
        self.keys[layer][rows, :, slots] = keys
        self.values[layer][rows, :, slots] = values

    def attend(self, layer: int, q: Tensor, visible: Tensor | None, length: int, scale: float) -> Tensor:
        """Attention [B, G, H, D] of q [B, G, H, D], rows 0 to B-1, over the first `length` cells.

        visible is [B, length] bool, or None where every row sees all of them.
        """
        rows, slots, heads, size = q.shape
        keys, values = (kept[layer][:rows, :, :length] for kept in (self.keys, self.values))
        key_heads = keys.shape[1]
        # All query heads of a key head become rows of one product, so that keys are never repeated.
        q = q.reshape(rows, slots, key_heads, heads // key_heads, size).transpose(1, 2).flatten(2, 3)
        mask = None if visible is None else visible[:, None, None, :]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
        return out.unflatten(2, (slots, -1)).transpose(1, 2).reshape(rows, slots, heads, size)
