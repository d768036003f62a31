"""Caches made from caches: what is copied keeps its bits, what is coded anew equals a cache built so from the start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cache_builders import HIDDEN, SAMPLES, build, folder_bytes, make_plan, make_row

from storage.cache.deepspec_import import import_deepspec
from storage.cache.records import CacheCorrupt
from storage.cache.rewrite import merge, recode
from storage.cache.target_cache import TargetCache
from storage.codecs.base import TargetParts
from storage.codecs.measure import snr_db
from storage.codecs.registry import CodecSpec
from storage.identity import IdentityMismatch

INT8, TRANSFORM = CodecSpec(name="int8"), CodecSpec(name="transform")
HALVES = SAMPLES[:6], SAMPLES[6:]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exact")
    build(root, make_plan(skipped={"empty": ["e"]}, shortened=["sample-003"]))
    return root


def raw_parts(root: Path, part: str) -> list[bytes]:
    cache = TargetCache.open(root)
    return [bytes(cache.raw_row(index)[part]) for index in range(len(cache))]


def checksums(root: Path) -> list[int]:
    cache = TargetCache.open(root)
    return [cache.raw_row(index)["checksum"] for index in range(len(cache))]


def test_a_recoded_cache_has_the_same_rows(exact: Path, tmp_path: Path) -> None:
    recode(exact, tmp_path / "new", hidden_states=TRANSFORM, teacher=INT8)
    cache, old = TargetCache.open(tmp_path / "new"), TargetCache.open(exact)
    assert cache.verify() == []
    assert cache.info()["skipped"] == {"empty": 1}
    assert cache.info()["shortened"] == 1
    assert cache.manifest["fields"]["inputs"]["recoded_from"] == old.identity
    assert cache.manifest["codecs"]["features"]["measured"]["snr_db"] > 15
    for row, before in zip(cache, old, strict=True):
        assert (row.sample_id, row.spans, row.extra) == (before.sample_id, before.spans, before.extra)
        assert row.input_ids.tolist() == before.input_ids.tolist()
    states, before = (torch.cat([r.hidden_states[1:].float() for r in c]) for c in (cache, old))
    assert snr_db(before, states) > 15


def test_a_part_without_a_codec_keeps_its_bytes(exact: Path, tmp_path: Path) -> None:
    recode(exact, tmp_path / "new", teacher=INT8)
    assert raw_parts(tmp_path / "new", "context") == raw_parts(exact, "context")
    assert TargetCache.open(tmp_path / "new").codecs.teacher.name == "int8"  # type: ignore[union-attr]
    recode(tmp_path / "new", tmp_path / "newer", hidden_states=INT8)
    assert raw_parts(tmp_path / "newer", "teacher") == raw_parts(tmp_path / "new", "teacher")


def test_there_and_back_loses_nothing(exact: Path, tmp_path: Path) -> None:
    recode(
        exact, tmp_path / "planes", hidden_states=CodecSpec(name="bf16-planes"), teacher=CodecSpec(name="bf16-planes")
    )
    recode(tmp_path / "planes", tmp_path / "back", hidden_states=CodecSpec(name="bf16"), teacher=CodecSpec(name="bf16"))
    for part in ("context", "teacher"):
        assert raw_parts(tmp_path / "back", part) == raw_parts(exact, part)
    assert checksums(tmp_path / "back") == checksums(exact)


def test_workers_write_the_same_cache(exact: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    recode(exact, tmp_path / "here", hidden_states=TRANSFORM)
    recode(
        exact,
        tmp_path / "workers",
        hidden_states=TRANSFORM,
        workers=2,
        on_shard=lambda record: seen.append(record["unit"]),
    )
    assert folder_bytes(tmp_path / "here") == folder_bytes(tmp_path / "workers")
    assert seen == list(range(len(make_plan().shards)))


def test_recoding_goes_on_where_it_stopped(exact: Path, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(record: object) -> None:
        seen.append(record)
        if len(seen) == 3:
            raise Stop

    seen: list[object] = []
    with pytest.raises(Stop):
        recode(exact, tmp_path / "new", hidden_states=INT8, on_shard=stop)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "new" / "shards").iterdir()}
    assert len(before) == 3
    recode(exact, tmp_path / "new", hidden_states=INT8)
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "new" / "shards").iterdir()}
    assert before.items() <= after.items()
    recode(exact, tmp_path / "straight", hidden_states=INT8)
    assert folder_bytes(tmp_path / "new") == folder_bytes(tmp_path / "straight")
    with pytest.raises(IdentityMismatch, match=r"features\.name"):
        recode(exact, tmp_path / "new", hidden_states=TRANSFORM)


def test_two_at_once_do_not_write_to_one_folder(exact: Path, tmp_path: Path) -> None:
    def another(_: object) -> None:
        with pytest.raises(ValueError, match="another process is writing"):
            recode(exact, tmp_path / "new", hidden_states=INT8)
        refused.append(True)

    refused: list[bool] = []
    recode(exact, tmp_path / "new", hidden_states=INT8, on_shard=another)
    assert refused
    recode(exact, tmp_path / "straight", hidden_states=INT8)
    assert folder_bytes(tmp_path / "new") == folder_bytes(tmp_path / "straight")
    recode(exact, tmp_path / "new", hidden_states=INT8)  # the lock went with its holder


def test_what_cannot_be_recoded_says_why(exact: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing would change"):
        recode(exact, tmp_path / "new")
    recode(
        exact, tmp_path / "components", hidden_states=CodecSpec(name="transform", settings={"output": "coordinates"})
    )
    with pytest.raises(ValueError, match="keeps 96 components of the captured states"):
        recode(tmp_path / "components", tmp_path / "new", hidden_states=INT8)
    recode(tmp_path / "components", tmp_path / "new", teacher=INT8)  # the hidden states stay as they are
    assert raw_parts(tmp_path / "new", "context") == raw_parts(tmp_path / "components", "context")
    shard = next((tmp_path / "components" / "shards").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CacheCorrupt, match=shard.name):
        recode(tmp_path / "components", tmp_path / "broken", teacher=TRANSFORM)


def test_a_teacher_without_exact_states_is_not_coded_anew(exact: Path, tmp_path: Path) -> None:
    target = TargetParts(head=torch.randn(200, HIDDEN, generator=torch.Generator().manual_seed(0)))
    recode(exact, tmp_path / "corrected", teacher=CodecSpec(name="corrected"), target=target)
    row = TargetCache.open(tmp_path / "corrected").row(0)
    assert row.teacher is not None
    assert row.teacher.top_ids is not None
    with pytest.raises(ValueError, match="'corrected', which has no exact last states"):
        recode(tmp_path / "corrected", tmp_path / "new", teacher=INT8)
    recode(
        exact, tmp_path / "components", hidden_states=CodecSpec(name="transform", settings={"output": "coordinates"})
    )
    with pytest.raises(ValueError, match="needs the captured states"):
        recode(tmp_path / "components", tmp_path / "new", teacher=CodecSpec(name="recomputed"), target=target)


def test_merged_halves_hold_the_rows_bit_by_bit(exact: Path, tmp_path: Path) -> None:
    for name, samples in zip("ab", HALVES, strict=True):
        build(tmp_path / name, make_plan(samples=samples, inputs={"part": name}))
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "whole")
    whole = TargetCache.open(tmp_path / "whole")
    assert whole.sample_ids == [sample_id for sample_id, _ in SAMPLES]
    assert raw_parts(tmp_path / "whole", "context") == raw_parts(exact, "context")
    assert checksums(tmp_path / "whole") == checksums(exact)
    assert whole.verify() == []
    parts = [TargetCache.open(tmp_path / name).identity for name in "ab"]
    assert whole.manifest["fields"]["inputs"] == {"merged_from": parts}
    for row, sample in zip(whole, SAMPLES, strict=True):
        assert row.spans == tuple(make_row(*sample).spans)


def test_ids_that_meet_are_numbered(exact: Path, tmp_path: Path) -> None:
    build(tmp_path / "other", make_plan(inputs={"part": "other"}))
    with pytest.raises(ValueError, match=r"sample 'sample-000' is in .* and in .*--number-ids"):
        merge([exact, tmp_path / "other"], tmp_path / "whole")
    merge([exact, tmp_path / "other"], tmp_path / "whole", number_ids=True)
    whole = TargetCache.open(tmp_path / "whole")
    assert whole.sample_ids == [f"{number}/{sample_id}" for number in (0, 1) for sample_id, _ in SAMPLES]
    assert whole.verify() == []
    assert [row.sample_id for row in whole] == whole.sample_ids
    assert raw_parts(tmp_path / "whole", "context") == 2 * raw_parts(exact, "context")


def test_codecs_of_another_cache_make_two_mergeable(tmp_path: Path) -> None:
    for name, samples in zip("ab", HALVES, strict=True):
        build(tmp_path / name, make_plan("transform", samples=samples))
        build(tmp_path / f"{name}-exact", make_plan(samples=samples))
    with pytest.raises(ValueError, match=r"features codecs .* fitted on different samples.*--codecs-of"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "whole")
    recode(tmp_path / "b-exact", tmp_path / "b-like-a", codecs_of=tmp_path / "a")
    merge([tmp_path / "a", tmp_path / "b-like-a"], tmp_path / "whole")
    assert raw_parts(tmp_path / "whole", "context")[:6] == raw_parts(tmp_path / "a", "context")


def test_what_cannot_be_merged_says_why(exact: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least two"):
        merge([exact], tmp_path / "whole")
    with pytest.raises(ValueError, match="are the same cache"):
        merge([exact, exact], tmp_path / "whole", number_ids=True)
    contract = {"target_name": "tiny", "target_layer_ids": [0, 1, 5]}
    build(tmp_path / "other", replace(make_plan(), contract=contract))
    with pytest.raises(ValueError, match=r"differ in\n  contract\.target_layer_ids: \[0, 1, 2\] and \[0, 1, 5\]"):
        merge([exact, tmp_path / "other"], tmp_path / "whole")


def test_a_cache_is_not_made_inside_one_that_it_is_made_from(
    exact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(exact)
    monkeypatch.chdir(exact.parent)
    before = sorted(exact.rglob("*"))
    for source, new, message in (
        (exact, f"{exact}/../{exact.name}/new", "lies inside"),
        (exact.name, f"../{exact.parent.name}/{exact.name}/new", "lies inside"),
        (tmp_path / "link", exact / "new", "lies inside"),
        (exact, tmp_path / "link" / "new", "lies inside"),
        (exact, f"{exact}/shards/..", "is the cache that is read"),
    ):
        with pytest.raises(ValueError, match=message):
            recode(source, new, hidden_states=CodecSpec(name="int8"))
        with pytest.raises(ValueError, match=message):
            import_deepspec(source, new)
    assert sorted(exact.rglob("*")) == before
