"""MTP-1 against a plain loop in float64, on the target's last hidden state, in decoding and in what is written."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import SIZES, a_drafter, config_for, tiny_target
from table_models import chi_squared, chi_squared_limit
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.config import DrafterConfig, SettingError
from dspark.decoding.decoder import Decoder, Request
from dspark.decoding.sampling import SamplingConfig
from dspark.decoding.target import Target
from dspark.decoding.target_tail import TargetTail
from dspark.losses.micro_batch import Teacher, make_micro_batch
from dspark.models.checkpoint import load_drafter, save_drafter
from dspark.models.merged_projection import merge_projection
from dspark.models.starting_weights import build_drafter
from storage.cache.shards import StoredRow

LAST = SIZES["num_hidden_layers"]
ANCHORS = [1, 2, 6, 11]


def last_state_target(**options: Any) -> Target:
    return Target(tiny_target("llama", **options).model, target_layer_ids=(LAST,), name="tiny llama")


def mtp(block_size: int = 3) -> Any:
    target = last_state_target()
    config = config_for(
        target, algorithm="mtp", num_draft_layers=1, block_size=block_size, target_layer_ids=target.layer_ids
    )
    drafter = build_drafter(config, target, start="random", seed=1)
    torch.manual_seed(2)
    for parameter in drafter.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
    return drafter.eval()


def batch_for(drafter: Any, ids: Tensor, hidden_states: Tensor) -> Any:
    row = StoredRow(
        sample_id="a",
        input_ids=ids,
        spans=((1, len(ids)),),
        hidden_states=hidden_states,
        teacher_positions=torch.arange(len(ids)),
        teacher=Teacher(last_hidden_state=torch.randn(len(ids), 32)),
    )
    return make_micro_batch([row], [torch.tensor(ANCHORS).numpy()], drafter.block_size)


def plain_steps(drafter: Any, ids: Tensor, hidden_states: Tensor, anchor: int) -> Tensor:
    """States [G, d] of one block: every step, pair, head and key by itself, in float64."""
    weights = {name: tensor.double() for name, tensor in drafter.state_dict().items()}
    c, part = drafter.config, "layers.0."
    heads, groups, size = c.num_attention_heads, c.num_key_value_heads, c.head_dim

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean() + c.rms_norm_eps).sqrt() * weights[name + ".weight"]

    def turned(x: Tensor, position: int) -> Tensor:
        half = size // 2
        angle = torch.tensor([position * c.rope_parameters["rope_theta"] ** (-2 * i / size) for i in range(half)])
        cos, sin = angle.double().cos(), angle.double().sin()
        return torch.cat([x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin])

    def pair(token: int, state: Tensor) -> Tensor:
        embedded = norm(weights["embed_tokens.weight"][token], "pre_fc_norm_embedding")
        return weights["fc.weight"] @ torch.cat([embedded, norm(state, "pre_fc_norm_hidden")])

    pairs = [pair(int(ids[t + 1]), hidden_states[t].double()) for t in range(anchor)]
    states = []
    for step in range(c.block_size):
        at = anchor - 1 + step
        if step:
            pairs.append(pair(int(ids[anchor + step]), states[-1]))
        seen = [norm(one, part + "input_layernorm") for one in pairs]
        query = (weights[part + "self_attn.q_proj.weight"] @ seen[at]).view(heads, size)
        out = []
        for head in range(heads):
            group = head * groups // heads
            q, scores, values = turned(norm(query[head], part + "self_attn.q_norm"), at), [], []
            for position, one in enumerate(seen):
                key = (weights[part + "self_attn.k_proj.weight"] @ one).view(groups, size)[group]
                scores.append(q @ turned(norm(key, part + "self_attn.k_norm"), position) / size**0.5)
                values.append((weights[part + "self_attn.v_proj.weight"] @ one).view(groups, size)[group])
            chances = torch.stack(scores).softmax(0)
            out.append(sum(chance * value for chance, value in zip(chances, values, strict=True)))
        state = pairs[at] + weights[part + "self_attn.o_proj.weight"] @ torch.cat(out)
        inner = norm(state, part + "post_attention_layernorm")
        gate, up = weights[part + "mlp.gate_proj.weight"] @ inner, weights[part + "mlp.up_proj.weight"] @ inner
        states.append(state + weights[part + "mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up))
    return torch.stack([norm(state, "norm") for state in states])


@pytest.mark.parametrize("block_size", [1, 3])
@torch.no_grad()
def test_steps_are_those_of_the_plain_loop(block_size: int) -> None:
    drafter = mtp(block_size)
    ids, hidden_states = torch.randint(0, 97, (14,)), torch.randn(14, 32)
    states = drafter.block_states(batch_for(drafter, ids, hidden_states))
    for block, anchor in enumerate(ANCHORS):
        steps = min(block_size, 14 - anchor)
        expected = plain_steps(drafter, torch.cat([ids, torch.zeros(block_size).long()]), hidden_states, anchor)
        torch.testing.assert_close(states[block, :steps].double(), expected[:steps], atol=2e-4, rtol=1e-4)


def test_every_parameter_learns() -> None:
    drafter = mtp()
    drafter.block_states(batch_for(drafter, torch.randint(0, 97, (14,)), torch.randn(14, 32))).square().sum().backward()
    still = [name for name, one in drafter.named_parameters() if one.requires_grad and not one.grad.abs().sum() > 0]
    assert not still


@torch.no_grad()
def test_the_target_gives_its_last_hidden_state() -> None:
    """In one pass, in decoding's passes, and to a teacher that is recomputed from what was captured."""
    target, ids = last_state_target(), torch.randint(3, 97, (2, 9))
    captured = target.capture(ids)
    assert torch.equal(captured.hidden_states, captured.last_hidden_state)
    torch.testing.assert_close(target.logits(captured.hidden_states), target.model(input_ids=ids).logits)
    assert torch.equal(TargetTail(target)(captured.hidden_states[0]), captured.last_hidden_state[0])
    with pytest.raises(SettingError, match=r"target_layer_ids has 7; .* 6 is its last hidden state"):
        Target(target.model, target_layer_ids=(7,))


