from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_builders import HIDDEN, LAYERS, SAMPLES, build, fit, folder_bytes, make_plan, make_row, make_rows, rows_of

from storage.cache.commits import estimate_shard, open_folder
from storage.cache.records import CacheCorrupt, teacher_positions
from storage.cache.shards import BATCH_BYTES, encode_row
from storage.cache.target_cache import (
    CachePlan,
    NonFiniteState,
    StorageFull,
    TargetCache,
    create_or_resume,
    finish,
    is_finished,
    plan_shards,
    write_shard,
)
from storage.codecs.registry import CodecSpec
from storage.files.filesystems import Folder
from storage.identity import IdentityMismatch


@pytest.mark.parametrize("codec", ["bf16", "bf16-planes", "int8", "fp8", "transform"])
def test_rows_come_back(tmp_path: Path, codec: str) -> None:
    build(tmp_path, make_plan(codec))
    cache = TargetCache.open(tmp_path)
    assert len(cache) == len(SAMPLES)
    assert cache.lengths.tolist() == [length for _, length in SAMPLES]
    assert cache.sample_ids == [sample_id for sample_id, _ in SAMPLES]
    for index in np.random.default_rng(0).permutation(len(cache)):
        row, exact = cache.row(int(index)), make_row(*SAMPLES[index])
        assert row.sample_id == exact.sample_id
        assert row.input_ids.tolist() == exact.input_ids.tolist()
        assert row.spans == tuple(exact.spans)
        assert row.extra == exact.extra
        expected = [t for t in range(len(row.input_ids) - 1) if row.loss_mask[t + 1]]
        assert row.teacher_positions.tolist() == expected
        states, last = exact.hidden_states.flatten(1), exact.last_hidden_state[row.teacher_positions]
        assert row.last_hidden_state.shape == last.shape
        if codec.startswith("bf16"):
            assert torch.equal(row.hidden_states, states)
            assert torch.equal(row.last_hidden_state, last)
        else:
            assert (row.hidden_states - states).float().norm() < 0.15 * states.float().norm()
            assert (row.last_hidden_state - last).float().norm() <= 0.15 * last.float().norm()


@pytest.mark.parametrize("name", ["samples.arrow", "codecs/features.safetensors"])
def test_what_every_row_depends_on_is_named_when_it_is_damaged_or_gone(name: str, tmp_path: Path) -> None:
    build(tmp_path, make_plan("int8"))
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1])
    with pytest.raises(CacheCorrupt, match=rf"{name}: its SHA-256 is not .* --repair"):
        TargetCache.open(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CacheCorrupt, match=rf"{name} is missing; every row depends on it: .* --repair"):
        TargetCache.open(tmp_path)


def test_datasets_opens_the_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    build(tmp_path)
    data = datasets.load_from_disk(str(tmp_path))
    assert data["sample_id"][:] == [sample_id for sample_id, _ in SAMPLES]
    table = data.with_format("arrow")[3:4]
    bits = np.frombuffer(table["context"][0].as_buffer(), np.uint16).reshape(-1, LAYERS * HIDDEN)
    exact = make_row(*SAMPLES[3]).hidden_states.flatten(1)
    assert np.array_equal(bits, exact.view(torch.int16).numpy().view(np.uint16))
    assert data.info.dataset_size == sum(p.stat().st_size for p in (tmp_path / "shards").iterdir())


def test_resuming_does_only_what_is_missing(tmp_path: Path) -> None:
    plan = make_plan()
    assert create_or_resume(tmp_path, plan, lambda: fit(plan)) == set()
    write_shard(tmp_path, 2, rows_of(plan, 2))
    assert create_or_resume(tmp_path, plan) == {2}
    assert not is_finished(tmp_path)
    with pytest.raises(ValueError, match=r"of \d+ shards .* not committed \(0, 1, 3"):
        finish(tmp_path)
    with pytest.raises(CacheCorrupt, match=r"not finished \(1 of \d+ shards committed\).*partial=True"):
        TargetCache.open(tmp_path)
    start, stop = plan.shards[2]
    assert TargetCache.open(tmp_path, partial=True).sample_ids == [s for s, _ in SAMPLES[start:stop]]
    build(tmp_path, plan)
    build(tmp_path / "again", plan)
    inside = {name: digest for name, digest in folder_bytes(tmp_path).items() if not name.startswith("again")}
    assert inside == folder_bytes(tmp_path / "again")


