"""The contract compares, names what differs and what cures it, and leaves block fields open for a cache."""

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.contract import Contract, ContractMismatch
from dspark.manifest import CheckpointError

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


def test_a_folders_contract_is_read_or_refused(tmp_path: Path) -> None:
    assert Contract.read(tmp_path) is None
    CACHE.write(tmp_path)
    assert Contract.read(tmp_path) == CACHE
    for cut in ({"target_name": "t"}, {**CACHE.to_dict(), "more": 1}, {**CACHE.to_dict(), "weights_sha256": None}):
        (tmp_path / "contract.json").write_text(json.dumps(cut))
        with pytest.raises(CheckpointError, match=r"contract\.json: .*: fetch or publish it again"):
            Contract.read(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.fuzz
@settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "100")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(changes=st.dictionaries(st.sampled_from(list(CACHE.to_dict())), JSON, max_size=3), data=st.binary(max_size=40))
def test_any_contract_is_read_or_refused(changes: dict[str, object], data: bytes, tmp_path: Path) -> None:
    for content in (data, json.dumps({**CACHE.to_dict(), **changes}).encode(), json.dumps(changes).encode()):
        (tmp_path / "contract.json").write_bytes(content)
        with suppress(CheckpointError):
            found = Contract.read(tmp_path)
            assert found is not None
            assert all(isinstance(layer, int) for layer in found.target_layer_ids)
