"""Every file of a cache, of the reference's cache and of a checkpoint as somebody else may have written it.

Whatever the bytes are, a reader gets the right rows or a StorageError: it neither reads nor writes outside the folder,
nor takes memory that a file merely announces, nor ends with another exception.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import zstandard
from cache_builders import SAMPLES, build, make_plan, make_row
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.cache.deepspec_import import INDEX, RECORD, DeepSpecCache, import_deepspec
from storage.cache.records import seal, unseal
from storage.cache.rewrite import recode
from storage.cache.target_cache import TargetCache
from storage.cache.verify import verify
from storage.checkpoints import complete_checkpoints, damaged_files, load_checkpoint, newest_checkpoint, save_checkpoint
from storage.codecs.base import Codec
from storage.codecs.fitting import fit_codec
from storage.codecs.registry import CodecSpec, codec_class, codec_names
from storage.codecs.symbols import decompressed
from storage.errors import StorageError, UnsafeName
from storage.files.filesystems import Folder
from storage.files.local_copy import LocalCopy
from storage.files.names import checked_name, path_inside

SOURCE = Path(__file__).parents[1] / "golden" / "deepspec_target_cache_v2"
BAD_NAMES = [
    "../x",
    "a/../../x",
    "/etc/passwd",
    "..\\x",
    "a\0b",
    "",
    ".",
    "a//b",
    "C:x",
    "a/",
    "x" * 300,
    7,
    None,
    ["a"],
]
pytestmark = pytest.mark.fuzz
few = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "40")), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
Json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([2**70, -1, "../x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound") / "cache"
    build(root, make_plan("transform", spans=[make_row(*sample).spans for sample in SAMPLES]))
    return root


@pytest.fixture
def cache(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "inner" / "cache"))


def reseal(root: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a sealed record and everything that has its hash, as somebody would who means harm."""
    record = unseal((root / name).read_bytes(), name)
    change(record)
    (root / name).write_bytes(seal(record))
    if name == "manifest.json":
        digest = hashlib.sha256((root / name).read_bytes()).hexdigest()
        reseal(root, "COMPLETE.json", lambda complete: complete["files"].update({name: digest}))


def sealed(value: Any) -> bytes:
    """A sealed record, or plain JSON of what cannot be one."""
    try:
        return seal(value)
    except (ValueError, TypeError):
        return json.dumps(value).encode()


def read_all(root: Path) -> None:
    """Read as training, `info` and `verify` do."""
    cache = TargetCache.open(root)
    cache.info()
    for index in range(len(cache)):
        row = cache.row(index)
        expected = make_row(*SAMPLES[index])
        assert row.sample_id == expected.sample_id
        assert row.input_ids.tolist() == list(expected.input_ids)
        assert row.spans == tuple(expected.spans)
        difference = row.hidden_states.float() - expected.hidden_states.flatten(1).float()
        assert difference.abs().max() < 4  # in steps of a quarter of a standard deviation, of at most 5


def read_or_refuse(root: Path) -> None:
    with suppress(StorageError, FileNotFoundError):
        read_all(root)


# Names


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_leads_elsewhere_is_refused(name: Any, tmp_path: Path) -> None:
    for refuse in (
        lambda: checked_name(name, "manifest.json"),
        lambda: path_inside(tmp_path, name, "manifest.json"),
        lambda: Folder(tmp_path).inside(name, "manifest.json"),
    ):
        with pytest.raises(UnsafeName, match=r"^manifest\.json: "):
            refuse()


