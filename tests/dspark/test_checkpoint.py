"""A drafter's folder is opened as it was written, or refused in one line that names the file and the cure."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from small_models import tiny_target

from dspark.config import _KINDS, DrafterConfig
from dspark.manifest import MANIFEST, CheckpointError, damaged_files, new_folder, read_manifest, require_intact
from dspark.models.checkpoint import CONFIG, WEIGHTS, load_drafter, read_config, save_drafter
from dspark.models.starting_weights import build_drafter

SHORT = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "40")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def write(folder: Path, **overrides: Any) -> Path:
    """A small drafter in a folder with its manifest."""
    target = tiny_target("llama")
    options: dict[str, Any] = {"target_layer_ids": (0, 2), "num_draft_layers": 2, "block_size": 3, "markov_rank": 4}
    config = DrafterConfig.for_target(target.text_config, mask_token_id=5, **(options | overrides))
    tokens = torch.arange(0, 40, 2) if config.draft_vocab_size else None
    with new_folder(folder) as staging:
        save_drafter(build_drafter(config, target, start="random", draft_token_ids=tokens), staging, target.text_config)
        (staging / "inner").mkdir()
        (staging / "inner" / "note.txt").write_text("beside it")
    return folder


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("drafter") / "final")


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy without a manifest, as one from elsewhere may be, to be changed."""
    shutil.copytree(sound, tmp_path / "final")
    (tmp_path / "final" / MANIFEST).unlink()
    return tmp_path / "final"


def flip(path: Path, place: int = 0, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def test_a_folder_stands_whole_with_its_manifest(sound: Path) -> None:
    assert damaged_files(sound) == []
    assert os.listdir(sound.parent) == ["final"]
    manifest = read_manifest(sound)
    assert manifest is not None
    assert sorted(manifest["files"]) == [CONFIG, "inner/note.txt", WEIGHTS]
    assert (sound / WEIGHTS).stat().st_mode == (sound / CONFIG).stat().st_mode


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, MANIFEST, "inner/note.txt"])
def test_a_flipped_bit_is_found_in_every_file(name: str, sound: Path, tmp_path: Path) -> None:
    size = (sound / name).stat().st_size
    for place, bit in ((0, 0), (size // 3, 5), (size // 2, 7), (size - 1, 3)):
        copy = tmp_path / f"{place}-{bit}"
        shutil.copytree(sound, copy)
        flip(copy / name, place, bit)
        with pytest.raises(CheckpointError, match=rf"{copy / name} .*: build it again"):
            require_intact(copy, cure="build it again")
        if name != "inner/note.txt":  # which no drafter is made of
            with pytest.raises(CheckpointError, match="build it again"):
                load_drafter(copy, cure="build it again")


def test_what_is_missing_is_named(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "copy")
    (tmp_path / "copy" / "inner" / "note.txt").unlink()
    assert damaged_files(tmp_path / "copy") == [f"{tmp_path / 'copy' / 'inner' / 'note.txt'} is missing"]
    (tmp_path / "copy" / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing, the folder was not finished"):
        load_drafter(tmp_path / "copy", needs_manifest=True)
    load_drafter(tmp_path / "copy")  # as the reference's checkpoints are
    for name in (CONFIG, WEIGHTS):
        (tmp_path / "copy" / name).rename(tmp_path / name)
        with pytest.raises(CheckpointError, match=f"has no {name}"):
            load_drafter(tmp_path / "copy")
        (tmp_path / name).rename(tmp_path / "copy" / name)


def test_manifests_without_their_own_hash_are_still_read(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "old")
    manifest = json.loads((sound / MANIFEST).read_text())
    del manifest["sha256"]
    (tmp_path / "old" / MANIFEST).write_text(json.dumps({**manifest, "format": "dspark-native/1", "engines": []}))
    assert damaged_files(tmp_path / "old") == []
    (tmp_path / "old" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="has been changed"):
        damaged_files(tmp_path / "old")
    for name in ("../final/config.json", "/etc/hostname"):
        outside = {"format": "dspark-native/1", "files": {name: {"sha256": "0"}}}
        (tmp_path / "old" / MANIFEST).write_text(json.dumps(outside))
        with pytest.raises(CheckpointError, match="has been changed"):
            damaged_files(tmp_path / "old")


def test_a_folder_that_fails_leaves_what_was_there(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "final")
    with pytest.raises(IsADirectoryError), new_folder(tmp_path / "final") as staging:
        staging.write_text("{}")
    assert os.listdir(tmp_path) == ["final"]
    assert damaged_files(tmp_path / "final") == []
    with new_folder(tmp_path / "final", engines=["one"]) as staging:
        (staging / CONFIG).write_text("{}")
    assert sorted(os.listdir(tmp_path / "final")) == [CONFIG, MANIFEST]
    assert read_manifest(tmp_path / "final")["engines"] == ["one"]  # type: ignore[index]
    assert os.listdir(tmp_path) == ["final"]


def test_a_link_or_a_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").touch()
    for name, kind in (("link", "a symbolic link"), ("dangling", "a symbolic link"), ("file", "a file")):
        with pytest.raises(CheckpointError, match=f"{name} is {kind}"), new_folder(tmp_path / name):
            pass
    assert (tmp_path / "elsewhere").is_dir()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"markov_rank": 8}, r"markov_w1\.weight is \(97, 4\)"),
        ({"architectures": ["Other"]}, "Other.*Qwen3DSparkModel"),
        ({"num_hidden_layers": 1}, r"layers\.1.* is not part of this drafter"),
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers is 1000000, and .* has 2 layers"),
        ({"hidden_size": 10**9}, r"hidden_size makes a tensor 1000000000 wide, and the longest .* has 97"),
        ({"vocab_size": 10**12}, r"vocab_size makes a tensor 1000000000000 wide"),
        ({"head_dim": 10**8}, r"makes a tensor 400000000 wide"),
        ({"target_layer_ids": list(range(4)) * 10**5}, "target_layer_ids"),
        ({"num_key_value_heads": -2}, "num_key_value_heads is -2; allowed: 1 or more"),
        ({"rms_norm_eps": None}, r"config\.json lacks rms_norm_eps"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6' in config.json; expected a number"),
        ({"rope_parameters": None}, r"lacks rope_parameters"),
        ({"rope_parameters": {"rope_type": "default"}}, r"lacks rope_parameters"),
        ({"rope_parameters": {"rope_type": "none", "rope_theta": 1e4}}, "describes no drafter"),
        ({"rope_parameters": [1]}, "rope_parameters is .* expected an object"),
        ({"hidden_act": "curious"}, "describes no drafter"),
        ({"attention_bias": None}, "lacks attention_bias"),
        ({"confidence_head_with_markov": None}, "lacks confidence_head_with_markov"),
        ({"block_size": True}, "block_size is 'True' in config.json; expected an integer"),
        ({"dspark_draft_vocab_size": 40}, "40"),
    ],
)
def test_configurations_that_cannot_be_read(change: dict[str, Any], message: str, folder: Path) -> None:
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(values | change))
    with pytest.raises(CheckpointError, match=message):
        load_drafter(folder)


