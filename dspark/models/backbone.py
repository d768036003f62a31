"""The parts of a draft layer, put together from what the family says.

d hidden size, H heads, K key heads, D head size. Leading dimensions are free: [N, G] packed blocks in training,
[B, G] rows in drafting, [T] or [M] context tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import ACT2FN

from dspark.config import DrafterConfig
from dspark.families import FAMILIES

Rotation = tuple[Tensor, Tensor]  # cos, sin [..., D]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (q, k, v) of the slots -> output [..., H, D]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _LeanNorm.apply(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _LeanNorm(torch.autograd.Function):
    """RMS norm that keeps its input alone for the backward pass, as the fused kernel of a GPU does.

    With n = x / rms(x) and h = gradient * weight, the gradient of x is (h - n mean(h n)) / rms(x).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normed, grad = x * inverse, grad.to(inverse.dtype)
        inner = grad * weight
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        inner.addcmul_(normed, (inner * normed).mean(-1, keepdim=True), value=-1)
        return inner.mul_(inverse).to(x.dtype), grad_weight, None


class Rotary:
    """Rotary positions with the target's settings. No state: the frequencies follow from the configuration."""

    def __init__(self, config: DrafterConfig) -> None:
        self.inverse_frequencies, self.attention_scaling = _frequencies(config)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """cos and sin [..., D] of integer positions [...]."""
        if self.inverse_frequencies.device != positions.device:
            self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = positions[..., None].float() * self.inverse_frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return (
            (angles.cos() * self.attention_scaling).to(dtype),
            (angles.sin() * self.attention_scaling).to(dtype),
        )


def _frequencies(config: DrafterConfig) -> tuple[Tensor, float]:
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, config.head_dim, 2, device="cpu").float() / config.head_dim
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    carrier = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(rope),
    )
    with torch.device("cpu"):  # a drafter under a meta-device context still has real frequencies
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](carrier, torch.device("cpu"))
    return frequencies, float(scaling)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn heads x [..., heads, D] by cos, sin [..., D]."""
    cos, sin = (part.unsqueeze(-2) for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class DraftAttention(nn.Module):
    """Projections and norms around an attention that the caller supplies."""

    def __init__(self, config: DrafterConfig, input_size: int | None = None) -> None:
        super().__init__()
        family = FAMILIES[config.family]
        width, bias = input_size or config.hidden_size, config.attention_bias
        self.head_dim = config.head_dim
        self.scale = 1.0 if family.unit_attention_scale else config.head_dim**-0.5
        self.value_eps = config.rms_norm_eps if family.normalised_values else None
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, key_size, bias=bias)
        self.v_proj = None if config.attention_k_eq_v else nn.Linear(width, key_size, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[..., H, D]"""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), rotation)

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """[..., K, D] twice"""
        keys = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        values = keys if self.v_proj is None else self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.value_eps is not None:
            values = F.rms_norm(values, (self.head_dim,), None, self.value_eps)
        return rotate(self.k_norm(keys), rotation), values

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        return self.o_proj(attend(self.queries(x, rotation), *self.keys_values(x, rotation)).flatten(-2))


class GatedMLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation: Any = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if torch.compiler.is_compiling():  # which decides by itself what to compute again
            return self.down_proj(self.activation(gate) * up)
        return self.down_proj(_GatedProduct.apply(gate, up, self.activation))


class _GatedProduct(torch.autograd.Function):
    """activation(gate) * up; the activation is computed again in the backward pass instead of being kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activation(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            gate = gate.detach().requires_grad_()
            activated = ctx.activation(gate)
        (grad_gate,) = torch.autograd.grad(activated, gate, grad * up)
        return grad_gate, grad * activated.detach(), None


class DraftLayer(nn.Module):
    """One layer over block slots; context keys and values reach it through `attend`."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        family = FAMILIES[config.family]
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = DraftAttention(config)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.sandwich = family.sandwich_norms
        if family.sandwich_norms:
            self.pre_feedforward_layernorm = RMSNorm(size, eps)
            self.post_feedforward_layernorm = RMSNorm(size, eps)
        self.layer_scalar: Tensor | None
        self.register_buffer("layer_scalar", torch.ones(1) if family.layer_scalar else None)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), rotation, attend)
        if self.sandwich:
            x = x + self.post_attention_layernorm(attended)
            x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        else:
            x = x + attended
            x = x + self.mlp(self.post_attention_layernorm(x))
        return x if self.layer_scalar is None else x * self.layer_scalar


def initialise(module: nn.Module, std: float = 0.02) -> None:
    """Random weights: normal with `std`, biases zero; norms stay ones."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