def test_a_link_out_of_the_folder_is_refused_and_one_inside_is_not(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret").write_bytes(b"s")
    (root / "file").write_bytes(b"f")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "up").symlink_to(tmp_path)
    (root / "in").symlink_to("file")
    (root / "circle").symlink_to("circle")
    for name in ("out", "up/secret", "circle/x"):
        with pytest.raises(UnsafeName, match="manifest"):
            path_inside(root, name, "manifest")
    assert path_inside(root, "in", "manifest").read_bytes() == b"f"
    (tmp_path / "link").symlink_to(root)  # the folder itself may be one
    assert path_inside(tmp_path / "link", "file", "manifest").read_bytes() == b"f"


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "a\0b"])
def test_a_folder_touches_nothing_outside_itself(name: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "inner")
    for use in (folder.read, folder.exists, folder.remove, folder.size, lambda n: folder.write(n, b"x")):
        with pytest.raises(UnsafeName):
            use(name)
    assert list(tmp_path.iterdir()) == []


def test_a_store_s_url_with_two_dots_is_refused() -> None:
    with pytest.raises(StorageError, match=r"leave `\.\.` out"):
        Folder("s3://bucket/a/../b?region=us-east-1")


ELSEWHERE = ["../../stolen.arrow", "/etc/passwd", "shards/../../../x.arrow", "shards\\x", "shards/\0", "manifest.json"]


@pytest.mark.parametrize("shard", ELSEWHERE)
def test_a_shard_s_name_in_complete_decides_no_path(shard: str, cache: Path, tmp_path: Path) -> None:
    """The name is read and written neither where the cache lies nor in a local copy of it."""

    def change(complete: dict[str, Any]) -> None:
        complete["shards"][0]["shard"] = shard

    (cache.parent.parent / "stolen.arrow").write_bytes((cache / "shards/unit-000000.arrow").read_bytes())
    reseal(cache, "COMPLETE.json", change)
    before = sorted(tmp_path.rglob("*"))
    for use in (
        lambda: TargetCache.open(cache),
        lambda: TargetCache.open(cache, local_copy=tmp_path / "inner/copy"),
        lambda: recode(cache, tmp_path / "inner/new", hidden_states=CodecSpec(name="int8")),
    ):
        with pytest.raises(StorageError, match=r"COMPLETE\.json.*unit-000000"):
            use()
    assert any("unit-000000" in str(problem) for problem in verify(cache))
    assert set(tmp_path.rglob("*")) - set(before) <= {tmp_path / "inner/copy", tmp_path / "inner/new"}
    if shard.startswith(".."):
        record = {"shard": shard, "bytes": 10, "sha256": "0" * 64}
        with pytest.raises(UnsafeName, match=r"stolen\.arrow"):
            LocalCopy(Folder(cache), tmp_path / "inner/copy").fetch(record)
        assert not list((tmp_path / "inner/copy/shards").iterdir())


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a\\b"])
def test_the_names_in_a_manifest_lead_nowhere(name: str, cache: Path) -> None:
    outside = cache.parent / "outside"
    for place in ("samples", "codecs"):

        def change(manifest: dict[str, Any], place: str = place) -> None:
            entry = manifest[place] if place == "samples" else manifest[place]["features"]
            outside.write_bytes((cache / entry["file"]).read_bytes())
            entry["file"] = name

        kept = (cache / "manifest.json").read_bytes(), (cache / "COMPLETE.json").read_bytes()
        reseal(cache, "manifest.json", change)
        with pytest.raises(UnsafeName, match=r"manifest\.json: it names"):
            TargetCache.open(cache)
        (cache / "manifest.json").write_bytes(kept[0])
        (cache / "COMPLETE.json").write_bytes(kept[1])
    reseal(cache, "COMPLETE.json", lambda complete: complete["files"].update({name: "0" * 64}))
    with pytest.raises(UnsafeName, match=r"COMPLETE\.json: it names"):
        TargetCache.open(cache)
    assert verify(cache)


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "COMPLETE.json", "samples.arrow", "codecs/features.safetensors", "shards/unit-000001.arrow"],
)
def test_a_file_of_a_cache_that_is_a_link_out_of_it_is_refused(name: str, cache: Path) -> None:
    (cache / name).rename(cache.parent / "moved")
    (cache / name).symlink_to(cache.parent / "moved")
    with pytest.raises(UnsafeName, match=r"a link to .* put the file itself there"):
        read_all(cache)
    assert verify(cache)