def test_a_committed_unit_is_left_alone(tmp_path: Path) -> None:
    plan = make_plan()
    create_or_resume(tmp_path, plan)
    record = write_shard(tmp_path, 0, rows_of(plan, 0))
    assert write_shard(tmp_path, 0, iter(())) == record


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"inputs": {"seed": 2}}, "inputs.seed"),
        ({"contract": {"target_name": "tiny", "target_layer_ids": [0, 1, 3]}}, "contract.target_layer_ids"),
        ({"samples": SAMPLES[::-1]}, "samples.order_sha256"),
        ({"samples": SAMPLES[:-1]}, "samples.count"),
        ({"hidden_states": CodecSpec(name="int8")}, "features.name"),
        ({"tokens_per_shard": 81}, "unit_tokens"),
        ({"teacher_scope": "all"}, "teacher_scope"),
    ],
)
def test_resuming_with_other_settings_is_refused(tmp_path: Path, changes: dict[str, object], path: str) -> None:
    create_or_resume(tmp_path, make_plan())
    with pytest.raises(IdentityMismatch, match="another folder") as caught:
        create_or_resume(tmp_path, make_plan(**changes))  # type: ignore[arg-type]
    assert path in [difference[0] for difference in caught.value.differences]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", ["hidden_states", "last_hidden_state"])
def test_a_state_that_is_not_finite_rejects_its_unit(tmp_path: Path, value: float, part: str) -> None:
    plan = make_plan()
    create_or_resume(tmp_path, plan)
    rows = list(rows_of(plan, 0))
    states = getattr(rows[2], part).clone()
    states.view(len(states), -1)[4, 5] = value
    rows[2] = replace(rows[2], **{part: states})
    with pytest.raises(NonFiniteState, match=r"shard 0 .*'sample-002'.* at token 4, channel 5"):
        write_shard(tmp_path, 0, rows)
    assert create_or_resume(tmp_path, plan) == set()
    assert list((tmp_path / "shards").iterdir()) == []


def test_rows_must_be_the_planned_ones(tmp_path: Path) -> None:
    plan = make_plan()
    create_or_resume(tmp_path, plan)
    rows = list(rows_of(plan, 0))
    with pytest.raises(ValueError, match="row 0: got sample 'sample-001'"):
        write_shard(tmp_path, 0, rows[::-1] if rows[-1].sample_id == "sample-001" else [rows[1], rows[0]])
    with pytest.raises(ValueError, match=f"{len(rows) - 1} rows given, the plan has {len(rows)}"):
        write_shard(tmp_path, 0, rows[:-1])
    with pytest.raises(ValueError, match="no further row"):
        write_shard(tmp_path, 0, [*rows, rows[0]])
    with pytest.raises(ValueError, match="captured states are"):
        write_shard(tmp_path, 0, [replace(rows[0], hidden_states=rows[0].hidden_states[:, :2])])
    assert list((tmp_path / "shards").iterdir()) == []


def test_max_bytes_stops_before_it_is_passed(tmp_path: Path) -> None:
    plan = make_plan()
    with pytest.raises(StorageFull, match=r"the cache needs about .* max_bytes = 40,000: raise max_bytes"):
        create_or_resume(tmp_path, replace(plan, max_bytes=40_000))
    create_or_resume(tmp_path, plan)
    write_shard(tmp_path, 0, rows_of(plan, 0), max_bytes=40_000)
    write_shard(tmp_path, 1, rows_of(plan, 1), max_bytes=40_000)
    with pytest.raises(StorageFull, match=r"shard 2 needs about .* max_bytes = 40,000"):
        write_shard(tmp_path, 2, rows_of(plan, 2), max_bytes=40_000)
    assert sum(path.stat().st_size for path in (tmp_path / "shards").iterdir()) <= 40_000
    with pytest.raises(StorageFull, match="the cache needs"):
        create_or_resume(tmp_path, replace(plan, max_bytes=60_000))
    assert create_or_resume(tmp_path, replace(plan, max_bytes=200_000)) == {0, 1}
    build(tmp_path, replace(plan, max_bytes=200_000))


