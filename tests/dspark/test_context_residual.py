"""The context residual against a plain loop in float64, in decoding from a used row, and in what is written."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import SIZES, config_for, extend_context, tiny_target
from table_models import chi_squared, chi_squared_limit
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.config import DrafterConfig, SettingError
from dspark.decoding.decoder import Decoder, Request
from dspark.decoding.sampling import SamplingConfig
from dspark.decoding.target import Target
from dspark.losses.micro_batch import Teacher, make_micro_batch
from dspark.models.checkpoint import load_drafter, save_drafter
from dspark.models.merged_projection import merge_projection
from dspark.models.starting_weights import build_drafter
from storage.cache.shards import StoredRow

ANCHORS = [0, 1, 5, 11]


def residual_drafter(**overrides: Any) -> Any:
    target = tiny_target("llama")
    drafter = build_drafter(config_for(target, context_residual=True, **overrides), target, start="random", seed=1)
    torch.manual_seed(2)
    for parameter in drafter.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
    return drafter.eval()


def plain_block(drafter: Any, ids: Tensor, hidden_states: Tensor, anchor: int) -> Tensor:
    """States [slots, d] of one block, every slot, head and key by itself, in float64."""
    weights = {name: tensor.double() for name, tensor in drafter.state_dict().items()}
    c = drafter.config
    slots, heads, groups, size = c.input_slots, c.num_attention_heads, c.num_key_value_heads, c.head_dim

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean() + c.rms_norm_eps).sqrt() * weights[name + ".weight"]

    def turned(x: Tensor, position: int) -> Tensor:
        half = size // 2
        angle = torch.tensor([position * c.rope_parameters["rope_theta"] ** (-2 * i / size) for i in range(half)])
        cos, sin = angle.double().cos(), angle.double().sin()
        return torch.cat([x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin])

    merged = [weights["fc.weight"] @ state.double() for state in hidden_states[:anchor]]
    context = [norm(state, "hidden_norm") for state in merged]
    x = [weights["embed_tokens.weight"][ids[anchor] if slot == 0 else c.mask_token_id] for slot in range(slots)]
    if anchor > 0:
        x = [slot + merged[anchor - 1] for slot in x]
    for layer in range(c.num_draft_layers):
        part = f"layers.{layer}."
        seen = context + [norm(slot, part + "input_layernorm") for slot in x]
        keys, values = [], []
        for at, one in enumerate(seen):
            k = (weights[part + "self_attn.k_proj.weight"] @ one).view(groups, size)
            keys.append([turned(norm(k[g], part + "self_attn.k_norm"), at) for g in range(groups)])
            values.append((weights[part + "self_attn.v_proj.weight"] @ one).view(groups, size))
        after = []
        for slot in range(slots):
            q = (weights[part + "self_attn.q_proj.weight"] @ seen[anchor + slot]).view(heads, size)
            out = []
            for head in range(heads):
                query, group = turned(norm(q[head], part + "self_attn.q_norm"), anchor + slot), head * groups // heads
                scores = torch.stack([query @ key[group] for key in keys]) / size**0.5
                chances = scores.softmax(0)
                out.append(sum(chance * value[group] for chance, value in zip(chances, values, strict=True)))
            state = x[slot] + weights[part + "self_attn.o_proj.weight"] @ torch.cat(out)
            inner = norm(state, part + "post_attention_layernorm")
            gate = weights[part + "mlp.gate_proj.weight"] @ inner
            up = weights[part + "mlp.up_proj.weight"] @ inner
            after.append(state + weights[part + "mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up))
        x = after
    return torch.stack([norm(slot, "norm") for slot in x[slots - c.block_size :]])


@pytest.mark.parametrize("layout", ["anchor-first", "mask-first"])
@torch.no_grad()
def test_a_block_is_that_of_the_plain_loop(layout: str) -> None:
    kind = {"algorithm": "dflash", "block_layout": layout} if layout == "mask-first" else {}
    drafter = residual_drafter(**kind)
    ids, hidden_states = torch.randint(0, 97, (14,)), torch.randn(14, 96)
    row = StoredRow(
        sample_id="a",
        input_ids=ids,
        spans=((1, 14),),
        hidden_states=hidden_states,
        teacher_positions=torch.arange(14),
        teacher=Teacher(last_hidden_state=torch.randn(14, 32)),
    )
    states = drafter.block_states(make_micro_batch([row], [torch.tensor(ANCHORS).numpy()], drafter.block_size))
    plain = type(drafter)(replace(drafter.config, context_residual=False))
    plain.load_state_dict(drafter.state_dict())
    without = plain.block_states(make_micro_batch([row], [torch.tensor(ANCHORS).numpy()], drafter.block_size))
    for block, anchor in enumerate(ANCHORS):
        expected = plain_block(drafter, ids, hidden_states, anchor)
        torch.testing.assert_close(states[block].double(), expected, atol=2e-4, rtol=1e-4)
        assert torch.allclose(states[block], without[block], atol=1e-3) == (anchor == 0)


@torch.no_grad()
def test_a_row_that_begins_anew_forgets_the_state_before_it() -> None:
    drafter = residual_drafter()
    used, fresh = drafter.new_cache(1), drafter.new_cache(1)
    extend_context(drafter, used, torch.randn(1, 9, 96), [9], [0])
    used.lengths[0] = 0
    anchor, first = torch.tensor([5]), torch.tensor([0])
    torch.testing.assert_close(drafter.draft_states(anchor, first, used), drafter.draft_states(anchor, first, fresh))


@torch.no_grad()
def test_components_of_the_hidden_states_carry_the_residual_too() -> None:
    """Of a square orthogonal projection nothing is lost."""
    drafter, hidden_states, ids = residual_drafter(), torch.randn(8, 96), torch.randint(0, 97, (8,))
    row = StoredRow(
        sample_id="a",
        input_ids=ids,
        spans=((1, 8),),
        hidden_states=hidden_states,
        teacher_positions=torch.arange(8),
        teacher=Teacher(last_hidden_state=torch.randn(8, 32)),
    )
    batch = make_micro_batch([row], [torch.tensor([2, 6]).numpy()], drafter.block_size)
    expected = drafter.block_states(batch)
    projection = torch.linalg.qr(torch.randn(96, 96)).Q
    merge_projection(drafter, projection, projection.T)
    found = drafter.block_states(replace(batch, hidden_states=batch.hidden_states @ projection.T))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("overrides", "architecture"),
    [
        ({}, "Qwen3DSparkContextResidualModel"),
        ({"algorithm": "dflash"}, "Qwen3DSparkContextResidualModel"),
        ({"algorithm": "dflash", "block_layout": "mask-first"}, "DFlashDraftContextResidualModel"),
    ],
)
def test_what_is_written_names_another_architecture(
    overrides: dict[str, Any], architecture: str, tmp_path: Path
) -> None:
    drafter = residual_drafter(**overrides)
    save_drafter(drafter, tmp_path, tiny_target("llama").text_config)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == [architecture]
    assert written["context_residual"] is True
    assert load_drafter(tmp_path).config == drafter.config
    plain = {**written, "architectures": [architecture.replace("ContextResidual", "")]}
    without = {name: value for name, value in written.items() if name != "context_residual"}
    for changed in (plain, without):
        with pytest.raises(SettingError, match="contradict"):
            DrafterConfig.from_checkpoint(changed)
    assert not drafter.commands(drafter.config, speculators=False, temperatures=True)
    assert "no engine" in drafter.engine_notes(drafter.config, speculators=False)[0]


def test_eagle3_has_it_by_itself() -> None:
    with pytest.raises(SettingError, match=r"false for eagle3.*drafter\.context_residual"):
        config_for(tiny_target("llama"), algorithm="eagle3", num_draft_layers=1, context_residual=True)


def test_sampled_output_has_the_targets_distribution() -> None:
    """Every sequence of three tokens, enumerated through the target, against sampled ones of an untrained drafter."""
    vocabulary, count = 5, 4000
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": vocabulary}))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    target = Target(model, target_layer_ids=(0, 2, 4), name="five tokens")
    config = DrafterConfig.for_target(
        target.text_config,
        mask_token_id=4,
        num_draft_layers=1,
        block_size=2,
        markov_rank=4,
        target_layer_ids=target.layer_ids,
        context_residual=True,
    )
    drafter = build_drafter(config, target, start="random", seed=3).eval()
    torch.nn.init.normal_(drafter.markov_head.markov_w2.weight, std=0.3)
    sampling, prompt = SamplingConfig(temperature=1.0), [2, 3]
    expected = {}
    with torch.no_grad():
        for text in product(range(vocabulary), repeat=3):
            logits = model(input_ids=torch.tensor([[*prompt, *text]]), use_cache=False).logits[0]
            chances = logits[len(prompt) - 1 : -1].double().softmax(-1)
            expected[text] = float(chances[range(3), list(text)].prod())
    requests = [Request(request_id=str(n), prompt_ids=prompt, max_new_tokens=3, seed=n) for n in range(count)]
    done = list(Decoder(target, drafter, sampling=sampling, max_rows=256).generate(requests))
    assert any(event.accepted_raw for completion in done for event in completion.rounds)
    assert any(event.accepted_raw < event.scheduled for completion in done for event in completion.rounds)
    statistic, freedom = chi_squared(Counter(tuple(completion.output_ids) for completion in done), expected)
    assert statistic < chi_squared_limit(freedom)