def test_commit_records_of_an_unfinished_cache_lead_nowhere(cache: Path) -> None:
    (cache / "COMPLETE.json").unlink()
    (cache.parent / "x.arrow").write_bytes((cache / "shards/unit-000000.arrow").read_bytes())
    reseal(cache, "commits/unit-000000.json", lambda record: record.update(shard="../x.arrow"))
    rows = len(TargetCache.open(cache, partial=True))
    assert rows == len(SAMPLES) - 3  # the shard counts as not built
    assert [problem.file for problem in verify(cache)] == ["commits/unit-000000.json"]


@pytest.fixture
def deepspec(tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(SOURCE, tmp_path / "inner" / "source"))
    for path in (copy, *copy.iterdir()):
        path.chmod(0o755)
    return copy


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("name", ["../x.bin", "/etc/passwd", "a\\b", "a\0b", "link.bin"])
def test_the_reference_s_manifest_leads_nowhere(name: str, deepspec: Path) -> None:
    (deepspec.parent / "x.bin").write_bytes((deepspec / "shard-00000.bin").read_bytes())
    (deepspec / "link.bin").symlink_to(deepspec.parent / "x.bin")
    edit(deepspec / "manifest.json", lambda value: value["shards"][0].update(file_name=name))
    with pytest.raises(UnsafeName, match=r"manifest\.json: "):
        DeepSpecCache(deepspec)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", 0, "hidden_size: input should be greater than or equal to 1"),
        ("hidden_size", 10**30, "hidden_size"),
        ("hidden_size", "32", "hidden_size: input should be a valid integer, '32' stands there"),
        ("hidden_size", None, "hidden_size"),
        ("num_samples", -1, "num_samples"),
        ("num_samples", 10**11, "392 bytes, 100000000000 samples take"),
        ("num_samples", 1.5, "num_samples"),
        ("target_layer_ids", [], "target_layer_ids"),
        ("target_layer_ids", [0, 10**9], "target_layer_ids.1"),
        ("target_layer_ids", "0,1", "target_layer_ids"),
        ("shards", {"0": "x"}, "shards"),
        ("shards", [{"shard_id": 0}], "shards.0.file_name: field required"),
        ("target_model_name_or_path", 5, "target_model_name_or_path"),
        ("version", "2", "version is '2', not 2"),
    ],
)
def test_impossible_numbers_in_the_reference_s_manifest(key: str, value: Any, message: str, deepspec: Path) -> None:
    edit(deepspec / "manifest.json", lambda manifest: manifest.update({key: value}))
    with pytest.raises(StorageError, match=message) as caught:
        DeepSpecCache(deepspec)
    assert str(deepspec) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b'{"version": 2,\n"hidden',
        b"\0",
        b"[" * 100_000,
        b'{"version": ' + b"9" * 5000 + b"}",
        b'"\\ud800"',
        b"\xff\xfe",
        b"NaN",
        b"[1]",
        b"null",
    ],
)
def test_json_that_is_none_is_one_message_with_its_file(text: bytes, deepspec: Path, cache: Path) -> None:
    (deepspec / "manifest.json").write_bytes(text)
    with pytest.raises(StorageError, match=r"source/manifest\.json"):
        DeepSpecCache(deepspec)
    for name in ("COMPLETE.json", "manifest.json"):
        kept = (cache / name).read_bytes()
        (cache / name).write_bytes(text)
        with pytest.raises(StorageError, match=rf"cache/{name}"):
            TargetCache.open(cache)
        assert name in str(verify(cache)[0])
        (cache / name).write_bytes(kept)