@pytest.mark.parametrize("codec", ["bf16", "int8", "transform"])
def test_sizes_are_estimated_before_anything_is_captured(tmp_path: Path, codec: str) -> None:
    samples = [(f"sample-{number:03d}", 150 + 10 * number) for number in range(12)]
    plan = make_plan(
        codec, samples=samples, spans=[make_row(*sample).spans for sample in samples], tokens_per_shard=900
    )
    create_or_resume(tmp_path, plan, lambda: fit(plan))
    opened = open_folder(Folder(tmp_path))
    estimated = [estimate_shard(opened, shard) for shard in range(opened.num_shards)]
    build(tmp_path, plan)
    written = [record["bytes"] for record in TargetCache.open(tmp_path)._shards.values()]
    assert sum(estimated) == pytest.approx(sum(written), rel=0.05)


def test_spans_are_planned_and_kept(tmp_path: Path) -> None:
    plan = make_plan(spans=[make_row(*sample).spans for sample in SAMPLES], shortened=["sample-003"])
    build(tmp_path, plan)
    cache = TargetCache.open(tmp_path)
    (tmp_path / "shards").rename(tmp_path / "elsewhere")  # no shard is opened for them
    assert [cache.spans(index) for index in range(len(cache))] == [tuple(make_row(*sample).spans) for sample in SAMPLES]
    assert cache.info()["shortened"] == 1
    create_or_resume(tmp_path / "other", plan)
    wrong = [replace(row, spans=[(0, 1)]) for row in rows_of(plan, 0)]
    with pytest.raises(ValueError, match=r"row 0 \('sample-000'\): its spans are not the plan's \(\(3, 7\),\)"):
        write_shard(tmp_path / "other", 0, wrong)
    with pytest.raises(ValueError, match=r"span \(3, 9\)"):
        make_plan(spans=[[(3, 9)]] * len(SAMPLES))
    with pytest.raises(IdentityMismatch, match=r"samples\.spans_sha256"):
        create_or_resume(tmp_path / "other", make_plan())


def test_spans_not_planned_come_from_the_rows(tmp_path: Path) -> None:
    build(tmp_path)
    assert TargetCache.open(tmp_path).spans(3) == tuple(make_row(*SAMPLES[3]).spans)


def test_float32_and_numpy_states_are_accepted(tmp_path: Path) -> None:
    row = make_row("a", 9)
    plan = make_plan(samples=[("a", 9)])
    create_or_resume(tmp_path, plan)
    bits = row.hidden_states.view(torch.int16).numpy().view(np.uint16)
    write_shard(
        tmp_path, 0, [replace(row, hidden_states=bits, last_hidden_state=row.last_hidden_state.float().numpy())]
    )  # type: ignore[union-attr]
    finish(tmp_path)
    stored = TargetCache.open(tmp_path).row(0)
    assert torch.equal(stored.hidden_states, row.hidden_states.flatten(1))  # type: ignore[union-attr]
    assert torch.equal(stored.last_hidden_state, row.last_hidden_state[stored.teacher_positions])  # type: ignore[index]


def test_a_long_sequence_and_a_single_token(tmp_path: Path) -> None:
    samples = [("long", 32_768), ("single", 1)]
    plan = make_plan("int8", samples=samples)
    create_or_resume(tmp_path, plan, lambda: fit(make_plan("int8")))
    for shard in range(2):
        write_shard(tmp_path, shard, rows_of(plan, shard))
    finish(tmp_path)
    cache = TargetCache.open(tmp_path)
    assert cache.row(0).hidden_states.shape == (32_768, LAYERS * HIDDEN)
    assert cache.row(1).last_hidden_state.shape == (0, HIDDEN)


def test_offsets_never_reach_two_to_the_31(tmp_path: Path) -> None:
    """Batches end by the size of all columns, whichever is the large one, and no row can be too long by itself."""
    samples = [(f"sample-{number}", 5) for number in range(12)]
    plan = make_plan(samples=samples)
    create_or_resume(tmp_path, plan)
    record = write_shard(tmp_path, 0, [replace(make_row(*s), extra={"note": "x" * 1_500_000}) for s in samples])
    assert [batch["rows"] for batch in record["batches"]] == [3, 3, 3, 3]
    assert all(batch["bytes"] < 2 * BATCH_BYTES for batch in record["batches"])
    finish(tmp_path)
    assert [row.extra["note"] for row in TargetCache.open(tmp_path)] == ["x" * 1_500_000] * 12
    with pytest.raises(ValueError, match=r"sample 'b' has 2,147,483,648 tokens, a row holds 134,217,728"):
        make_plan(samples=[("a", 3), ("b", 2**31)])