def test_the_older_form_of_the_rotary_settings(folder: Path) -> None:
    values = json.loads((folder / CONFIG).read_text())
    expected = load_drafter(folder).config
    theta = values.pop("rope_parameters")["rope_theta"]
    (folder / CONFIG).write_text(json.dumps({**values, "rope_theta": theta, "rope_scaling": None}))
    assert load_drafter(folder).config == expected


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_weights_that_cannot_be_read(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    for cut in (0, 4, 100, len(data) - 1):
        (folder / WEIGHTS).write_bytes(data[:cut])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is cut off or damaged"):
            load_drafter(folder)
    (folder / WEIGHTS).write_bytes(data)
    edit(folder, lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].long()}))
    with pytest.raises(CheckpointError, match=r"fc\.weight holds no floating-point numbers"):
        load_drafter(folder)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("d2t", lambda d2t: d2t - 1, "rising token ids from 0 to 96"),
        ("d2t", lambda d2t: d2t + 90, "rising token ids from 0 to 96"),
        ("d2t", lambda d2t: -d2t, "rising token ids"),
        ("d2t", lambda d2t: d2t.float(), "floating-point|d2t is torch.float32"),
        ("d2t", lambda d2t: d2t[1:].clone(), r"d2t is \(19,\), config.json says \(20,\)"),
        ("d2t", lambda d2t: torch.full_like(d2t, 2**62), "rising token ids"),
        ("t2d", lambda t2d: t2d.roll(1), "d2t and t2d name different draft tokens"),
        ("t2d", lambda t2d: t2d.long(), "expected integer offsets and a bool mask"),
        ("t2d", None, "t2d is missing"),
    ],
)
def test_draft_vocabularies_that_disagree(name: str, change: Any, message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "final", algorithm="dflash", markov_rank=0, draft_vocab_size=20)
    assert load_drafter(folder).draft_token_ids.tolist() == list(range(0, 40, 2))
    (folder / MANIFEST).unlink()
    edit(folder, lambda tensors: tensors.pop(name) if change is None else tensors.update({name: change(tensors[name])}))
    with pytest.raises(CheckpointError, match=message):
        load_drafter(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from([key for _, keys in _KINDS.values() for key in keys.split()] + ["intermediate_size"])


@pytest.mark.fuzz
@SHORT
@given(data=st.binary(max_size=200), name=st.sampled_from([CONFIG, WEIGHTS, MANIFEST]))
def test_any_bytes_are_refused(data: bytes, name: str, folder: Path) -> None:
    before = (folder / name).read_bytes() if (folder / name).exists() else None
    (folder / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=name):
        load_drafter(folder)
    (folder / name).unlink()
    if before is not None:
        (folder / name).write_bytes(before)


@pytest.mark.fuzz
@SHORT
@given(changes=st.dictionaries(KEYS, JSON, min_size=1, max_size=3), whole=st.booleans())
def test_any_values_are_read_or_refused(changes: dict[str, Any], whole: bool, folder: Path) -> None:
    original = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(json.dumps(changes if whole else json.loads(original) | changes))
    try:
        config = read_config(folder)
        assert isinstance(config, DrafterConfig)
        load_drafter(folder)
    except CheckpointError:
        pass
    finally:
        (folder / CONFIG).write_text(original)
