"""The target's captured states against transformers' own hidden states."""

from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from dspark.config import SettingError, default_layer_ids
from dspark.decoding.target import Target, TargetError
from dspark.decoding.target_checks import check_target

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


def tiny_llama(*, tied: bool = True, layer_ids: tuple[int, ...] = (-1, 1, 3)) -> Target:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    return Target(model, target_layer_ids=layer_ids, name="tiny")


@pytest.mark.parametrize("tied", [True, False])
def test_features_are_layer_outputs_and_last_is_after_the_norm(tied: bool) -> None:
    target = tiny_llama(tied=tied)
    ids = torch.randint(0, 97, (2, 11))
    captured = target.capture(ids, logits=True)
    own = target.model(input_ids=ids, output_hidden_states=True)
    expected = torch.cat([own.hidden_states[layer + 1] for layer in target.layer_ids], -1)
    torch.testing.assert_close(captured.hidden_states, expected)
    torch.testing.assert_close(captured.last_hidden_state, own.hidden_states[-1])
    torch.testing.assert_close(captured.logits, own.logits)


def test_a_batch_of_mixed_lengths_equals_one_by_one() -> None:
    target = tiny_llama()
    rows = [torch.randint(0, 97, (n,)) for n in (13, 4, 9)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    batched = target.capture(ids, mask)
    for index, row in enumerate(rows):
        alone = target.capture(row[None])
        torch.testing.assert_close(
            batched.hidden_states[index, : len(row)], alone.hidden_states[0], atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(
            batched.last_hidden_state[index, : len(row)], alone.last_hidden_state[0], atol=1e-5, rtol=1e-5
        )


def test_left_padding_keeps_its_mask() -> None:
    target = tiny_llama()
    row = torch.randint(1, 97, (6,))
    ids = torch.cat([torch.zeros(3, dtype=torch.long), row])[None]
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    torch.testing.assert_close(
        target.capture(ids, mask).last_hidden_state[0, 3:],
        target.capture(row[None]).last_hidden_state[0],
        atol=1e-5,
        rtol=1e-5,
    )


def test_soft_cap_is_part_of_the_logits() -> None:
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=3.0))
    check_target(Target(model, target_layer_ids=(1,)))


def test_a_head_that_does_more_is_refused() -> None:
    target = tiny_llama()
    target.final_logit_softcapping = 0.5
    with pytest.raises(TargetError, match="the head times the last hidden states differ"):
        check_target(target)


def test_goldens_open_and_hash(golden: Path) -> None:
    for name in ("dspark_vanilla", "dspark_gemma4_softcap"):
        target = Target.open(golden / name / "target", dtype="float32", device="cpu", target_layer_ids=(0, 2, 4))
        assert target.hashes() == target.hashes()
        assert len(set(target.hashes().values())) == 2  # no tokenizer and no template: both hash nothing


def test_paper_layers() -> None:
    assert default_layer_ids(36) == (1, 9, 17, 25, 33)
    assert default_layer_ids(40) == (1, 10, 19, 28, 37)
    assert default_layer_ids(48) == (5, 17, 29, 41, 46)
    assert default_layer_ids(30) == (1, 8, 14, 20, 27)
    for layers in range(1, 64):
        ids = default_layer_ids(layers)
        assert ids == tuple(sorted(set(ids)))
        assert ids[-1] < layers - 1 or layers == 1


def test_bad_layer_is_named() -> None:
    with pytest.raises(SettingError, match=r"target_layer_ids has 6.*-1.*4, and 5 is its last hidden state"):
        tiny_llama(layer_ids=(6,))


def test_missing_target_is_named() -> None:
    with pytest.raises(TargetError, match=r"target\.model"):
        Target.open("./no/such/folder", device="cpu")