@pytest.mark.parametrize(
    "change",
    [
        {2: -1},
        {2: 2**30},
        {1: 99},
        {3: -8},
        {6: 2**62},
        {7: 2**62},
    ],
)
def test_impossible_numbers_in_the_reference_s_index(change: dict[int, int], deepspec: Path, tmp_path: Path) -> None:
    data = bytearray((deepspec / INDEX).read_bytes())
    record = list(RECORD.unpack_from(data, 3 * RECORD.size))
    for place, value in change.items():
        record[place] = value
    RECORD.pack_into(data, 3 * RECORD.size, *record)
    (deepspec / INDEX).write_bytes(data)
    with pytest.raises(StorageError, match=r"samples\.idx, record 3|shard-\d+\.bin: sample 3 should lie at"):
        import_deepspec(deepspec, tmp_path / "new")


def test_a_stray_file_that_ends_like_a_temporary_one_is_named_and_left(cache: Path, deepspec: Path) -> None:
    for root in (cache, deepspec):
        (root / "x.writing").write_bytes(b"mine")
        Folder(root).remove_dead_temporaries(everything=True)
        assert (root / "x.writing").exists()
    read_all(cache)
    assert [str(problem) for problem in verify(cache)] == ["x.writing: not part of the cache"]
    assert len(DeepSpecCache(deepspec)) == 7


# Checkpoints


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path, 4, {"w": torch.ones(2)}, {"step": 4})


@pytest.mark.parametrize("name", ["../secret.pt", "/etc/passwd", "a\\b", "link.pt"])
def test_a_checkpoint_s_record_leads_nowhere(name: str, checkpoint: Path) -> None:
    secret = checkpoint.parent / "secret.pt"
    torch.save({"x": 1}, secret)
    (checkpoint / "link.pt").symlink_to(secret)
    entry = {"bytes": secret.stat().st_size, "sha256": hashlib.sha256(secret.read_bytes()).hexdigest()}
    reseal(checkpoint, "COMPLETE.json", lambda record: record["files"].update({name: entry}))
    assert complete_checkpoints(checkpoint.parent) == []
    assert newest_checkpoint(checkpoint.parent) is None
    assert damaged_files(checkpoint) == ["COMPLETE.json"]
    for check in (True, False):
        with pytest.raises(StorageError, match=r"COMPLETE\.json"):
            load_checkpoint(checkpoint, check_hashes=check)


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
def test_a_checkpoint_that_cannot_be_read_is_one_message(name: str, checkpoint: Path) -> None:
    for data in (b"", b"{", b"\x80\x05cos\nsystem\n", os.urandom(100)):
        (checkpoint / name).write_bytes(data)
        for check in (True, False):
            with pytest.raises(StorageError, match="step-00000004"):
                load_checkpoint(checkpoint, check_hashes=check)


@few
@given(data=st.data())
def test_any_record_of_a_checkpoint(checkpoint: Path, data: st.DataObject) -> None:
    path = checkpoint / "COMPLETE.json"
    kept = path.read_bytes()
    record = unseal(kept, "x")
    try:
        path.write_bytes(sealed(replaced(record, data)))
        if complete_checkpoints(checkpoint.parent):
            load_checkpoint(checkpoint)
    except StorageError:
        pass
    finally:
        path.write_bytes(kept)


# Any bytes


def replaced(value: Any, data: st.DataObject) -> Any:
    """The value with something else at one place of it."""
    value = json.loads(json.dumps(value))
    holder, place = {"": value}, ""
    while isinstance(holder[place], (dict, list)) and holder[place] and data.draw(st.integers(0, 4)):
        inner = holder[place]
        keys = sorted(inner) if isinstance(inner, dict) else range(len(inner))
        holder, place = inner, data.draw(st.sampled_from(list(keys)))
    if place != "" and isinstance(holder, dict) and data.draw(st.booleans()):
        del holder[place]
    else:
        holder[place] = data.draw(Json)
    return holder[""] if place == "" and "" in holder else value


@settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "120")),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(name=st.sampled_from(["manifest.json", "COMPLETE.json"]), data=st.data())
def test_any_sealed_record(sound: Path, name: str, data: st.DataObject) -> None:
    kept = {file: (sound / file).read_bytes() for file in ("manifest.json", "COMPLETE.json")}
    try:
        changed = replaced(unseal(kept[name], name), data)
        (sound / name).write_bytes(sealed(changed))
        if name == "manifest.json":
            digest = hashlib.sha256((sound / name).read_bytes()).hexdigest()
            reseal(sound, "COMPLETE.json", lambda complete: complete["files"].update({name: digest}))
        read_or_refuse(sound)
    finally:
        for file, content in kept.items():
            (sound / file).write_bytes(content)


@settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "120")),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_bytes_in_any_file(sound: Path, data: st.DataObject) -> None:
    files = sorted(str(path.relative_to(sound)) for path in sound.rglob("*") if path.is_file())
    path = sound / data.draw(st.sampled_from(files))
    kept = path.read_bytes()
    try:
        path.write_bytes(damaged(kept, data))
        read_or_refuse(sound)
    finally:
        path.write_bytes(kept)


def damaged(kept: bytes, data: st.DataObject) -> bytes:
    at = data.draw(st.integers(0, len(kept)))
    kind = data.draw(st.sampled_from(["cut", "insert", "overwrite", "whole"]))
    some = data.draw(st.binary(max_size=40))
    if kind == "cut":
        return kept[:at]
    if kind == "whole":
        return some
    return kept[:at] + some + kept[at + (len(some) if kind == "overwrite" else 0) :]


@settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "120")),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_bytes_whose_hashes_were_made_right(sound: Path, data: st.DataObject) -> None:
    """Sample list, codecs and shards changed together with every hash and size of them: only their content is left."""
    name = data.draw(st.sampled_from(["samples.arrow", "codecs/features.safetensors", "codecs/teacher.safetensors"]))
    shard = data.draw(st.booleans())
    name = "shards/unit-000001.arrow" if shard else name
    kept = {file: (sound / file).read_bytes() for file in (name, "manifest.json", "COMPLETE.json")}
    try:
        changed = damaged(kept[name], data)
        (sound / name).write_bytes(changed)
        digest = hashlib.sha256(changed).hexdigest()

        def of_manifest(manifest: dict[str, Any]) -> None:
            part = Path(name).stem
            entry = manifest["samples"] if part == "samples" else manifest["codecs"][part]
            entry["sha256"] = digest

        if shard:
            reseal(sound, "COMPLETE.json", lambda c: c["shards"][1].update(sha256=digest, bytes=len(changed)))
        else:
            reseal(sound, "manifest.json", of_manifest)
        with suppress(StorageError):
            cache = TargetCache.open(sound, check=False)
            for index in range(len(cache)):
                cache.row(index)
    finally:
        for file, content in kept.items():
            (sound / file).write_bytes(content)


@few
@given(data=st.data())
def test_any_bytes_in_the_reference_s_cache(deepspec: Path, data: st.DataObject) -> None:
    path = deepspec / data.draw(st.sampled_from(["manifest.json", INDEX, "shard-00001.bin"]))
    kept = path.read_bytes()
    try:
        if path.suffix == ".json" and data.draw(st.booleans()):
            path.write_text(json.dumps(replaced(json.loads(kept), data)))
        else:
            path.write_bytes(damaged(kept, data))
        with suppress(StorageError, FileNotFoundError):
            cache = DeepSpecCache(deepspec)
            for index in range(len(cache)):
                cache.sample(index)
    finally:
        path.write_bytes(kept)


# Declared sizes

WIDTH = 12


def fitted(name: str) -> Codec:
    generator = torch.Generator().manual_seed(1)
    sample = [(torch.randn(40, WIDTH, generator=generator), True) for _ in range(4)]
    tensors = {"projection": torch.randn(6, WIDTH, generator=generator)} if name == "projected" else None
    return fit_codec(CodecSpec(name=name), sample, width=WIDTH, layers=2, tensors=tensors)


