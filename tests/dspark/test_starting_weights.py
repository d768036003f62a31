"""Starting weights do what they promise, and folders give back what was saved."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import config_for, extend_context, tiny_target

from dspark.config import SettingError
from dspark.decoding.decoder import Decoder, Request, SamplingConfig
from dspark.manifest import CheckpointError
from dspark.models.checkpoint import load_drafter, save_drafter
from dspark.models.draft_vocabulary import engine_mapping, most_frequent_tokens
from dspark.models.starting_weights import PROBE_TOKENS, bigram_counts, build_drafter, match_initial_logits


def test_context_keys_are_those_of_the_target_layer() -> None:
    """Both draft layers see, of a state, exactly what the target's layer would project from it (up to its norm)."""
    target = tiny_target("llama")
    drafter = build_drafter(config_for(target, num_draft_layers=2), target, start="target")
    for layer in target.layers:
        torch.nn.init.uniform_(layer.input_layernorm.weight, 0.5, 2.0)
    sources = drafter.start_from_target(target)
    assert sources == [4, 5]
    ids = torch.randint(0, 97, (1, 12))
    captured = target.capture(ids)
    context = drafter.hidden_norm(drafter.project_context(captured.hidden_states))[0]
    state = captured.hidden_states[0, :, -32:]
    for layer, source in zip(drafter.layers, sources, strict=True):
        theirs = target.layers[source]
        expected = theirs.self_attn.v_proj(theirs.input_layernorm(state))
        torch.testing.assert_close(layer.self_attn.v_proj(context), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(drafter.norm.weight, target.final_norm.weight)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma4"])
def test_every_family_starts_from_its_target(kind: str) -> None:
    target = tiny_target(kind)
    drafter = build_drafter(config_for(target, num_draft_layers=1), target, start="target")
    theirs = target.layers[-1].state_dict()
    torch.testing.assert_close(drafter.layers[0].mlp.down_proj.weight, theirs["mlp.down_proj.weight"])
    if kind != "llama":
        torch.testing.assert_close(drafter.layers[0].self_attn.q_norm.weight, theirs["self_attn.q_norm.weight"])
    assert drafter.embed_tokens.weight.data_ptr() == target.embed_tokens.weight.data_ptr()
    assert not drafter.embed_tokens.weight.requires_grad
    assert not drafter.lm_head.weight.requires_grad


def test_random_start_is_decided_by_the_seed_alone() -> None:
    target = tiny_target("llama")
    config = config_for(target)
    states = [build_drafter(config, target, start="random", seed=seed).state_dict() for seed in (3, 3, 4)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["fc.weight"], states[2]["fc.weight"])


def test_start_from_a_published_drafter(tmp_path: Path) -> None:
    target = tiny_target("llama")
    config = config_for(target)
    drafter = build_drafter(config, target, start="random")
    save_drafter(drafter, tmp_path / "whole", target.text_config)
    save_drafter(drafter, tmp_path / "bare", target.text_config, with_shared=False)
    for folder in ("whole", "bare"):
        again = build_drafter(config, target, start=str(tmp_path / folder))
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is missing.*target="):
        load_drafter(tmp_path / "bare")
    with pytest.raises(SettingError, match=r"markov_rank \(8 there\)"):
        build_drafter(replace(config, markov_rank=4), target, start=str(tmp_path / "whole"))


def test_reduced_vocabulary_is_carried_by_the_markov_tables(tmp_path: Path) -> None:
    target = tiny_target("llama")
    counts = torch.arange(97).flip(0)
    chosen = most_frequent_tokens(counts, 20, always=[90])
    assert chosen.tolist() == [*range(19), 90]
    config = config_for(target, draft_vocab_size=20)
    drafter = build_drafter(config, target, draft_token_ids=chosen)
    torch.nn.init.normal_(drafter.markov_head.markov_w2.weight)
    states, previous = torch.randn(3, 4, 32), torch.randint(0, 97, (3, 4))
    optimizer = torch.optim.AdamW((p for p in drafter.parameters() if p.requires_grad), lr=0.1, weight_decay=0.1)
    logits = drafter.base_logits(states) + drafter.sequential_head.bias(
        drafter.sequential_head.bias_vectors(states, previous)
    )
    (logits.logsumexp(-1).sum() + drafter.confidence_logits(states, previous).sum()).backward()
    assert not drafter.markov_head.markov_w1.weight.grad[:, -1].any()
    assert not drafter.markov_head.markov_w2.weight.grad[:, -1].any()
    optimizer.step()
    save_drafter(drafter, tmp_path, target.text_config)
    again = load_drafter(tmp_path)
    assert torch.equal(again.draft_token_ids, chosen)
    full = (
        again.base_logits(states) + again.sequential_head.bias(again.sequential_head.bias_vectors(states, previous))
    ).softmax(-1)
    head, bias = again.output_weights()
    vectors = again.sequential_head.bias_vectors(states, previous)
    few = again.base_logits(states, head) + again.sequential_head.bias(vectors, bias)
    outside = torch.ones(97, dtype=torch.bool)
    outside[chosen] = False
    assert full[..., outside].sum() == 0
    torch.testing.assert_close(full[..., chosen], few.softmax(-1))


def test_engine_mapping_is_an_offset() -> None:
    chosen = torch.tensor([2, 3, 7])
    d2t, t2d = engine_mapping(chosen, 9)
    assert (torch.arange(3) + d2t).tolist() == chosen.tolist()
    assert t2d.nonzero().flatten().tolist() == chosen.tolist()
    with pytest.raises(SettingError, match=r"draft_vocab_size is 10.*1 to 9"):
        most_frequent_tokens(torch.ones(9), 10)


def test_eagle3_starts_from_the_targets_top_layer() -> None:
    """Without an embedding the layer's first step sees of a state what the target's layer projects from it."""
    target = tiny_target("llama")
    config = config_for(target, algorithm="eagle3", num_draft_layers=1, block_size=4)
    drafter = build_drafter(config, target, start="target")
    source, layer = target.layers[-1], drafter.layers[0]
    captured = target.capture(torch.randint(0, 97, (1, 12)))
    state = drafter.project_context(captured.hidden_states)[0]
    torch.testing.assert_close(state, captured.hidden_states[0, :, -32:])
    joined = layer.joined(torch.zeros_like(state), state)
    expected = source.self_attn.v_proj(source.input_layernorm(state))
    torch.testing.assert_close(layer.self_attn.v_proj(joined), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(layer.mlp.down_proj.weight, source.mlp.down_proj.weight)
    torch.testing.assert_close(drafter.norm.weight, target.final_norm.weight)
    embedding_half = layer.self_attn.q_proj.weight[:, :32]
    assert 0.01 < embedding_half.std() < 0.03


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eagle3_drafts_within_its_vocabulary(temperature: float) -> None:
    target, chosen = tiny_target("llama"), torch.arange(1, 97, 3)
    config = config_for(target, algorithm="eagle3", num_draft_layers=1, block_size=4, draft_vocab_size=len(chosen))
    drafter = build_drafter(config, target, start="target", draft_token_ids=chosen).eval()
    requests = [
        Request(request_id=str(i), prompt_ids=[3 + i, 5, 7], max_new_tokens=24, stop_token_ids=frozenset(), seed=i)
        for i in range(3)
    ]
    sampling = SamplingConfig(temperature=temperature)
    found = {done.request_id: done for done in Decoder(target, drafter, sampling=sampling).generate(requests)}
    drafted = {token for done in found.values() for event in done.rounds for token in event.draft_ids}
    assert drafted
    assert drafted <= set(chosen.tolist())
    if temperature == 0:
        plain = {done.request_id: done for done in Decoder(target, None, sampling=sampling).generate(requests)}
        assert all(found[name].output_ids == plain[name].output_ids for name in plain)
    with pytest.raises(SettingError, match=r"5 draft tokens given.*drafter\.draft_vocab_size"):
        drafter.restrict_vocabulary(torch.arange(5))


@pytest.mark.parametrize("overrides", [{}, {"draft_vocab_size": 40}])
@torch.no_grad()
def test_the_backbone_starts_no_louder_than_the_bigrams(overrides: dict[str, Any]) -> None:
    """The means of both spreads, block by block; and nothing is scaled up."""
    target, generator = tiny_target("llama"), torch.Generator().manual_seed(0)
    target.final_norm.weight.mul_(20)
    text = torch.randint(0, 40, (600,), generator=generator)
    bigrams = bigram_counts(text[:-1], text[1:], 97)
    drafted = torch.arange(40) if overrides.get("draft_vocab_size") else None
    config = config_for(target, **overrides)
    loud, matched = (
        build_drafter(config, target, draft_token_ids=drafted, bigrams=bigrams, match_logits=match)
        for match in (False, True)
    )
    factor = (matched.norm.weight / loud.norm.weight).mean().item()
    torch.testing.assert_close(matched.norm.weight, loud.norm.weight * factor)
    ids = bigrams[0][:, bigrams[1].topk(PROBE_TOKENS // 2).indices].T.flatten()
    hidden_states, spreads = target.capture(ids[None]).hidden_states[0], []
    head, weights = matched.sequential_head, matched.output_weights()
    for anchor in range(1, len(ids) - 1, matched.block_size):
        cache = matched.new_cache(1)
        extend_context(matched, cache, hidden_states[None, :anchor], [anchor], [0])
        states = matched.draft_states(ids[None, anchor], torch.tensor([anchor]), cache)[0]
        for slot in range(min(matched.block_size, len(ids) - anchor)):
            vector = head.bias_vectors(states[None, None, slot], ids[None, None, anchor + slot])[0, 0]
            bias = weights.bias @ vector
            spreads.append((float((weights.head @ states[slot]).std()), float(bias.std())))
    ours, theirs = torch.tensor(spreads).mean(0).tolist()
    assert factor < 1
    assert ours == pytest.approx(theirs, rel=0.05)
    assert match_initial_logits(matched, target, *bigrams) == pytest.approx(1, rel=1e-4)