def test_its_layers_are_its_own() -> None:
    text_config = tiny_target("llama").text_config
    config = DrafterConfig.for_target(text_config, mask_token_id=None, algorithm="mtp", num_draft_layers=1)
    assert config.target_layer_ids == (LAST,)
    for layers in ((0, 2, 4), (5,), (2, LAST)):
        with pytest.raises(SettingError, match=r"null or \[6\] for mtp.*drafter\.target_layer_ids"):
            replace(config, target_layer_ids=layers)
    with pytest.raises(SettingError, match=r"target_layer_ids is 6; allowed: -1"):
        DrafterConfig.for_target(text_config, mask_token_id=9, target_layer_ids=(2, LAST))
    with pytest.raises(SettingError, match="num_draft_layers is 2; allowed: 1 for mtp"):
        replace(config, num_draft_layers=2)


def test_components_and_other_widths_are_refused() -> None:
    drafter = mtp()
    with pytest.raises(SettingError, match=r"mtp reads whole states: set cache\.hidden_states_codec to int8"):
        merge_projection(drafter, torch.eye(32), torch.eye(32))
    with pytest.raises(SettingError, match=r"96 wide.*last hidden state, 32 values.*target_layer_ids"):
        drafter.project_context(torch.randn(4, 96))


@torch.no_grad()
def test_it_starts_from_the_state_before_the_final_norm() -> None:
    """Without an embedding the layer is fed the direction that the target's own norm was given."""
    target = last_state_target()
    torch.nn.init.uniform_(target.final_norm.weight, 0.5, 2.0)
    config = config_for(target, algorithm="mtp", num_draft_layers=1, block_size=1, target_layer_ids=target.layer_ids)
    drafter: Any = build_drafter(config, target, start="target")
    before: list[Tensor] = []
    handle = target.final_norm.register_forward_pre_hook(lambda _module, inputs: before.append(inputs[0]))
    last = target.capture(torch.randint(3, 97, (1, 9))).hidden_states[0]
    handle.remove()
    drafter.fc.weight[:, :32] = 0
    _, merged = drafter.joined(torch.zeros_like(last), last)
    torch.testing.assert_close(torch.cosine_similarity(merged, before[0][0]), torch.ones(9), atol=1e-5, rtol=0)
    torch.testing.assert_close(drafter.norm.weight, target.final_norm.weight)
    top = target.layers[-1]
    assert torch.equal(drafter.layers[0].self_attn.q_proj.weight, top.self_attn.q_proj.weight)
    assert torch.equal(drafter.layers[0].mlp.up_proj.weight, top.mlp.up_proj.weight)


def test_greedy_text_is_the_targets_own() -> None:
    target = last_state_target()
    requests = [Request(request_id=str(n), prompt_ids=[3 + n, 5, 7], max_new_tokens=20) for n in range(4)]
    plain = {one.request_id: one.output_ids for one in Decoder(target, None).generate(requests)}
    for rows in (1, 3):
        done = {
            one.request_id: one for one in Decoder(target, a_drafter(target, "mtp"), max_rows=rows).generate(requests)
        }
        assert {name: one.output_ids for name, one in done.items()} == plain
        assert any(one.rounds for one in done.values())


@torch.no_grad()
def test_what_is_written_reads_back_and_names_no_engine(tmp_path: Path) -> None:
    drafter = mtp()
    save_drafter(drafter, tmp_path, last_state_target().text_config)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["Qwen3MtpModel"]
    assert written["target_layer_ids"] == [LAST]
    assert written["step_loss_decay"] == 0.6
    again = load_drafter(tmp_path)
    assert again.config == drafter.config
    batch = batch_for(drafter, torch.randint(0, 97, (14,)), torch.randn(14, 32))
    assert torch.equal(again.block_states(batch), drafter.block_states(batch))
    assert "no norms before its projection" in drafter.engine_notes(drafter.config, speculators=False)[0]
    assert not drafter.commands(drafter.config, speculators=False, temperatures=False)
    assert drafter.speculators_layout(drafter.config, []) is None


@pytest.mark.parametrize("block_size", [1, 2])
def test_sampled_output_has_the_targets_distribution(block_size: int) -> None:
    """Every sequence of three tokens, enumerated through the target, against sampled ones of an untrained drafter."""
    vocabulary, count = 5, 4000
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": vocabulary}))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    target = Target(model, target_layer_ids=(LAST,), name="five tokens")
    config = DrafterConfig.for_target(
        target.text_config, mask_token_id=None, algorithm="mtp", num_draft_layers=1, block_size=block_size
    )
    drafter = build_drafter(config, target, start="target", seed=3).eval()
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