STATES = [name for name in codec_names() if not codec_class(name).teacher_only]
CODECS = {name: fitted(name) for name in STATES}
EXACT = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(2))


@settings(max_examples=int(os.environ.get("FUZZ_EXAMPLES", "300")))
@given(name=st.sampled_from(STATES), data=st.data())
def test_any_payload(name: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    payload = damaged(codec.encode(EXACT, first=True), data)
    with suppress(StorageError, struct.error):
        assert codec.decode(payload, len(EXACT)).shape == (len(EXACT), codec.out_width)


@settings(max_examples=int(os.environ.get("FUZZ_EXAMPLES", "100")))
@given(data=st.data())
def test_any_payload_of_a_sparse_teacher(data: st.DataObject) -> None:
    from storage.codecs.base import TargetParts

    codec = codec_class("sparse")(width=WIDTH, settings={"top": 4})
    codec.target = TargetParts(head=torch.randn(30, WIDTH, generator=torch.Generator().manual_seed(3)))
    payload = damaged(codec.encode(EXACT), data)
    with suppress(StorageError):
        stored = codec.decode_teacher(payload, np.arange(len(EXACT)))
        assert stored.top_ids is not None
        assert len(stored.top_ids) == len(EXACT)


def test_a_frame_that_announces_more_than_its_row_can_hold_takes_no_memory() -> None:
    """A frame of thirteen bytes that announces four exabytes, as it would stand in a row."""
    header = b"\x28\xb5\x2f\xfd" + bytes([0b11100000]) + struct.pack("<Q", 2**62)
    assert zstandard.frame_content_size(header) == 2**62
    with pytest.raises(StorageError, match="announces 4,611,686,018,427,387,904 bytes, and at most 240 can be in it"):
        decompressed(memoryview(header), 240)
    planes = CODECS["bf16-planes"]
    with pytest.raises(StorageError, match="at most 240"):
        planes.decode(struct.pack("<I", len(header)) + header + bytes(240), 20)
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    assert len(bomb) < 2000
    with pytest.raises(StorageError, match="announces 16,777,216"):
        planes.decode(struct.pack("<I", len(bomb)) + bomb + bytes(240), 20)
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(240))
    with pytest.raises(StorageError, match="does not say how many"):
        decompressed(memoryview(unknown), 240)


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_compressed_sample_list_is_refused(compression: str, cache: Path) -> None:
    """Arrow would take the memory that a compressed buffer announces."""
    table = pa.ipc.open_stream((cache / "samples.arrow").read_bytes()).read_all()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    (cache / "samples.arrow").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    reseal(cache, "manifest.json", lambda manifest: manifest["samples"].update(sha256=digest))
    reseal(cache, "COMPLETE.json", lambda complete: complete["files"].update({"samples.arrow": digest}))
    with pytest.raises(StorageError, match=r"samples\.arrow: .*it is compressed, which this format is not"):
        TargetCache.open(cache)


def test_record_batches_beyond_the_shard_are_refused_before_they_are_read(cache: Path) -> None:
    reseal(cache, "COMPLETE.json", lambda complete: complete["shards"][0]["batches"][0].update(bytes=2**61))
    with pytest.raises(StorageError, match=r"unit-000000\.arrow: its commit record has record batches beyond its"):
        TargetCache.open(cache).row(0)


def test_spans_beyond_the_row_are_refused_before_positions_are_made(cache: Path) -> None:
    opened = TargetCache.open(cache)
    columns = dict(opened.raw_row(2))
    for spans in ([0, 2**31 - 1], [5], [9, 3], [-4, 2]):
        columns["spans"] = np.array(spans, np.int32)
        with pytest.raises(StorageError, match="'sample-002'"):
            opened.decode(columns)