def test_no_teacher_is_stored_when_none_is_asked_for(tmp_path: Path) -> None:
    plan = make_plan(teacher=None)
    create_or_resume(tmp_path, plan)
    for shard in range(len(plan.shards)):
        write_shard(tmp_path, shard, (replace(row, last_hidden_state=None) for row in rows_of(plan, shard)))
    finish(tmp_path)
    cache = TargetCache.open(tmp_path)
    assert cache.row(2).last_hidden_state.shape == (0, 0)
    assert cache.info()["bytes_per_token"]["teacher"] == 0


def test_a_cache_pickles_and_streams(tmp_path: Path) -> None:
    build(tmp_path)
    cache = pickle.loads(pickle.dumps(TargetCache.open(tmp_path, max_open=2)))
    assert [row.sample_id for row in cache.rows([5, 0, 13])] == ["sample-005", "sample-000", "sample-013"]
    assert len(list(cache)) == len(SAMPLES)
    assert len(cache._open) <= 2
    assert cache.row(-1).sample_id == "sample-013"
    with pytest.raises(IndexError, match="row 14 of 14"):
        cache.row(14)


def test_info_adds_up(tmp_path: Path) -> None:
    plan = build(tmp_path, make_plan(skipped={"too long": ["x", "y"]}))
    info = TargetCache.open(tmp_path).info(corpus_tokens=10**12)
    assert (info["rows"], info["tokens"]) == (len(SAMPLES), plan.tokens)
    parts = info["bytes_per_token"]
    assert parts["context"] == 2 * LAYERS * HIDDEN
    assert parts["context"] + parts["teacher"] + parts["other"] == pytest.approx(parts["all"], abs=0.02)
    assert info["bytes"] == sum(path.stat().st_size for path in (tmp_path / "shards").iterdir())
    assert info["terabytes_at_corpus"] == pytest.approx(parts["all"], abs=0.01)
    assert info["skipped"] == {"too long": 2}
    assert info["contract"] == plan.contract


def test_a_damaged_manifest_or_codec_is_named(tmp_path: Path) -> None:
    build(tmp_path, make_plan("transform"))
    for name in ("manifest.json", "codecs/features.safetensors", "samples.arrow", "COMPLETE.json"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
        with pytest.raises(CacheCorrupt, match=name):
            TargetCache.open(tmp_path)
        (tmp_path / name).write_bytes(data)
    TargetCache.open(tmp_path)


def test_a_missing_cache_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="build one first"):
        TargetCache.open(tmp_path)


def test_units_cover_all_samples_in_order() -> None:
    lengths = [length for _, length in SAMPLES]
    for budget in (1, 40, 80, 10_000):
        shards = plan_shards(lengths, budget)
        assert [i for a, b in shards for i in range(a, b)] == list(range(len(lengths)))
        assert all(sum(lengths[a:b]) <= budget or b - a == 1 for a, b in shards)


def test_plans_refuse_what_cannot_be_cached() -> None:
    for samples, message in (([], "no sample is left"), ([("a", 1), ("a", 2)], "twice"), ([("a", 0)], "0 tokens")):
        with pytest.raises(ValueError, match=message):
            make_plan(samples=samples)
    row, codecs = replace(make_rows()[0], spans=[(3, 9)]), fit(make_plan())
    with pytest.raises(ValueError, match=r"span \(3, 9\)"):
        encode_row(row, codecs, scope="supervised")


def test_teacher_positions_precede_supervised_tokens() -> None:
    assert teacher_positions([(0, 3), (5, 6)], 8).tolist() == [0, 1, 4]
    assert teacher_positions([(1, 3), (3, 4)], 8).tolist() == [0, 1, 2]
    assert teacher_positions([(2, 3)], 4, "all").tolist() == [0, 1, 2, 3]


def test_plans_pickle() -> None:
    plan = make_plan()
    assert isinstance(pickle.loads(pickle.dumps(plan)), CachePlan)
