"""The contract compares, names what differs and what cures it, and leaves block fields open for a cache."""

from dataclasses import replace

import pytest

from dspark.contract import Contract, ContractMismatch

CACHE = Contract(
    target_name="t",
    target_revision=None,
    weights_sha256="w",
    tokenizer_sha256="k",
    chat_template_sha256="c",
    thinking="off",
    target_layer_ids=(1, 3),
)


def test_round_trip() -> None:
    assert Contract.from_dict(CACHE.to_dict()) == CACHE


def test_open_block_fields_agree_with_anything() -> None:
    checkpoint = replace(CACHE, block_layout="anchor-first", block_size=7, mask_token_id=5)
    checkpoint.require_same(CACHE)
    assert checkpoint.differences(replace(checkpoint, block_size=5)) == [("block_size", 7, 5)]


def test_the_same_weights_may_lie_elsewhere() -> None:
    elsewhere = replace(CACHE, target_name="/models/t", target_revision="f00")
    CACHE.require_same(elsewhere)
    assert [name for name, _, _ in CACHE.differences(replace(elsewhere, weights_sha256="x"))] == [
        "target_name",
        "target_revision",
        "weights_sha256",
    ]


def test_every_difference_is_named() -> None:
    other = replace(CACHE, thinking="on", target_layer_ids=(2, 3), weights_sha256="x")
    with pytest.raises(ContractMismatch) as caught:
        CACHE.require_same(other)
    for name in ("thinking", "target_layer_ids", "weights_sha256", "drafter.target_layer_ids"):
        assert name in str(caught.value)


def test_nothing_is_filled_in() -> None:
    values = CACHE.to_dict()
    del values["final_norm_applied"]
    with pytest.raises(ValueError, match="lacks final_norm_applied"):
        Contract.from_dict(values)
    with pytest.raises(ValueError, match="unknown fields extra"):
        Contract.from_dict(CACHE.to_dict() | {"extra": 1})
    with pytest.raises(ValueError, match="thinking"):
        replace(CACHE, thinking="maybe")
