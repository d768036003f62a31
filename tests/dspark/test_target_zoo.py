"""No family of transformers is read wrong without a word: each is right, or refused when it is opened."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from target_zoo import FAMILIES, tiny_model, verdict
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dspark.decoding.kv_cache import ATTENTION_NAME, AttentionError, RaggedMask, ragged_attention, ragged_mask
from dspark.decoding.target import Target, TargetError, context_length
from dspark.decoding.target_checks import check_target

TABLE = dict(
    re.findall(
        r"^\| (.+?) \| (right|refused|wrong) \|", (Path(__file__).parents[2] / "docs/targets.md").read_text(), re.M
    )
)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_family_is_right_or_refused_as_the_docs_say(name: str) -> None:
    what, why = verdict(name)
    assert what != "wrong", why
    assert what == TABLE[name], why


def test_the_table_is_of_these_families() -> None:
    assert TABLE.keys() == FAMILIES.keys()
    assert sum(what == "right" for what in TABLE.values()) >= 60


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("gpt_oss", {"s_aux": None}),
        ("gemma2", {"softcap": None}),
        ("gemma2", {"scaling": 0.1}),
        ("mistral", {"attention_mask": RaggedMask(None)}),
    ],
)
def test_an_attention_argument_that_is_dropped_shows_when_a_target_is_opened(
    family: str, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "gemma2", {"attn_logit_softcapping": 1.0})
    target = Target(tiny_model(family), target_layer_ids=(0, 2))
    check_target(target)

    def mutant(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **given: Any) -> Any:
        given |= changed
        mask = given.pop("attention_mask", attention_mask)
        return ragged_attention(module, query, key, value, mask, **given)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, ATTENTION_NAME, mutant)
    with pytest.raises(TargetError, match="states of decoding with drafts differ from the model's own"):
        check_target(target)


def test_attention_arguments_that_are_not_known_are_errors() -> None:
    module, states = torch.nn.Linear(1, 1), torch.zeros(1, 2, 1, 8)
    for mask, given, words in (
        (RaggedMask(None), {"position_bias": states}, "Linear hands position_bias to its attention function"),
        (RaggedMask(None), {"is_causal": False}, "is_causal"),
        (RaggedMask(None), {"dropout": 0.1}, "dropout"),
        (states, {}, "makes its attention mask in its own way"),
    ):
        with pytest.raises(AttentionError, match=words):
            ragged_attention(module, states, states, states, mask, ragged_step=object(), **given)  # type: ignore[arg-type]
    with pytest.raises(AttentionError, match="does not hand keyword arguments"):
        ragged_attention(module, states, states, states, RaggedMask(None))


@pytest.mark.parametrize("size", [1, 5, 64, 8192])
def test_masks_are_told_apart_whatever_their_size(size: int) -> None:
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        chunked_causal_mask_function,
        sliding_window_causal_mask_function,
    )

    assert ragged_mask(mask_function=causal_mask_function) == RaggedMask(None)
    window = sliding_window_causal_mask_function(size)
    assert ragged_mask(mask_function=window, local_size=size) == RaggedMask(size)
    chunked = chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long))
    wrong = [(window, None), (window, size + 1), (bidirectional_mask_function, None)]
    for function, local in wrong + ([(chunked, size)] if size > 1 else []):
        with pytest.raises(AttentionError, match="is not causal"):
            ragged_mask(mask_function=function, local_size=local)
    with pytest.raises(AttentionError, match="mask of its own"):
        ragged_mask(mask_function=causal_mask_function, attention_mask=torch.ones(1, 4))


def test_rotary_factors_that_change_with_length_bound_the_context() -> None:
    target = Target(tiny_model("phi3, LongRoPE"), target_layer_ids=(0, 2))
    assert (target.context_length, target.text_config.max_position_embeddings) == (64, 256)
    with pytest.raises(TargetError, match="65 tokens; its rotary factors change after 64"):
        target.capture(torch.full((2, 65), 5))
    plain = {"max_position_embeddings": 100, "rope_parameters": {"rope_type": "default"}}
    assert context_length(plain) == 100
    by_layer = {"full": {"rope_type": "default"}, "sliding": {"rope_type": "dynamic", "factor": 2.0}}
    assert context_length({"max_position_embeddings": 100, "rope_parameters": by_layer}) == 100
    by_layer["sliding"]["original_max_position_embeddings"] = 40
    assert context_length({"max_position_embeddings": 100, "rope_parameters": by_layer}) == 40
    assert context_length({}) is None


def test_states_that_are_not_finite_are_named() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0] = torch.inf
    with pytest.raises(TargetError, match=r"its own states are not finite in torch\.float32 .*target\.dtype"):
        check_target(Target(model, target_layer_ids=(0, 2)))


def test_half_precision_passes_within_its_rounding() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        found = check_target(Target(tiny_model("qwen3").to(dtype), target_layer_ids=(0, 2)))
        assert 0 < found.decoded < found.allowed


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("doge", "it reads its attention mask outside its attention function"),
        ("qwen3_5_text", "it keeps states besides keys and values"),
        ("minimax", "it keeps states besides keys and values"),
        ("stablelm", "StableLmAttention does not hand keyword arguments to its attention function"),
    ],
)
def test_reasons_are_in_plain_words_and_stand_in_the_docs(family: str, words: str) -> None:
    what, why = verdict(family)
    assert what == "refused"
    assert words in why
    assert "Ragged" not in why
    assert f"| {family} | refused | {why} |" in (Path(__file__).parents[2] / "docs/targets.md").read_text()
