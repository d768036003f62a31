"""`dspark cache …` on real folders: an import of the reference's cache, and what is then made and seen of it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from whole_run import dspark

from storage.cache.target_cache import TargetCache

GOLDEN = Path(__file__).parents[1] / "golden"
REFERENCE = str(GOLDEN / "deepspec_target_cache_v2")


@pytest.fixture
def imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    root = str(tmp_path / "imported")
    assert dspark("cache", "import-deepspec", REFERENCE, root, "--all-positions", "--workers", "0") == 0
    capsys.readouterr()
    return root


def test_import_is_bit_exact(imported: str) -> None:
    expected = np.load(GOLDEN / "deepspec_target_cache_v2_expected.npz")
    for index, row in enumerate(TargetCache.open(imported)):
        for name, states in (
            ("target_hidden_states", row.hidden_states),
            ("target_last_hidden_states", row.last_hidden_state),
        ):
            bits = states.contiguous().view(torch.int16).numpy().view(np.uint16)
            assert np.array_equal(bits, expected[f"{index}/{name}_bf16bits"])
        assert np.array_equal(row.input_ids.numpy(), expected[f"{index}/input_ids"])
        assert np.array_equal(row.loss_mask.numpy(), expected[f"{index}/loss_mask"] != 0)


def test_info_scales_up(imported: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("cache", "info", imported, "--tokens", "1.2e9", "--json") == 0
    info = json.loads(capsys.readouterr().out)
    assert info["rows"] == 7
    assert info["terabytes_at_corpus"] == pytest.approx(info["bytes_per_token"]["all"] * 1.2e9 / 1e12, abs=1e-3)
    assert dspark("cache", "info", imported, "--tokens", "many") == 2
    assert "--tokens 'many' is not a count" in capsys.readouterr().err


def test_recode_verify_and_sample(imported: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = str(tmp_path / "small")
    assert dspark("cache", "recode", imported, new, "--features", "transform:step=0.5", "--workers", "0") == 0
    assert dspark("cache", "verify", new) == 0
    assert "nothing wrong" in capsys.readouterr().out
    cache = TargetCache.open(new)
    assert cache.codecs.hidden_states.settings["step"] == 0.5
    assert dspark("cache", "sample", new, "--rows", "2", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["sample_id"] for row in rows] == ["0", "3"]
    stored = cache.row(3, dtype=torch.float32)
    assert rows[1]["features"]["shape"] == list(stored.hidden_states.shape)
    assert rows[1]["features"]["largest"] == pytest.approx(float(stored.hidden_states[1:].abs().max()), abs=1e-3)
    assert dspark("cache", "sample", new, "--id", "nobody") == 2
    assert "no row of" in capsys.readouterr().err


def test_the_text_of_a_row_shows_what_is_supervised(
    imported: str, toy_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dspark("cache", "sample", imported, "--target", str(toy_folder), "--json") == 0
    for row in json.loads(capsys.readouterr().out):
        assert row["text"].count("[[") == len(row["supervised_spans"])


def test_damage_is_listed_and_exits_with_1(imported: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("manifest.json", "shards/unit-000000.arrow"):
        path = Path(imported, name)
        data = path.read_bytes()
        path.write_bytes(data[:-30] + bytes([data[-30] ^ 1]) + data[-29:])
        assert dspark("cache", "verify", imported) == 1
        assert name in capsys.readouterr().out
        path.write_bytes(data)


def test_merge_joins_two_imports(imported: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("cache", "merge", imported, str(tmp_path / "whole")) == 2
    assert "two caches at least" in capsys.readouterr().err
    assert dspark("cache", "merge", imported, imported, str(tmp_path / "whole")) == 2
    assert "are the same cache" in capsys.readouterr().err


def test_a_wrong_codec_is_explained(imported: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = str(tmp_path / "new")
    assert dspark("cache", "recode", imported, new, "--features", "zip") == 2
    assert "no codec is named 'zip'; choose one of projected" in capsys.readouterr().err
    assert dspark("cache", "recode", imported, new, "--features", "int8:steps=3") == 2
    assert "codec 'int8' has no setting 'steps'; it has group" in capsys.readouterr().err
    for codec, reason in (
        ("int8:group=0", "group = 0, it must be a whole number of 1 or more"),
        ("transform:step=nan", "step = 'nan', it must be a number from 0.0001 to 8"),
        ("transform:step=1e30", "step = 1e+30, it must be a number"),
        ("transform:level=99", "level = 99, it must be a whole number from 1 to 22"),
    ):
        assert dspark("cache", "recode", imported, new, "--features", codec) == 2
        assert reason in capsys.readouterr().err
    assert not Path(new).exists()


def test_an_unfinished_cache_does_not_verify(imported: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(imported) / "COMPLETE.json").unlink()
    assert dspark("cache", "verify", imported) == 1
    said = capsys.readouterr().out
    assert "the cache is not finished" in said
    assert "--repair" not in said
    assert dspark("cache", "recode", imported, str(tmp_path / "new"), "--features", "int8") == 2
    assert "the command that builds it goes on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("imported/inside", "lies inside"),
        ("taken", "holds other files (mine.txt)"),
        ("file", "is a file: give a folder"),
    ],
)
def test_places_for_a_new_cache_that_are_refused(
    imported: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, message: str
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("")
    assert dspark("cache", "recode", imported, str(tmp_path / place), "--features", "int8", "--workers", "0") == 2
    assert message in capsys.readouterr().err
    assert dspark("cache", "verify", imported) == 0
