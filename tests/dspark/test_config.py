"""Settings that cannot work are refused with the value, the allowed range and the option's name."""

from typing import Any

import pytest
from small_models import SIZES, tiny_target
from transformers import Gemma4TextConfig, LlamaConfig, Qwen3Config

from dspark.config import DrafterConfig, SettingError
from dspark.errors import DsparkError
from dspark.families import FAMILIES, as_dict, by_architecture, read_sizes

LLAMA = LlamaConfig(**SIZES)


def build(**overrides: Any) -> DrafterConfig:
    return DrafterConfig.for_target(LLAMA, **({"mask_token_id": 96, "target_layer_ids": (0, 2, 4)} | overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"target_layer_ids": (0, 9)}, r"target_layer_ids is 9; allowed: -1 .* to 4 .*drafter\.target_layer_ids"),
        ({"target_layer_ids": (0, 5)}, r"target_layer_ids is 5; .*last layer"),
        ({"target_layer_ids": (2, 2)}, r"target_layer_ids is \[2, 2\]; .*distinct"),
        ({"target_layer_ids": ()}, r"target_layer_ids is \[\]"),
        ({"mask_token_id": 97}, r"mask_token_id is 97; allowed: 0 to 96.*drafter\.mask_token_id"),
        ({"mask_token_id": None}, r"mask_token_id is None"),
        ({"block_size": 65}, r"block_size is 65; allowed: 1 to 64 .*drafter\.block_size"),
        ({"block_size": 0}, r"block_size is 0"),
        ({"markov_rank": -1}, r"markov_rank is -1"),
        ({"markov_rank": 0, "confidence_head_with_markov": True}, r"confidence_head_with_markov is True.*markov_rank"),
        ({"markov_head_type": "lstm"}, r"no sequential head 'lstm'; known are vanilla, gated, rnn"),
        ({"algorithm": "dflash", "markov_rank": 8, "markov_head_type": "vanilla"}, r"markov_rank is 8.*dflash"),
        ({"block_layout": "mask-first"}, r"block_layout is 'mask-first'; allowed: anchor-first for dspark"),
        ({"block_layout": "sideways"}, r"block_layout is 'sideways'"),
        ({"draft_vocab_size": 98}, r"draft_vocab_size is 98; allowed: 1 to 97"),
        ({"draft_vocab_size": 9, "markov_head_type": "rnn"}, r"draft_vocab_size is 9; .*vanilla"),
        ({"num_draft_layers": 0}, r"num_draft_layers is 0; allowed: 1 or more"),
        ({"algorithm": "eagle3", "num_draft_layers": 2}, r"num_draft_layers is 2; allowed: 1 for eagle3"),
        ({"algorithm": "medusa"}, r"no algorithm 'medusa'.*dspark.*drafter\.algorithm"),
        ({"num_anchors": 0}, r"num_anchors is 0; allowed: 1 or more .*train\.num_anchors"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            r"turns 0\.5 of each head.*target\.model",
        ),
    ],
)
def test_bad_settings(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        build(**overrides)


def test_what_the_target_says_is_carried_over() -> None:
    config = build(rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    assert (config.hidden_size, config.num_key_value_heads, config.head_dim) == (32, 2, 8)
    assert config.rope_parameters["rope_theta"] == 5e5
    assert (config.num_draft_layers, config.block_size, config.markov_rank) == (5, 7, 256)
    plain = build(algorithm="dflash")
    assert (plain.markov_rank, plain.markov_head_type, plain.enable_confidence_head) == (0, None, False)
    eagle = build(algorithm="eagle3", mask_token_id=None)
    assert (eagle.block_size, eagle.num_draft_layers, eagle.mask_token_id) == (7, 1, None)
    one = build(block_size=1)
    assert one.input_slots == 1


def test_rotary_settings_of_old_and_new_configs() -> None:
    old = {**SIZES, "model_type": "llama", "rope_theta": 7e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read_sizes(old, "qwen3")["rope_parameters"] == {"rope_theta": 7e4, "rope_type": "linear", "factor": 2.0}
    new = Qwen3Config(**SIZES, rope_parameters={"rope_theta": 3e5, "rope_type": "default"})
    assert read_sizes(as_dict(new), "qwen3")["rope_parameters"] == {"rope_theta": 3e5, "rope_type": "default"}


def test_gemma4_names_are_read_in_both_generations() -> None:
    new = Gemma4TextConfig(**SIZES, global_head_dim=16, attention_k_eq_v=True, num_global_key_value_heads=1)
    old = {**SIZES, "model_type": "gemma4_text", "global_head_dim": 16, "attention_k_eq_v": True}
    old |= {"num_global_key_value_heads": 1, "hidden_activation": "gelu_pytorch_tanh"}
    for values in (as_dict(new), old):
        sizes = read_sizes(values, "gemma4")
        assert (sizes["head_dim"], sizes["num_key_value_heads"], sizes["attention_k_eq_v"]) == (16, 1, True)


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn"])
def test_rotation_is_the_targets(rope_type: str) -> None:
    """cos and sin equal what transformers' own module makes of the same settings."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from dspark.models.backbone import Rotary

    extra = {
        "default": {},
        "linear": {"factor": 2.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }[rope_type]
    rope = {"rope_theta": 1e4, "rope_type": rope_type, **extra}
    config = LlamaConfig(**SIZES, rope_parameters=dict(rope))
    positions = torch.arange(40)[None]
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    ours = Rotary(DrafterConfig.for_target(config, mask_token_id=1, target_layer_ids=(0,)))(positions, torch.float32)
    torch.testing.assert_close(ours, expected)


def test_a_target_that_is_none_of_the_known_sizes() -> None:
    target = tiny_target("llama")
    assert DrafterConfig.for_target(target.text_config, mask_token_id=5).target_layer_ids == (1, 2, 3)


def test_a_checkpoint_does_not_say_where_the_target_lay() -> None:
    target = {**as_dict(LLAMA), "_name_or_path": "somewhere/private"}
    assert "somewhere" not in str(build().to_checkpoint(target))


def test_two_families_never_share_an_architecture() -> None:
    assert by_architecture(FAMILIES).keys() == {family.dspark_architecture for family in FAMILIES.values()}
    with pytest.raises(DsparkError, match="qwen3 and olmo2 share the architecture Qwen3DSparkModel"):
        by_architecture({**FAMILIES, "olmo2": FAMILIES["qwen3"]})
