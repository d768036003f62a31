from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from storage.cache.deepspec_import import DeepSpecCache, import_deepspec, spans_of
from storage.cache.records import teacher_positions
from storage.cache.target_cache import TargetCache
from storage.codecs.measure import snr_db
from storage.codecs.registry import CodecSpec

GOLDEN = Path(__file__).parents[1] / "golden"
SOURCE = GOLDEN / "deepspec_target_cache_v2"
EXPECTED = GOLDEN / "deepspec_target_cache_v2_expected.npz"


def bits(states: torch.Tensor) -> np.ndarray:
    return states.contiguous().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("scope", ["supervised", "all"])
def test_the_conformance_cache_imports_bit_exact(tmp_path: Path, scope: str) -> None:
    record = import_deepspec(SOURCE, tmp_path, teacher_scope=scope, tokens_per_shard=40)  # type: ignore[arg-type]
    expected = np.load(EXPECTED)
    cache = TargetCache.open(tmp_path)
    assert record["rows"] == len(cache) == 7
    for index, row in enumerate(cache):
        assert row.sample_id == str(index)
        assert np.array_equal(row.input_ids.numpy(), expected[f"{index}/input_ids"])
        assert np.array_equal(row.loss_mask.numpy(), expected[f"{index}/loss_mask"] != 0)
        assert np.array_equal(bits(row.hidden_states), expected[f"{index}/target_hidden_states_bf16bits"])
        last = expected[f"{index}/target_last_hidden_states_bf16bits"]
        positions = teacher_positions(row.spans, len(row.input_ids), scope)
        assert np.array_equal(row.teacher_positions.numpy(), positions)
        assert np.array_equal(bits(row.last_hidden_state), last[positions])
    assert cache.verify() == []
    assert cache.contract["target_layer_ids"] == [0, 2, 4]


def test_it_can_be_recoded_on_the_way(tmp_path: Path) -> None:
    import_deepspec(SOURCE, tmp_path, hidden_states=CodecSpec(name="transform"), teacher=CodecSpec(name="int8"))
    cache, exact = TargetCache.open(tmp_path), DeepSpecCache(SOURCE)
    states = torch.cat([row.hidden_states[1:].float() for row in cache])
    assert snr_db(torch.cat([exact.sample(i).states[1:].float() for i in range(7)]), states) > 18


def test_importing_again_does_nothing(tmp_path: Path) -> None:
    first = import_deepspec(SOURCE, tmp_path)
    assert import_deepspec(SOURCE, tmp_path) == first


def test_another_layer_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"captures layers \[0, 2\], .* holds \[0, 2, 4\]"):
        import_deepspec(SOURCE, tmp_path, contract={"target_layer_ids": [0, 2]})


def test_a_short_shard_or_index_is_named(tmp_path: Path) -> None:
    copy = shutil.copytree(SOURCE, tmp_path / "copy")
    for path in copy.iterdir():
        path.chmod(0o644)
    shard = copy / "shard-00003.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"shard-00003\.bin: sample 4 should lie at"):
        DeepSpecCache(copy).sample(4)
    index = copy / "samples.idx"
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(ValueError, match="391 bytes, 7 samples take 392"):
        DeepSpecCache(copy)
    with pytest.raises(FileNotFoundError, match="not a cache of the reference"):
        DeepSpecCache(tmp_path)


def test_masks_become_spans() -> None:
    assert spans_of(np.array([0, 1, 1, 0, 1])) == [(1, 3), (4, 5)]
    assert spans_of(np.zeros(3)) == []
    assert spans_of(np.ones(3)) == [(0, 3)]
