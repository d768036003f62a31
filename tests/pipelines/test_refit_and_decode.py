"""A refit takes its parts from what was published; a single answer shows what was drafted."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.config import DrafterConfig
from dspark.contract import Contract
from dspark.decoding.target import Target
from dspark.manifest import write_manifest
from dspark.models.checkpoint import save_drafter
from dspark.models.starting_weights import build_drafter
from pipelines.decode import Answer, Piece, decode_one, refuse_unread
from pipelines.errors import UserError
from pipelines.progress import Reporter
from pipelines.refit import refit_settings
from pipelines.runs.executor import run_stages
from pipelines.settings import load_settings
from pipelines.target_spec import resolve_target


@pytest.fixture(scope="module")
def published(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained drafter with the toy target's top layer, as a published folder."""
    folder = tmp_path_factory.mktemp("published")
    target = Target.open(toy_folder, dtype="float32", device="cpu", target_layer_ids=(0,))
    options: dict[str, Any] = {"target_layer_ids": (0,), "num_draft_layers": 1, "block_size": 3, "markov_rank": 4}
    config = DrafterConfig.for_target(target.text_config, mask_token_id=2, **options)
    drafter = build_drafter(config, target, dtype=torch.float32)
    save_drafter(drafter, folder, target.text_config)
    settings = load_settings(config_file(folder, toy_folder), ["drafter.target_layer_ids=[0]"])
    Contract.from_dict(resolve_target(settings).contract(settings, with_block=False)).write(folder)
    return folder


def config_file(folder: Path, target: Path | str) -> str:
    path = folder / "config.yaml"
    lines = [
        f"run: {{directory: {folder / 'run'}}}",
        f"target: {{model: {target}, dtype: float32, device: cpu}}",
        "drafter: {num_draft_layers: 2, block_size: 5}",
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_refit_has_the_published_parts_and_decodes_the_old_one_beside(
    published: Path, toy_folder: Path, tmp_path: Path
) -> None:
    settings = refit_settings(config_file(tmp_path, toy_folder), ["train.num_train_epochs=1"], str(published))
    drafter = settings.drafter
    assert (drafter.num_draft_layers, drafter.block_size, drafter.markov_rank, drafter.mask_token_id) == (1, 3, 4, 2)
    assert drafter.target_layer_ids == (0,)
    assert drafter.initial_weights == str(published)
    assert settings.evaluate.baselines == {"baseline": str(published)}
    assert settings.train.num_train_epochs == 1


def test_refits_that_cannot_work_are_refused(published: Path, toy_folder: Path, tmp_path: Path) -> None:
    config = config_file(tmp_path, toy_folder)
    with pytest.raises(UserError, match="add --from FOLDER"):
        refit_settings(config, [], None)
    with pytest.raises(UserError, match=r"--from: .* has no config\.json"):
        refit_settings(config, [], str(tmp_path))
    for name in ("weights_sha256", "tokenizer_sha256"):
        other = tmp_path / name
        shutil.copytree(published, other)
        contract = json.loads((published / "contract.json").read_text())
        (other / "contract.json").write_text(json.dumps({**contract, name: "0" * 64}))
        with pytest.raises(UserError, match=f"--from: the drafter in .*{name} was made for the target .*{name} is 000"):
            refit_settings(config, [], str(other))
    shutil.copytree(published, tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(UserError, match=r"--from: .*model\.safetensors is cut off or damaged"):
        refit_settings(config, [], str(tmp_path / "cut"))


@pytest.mark.parametrize("option", ["evaluate.baselines.old", "drafter.initial_weights", "--from"])
@pytest.mark.parametrize("damage", ["missing", "without config.json", "torn config.json", "without weights", "a bit"])
def test_a_missing_or_damaged_drafter_is_refused_before_anything_runs(
    option: str, damage: str, published: Path, toy_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(published, tmp_path / "drafter"))
    write_manifest(folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    if damage == "missing":
        shutil.rmtree(folder)
    elif damage == "without config.json":
        config.unlink()
    elif damage == "torn config.json":
        config.write_bytes(config.read_bytes()[:40])
    elif damage == "without weights":
        weights.unlink()
    else:
        content = bytearray(weights.read_bytes())
        content[-5] ^= 1
        weights.write_bytes(content)
    file = config_file(tmp_path, toy_folder)

    def attempt() -> None:
        if option == "--from":
            refit_settings(file, [], str(folder))
        else:
            run_stages(load_settings(file, [f"{option}={folder}"]), Reporter(quiet=True))

    with pytest.raises(UserError, match=rf"^{re.escape(option)}: .*{re.escape(str(folder))}"):
        attempt()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "content", [None, "{", "[]", '{"tokens": [1, 2]}', '{"tokens": [2, 1], "steps_per_second": [1, 2]}']
)
def test_a_missing_or_broken_cost_table_is_refused_before_anything_runs(
    content: str | None, toy_folder: Path, tmp_path: Path
) -> None:
    table = tmp_path / "costs.json"
    if content is not None:
        table.write_text(content)
    asked = load_settings(config_file(tmp_path, toy_folder), [f"evaluate.cost.table={table}"])
    with pytest.raises(UserError, match=rf"^evaluate\.cost\.table: .*{re.escape(str(table))}"):
        run_stages(asked, Reporter(quiet=True))
    assert not (tmp_path / "run").exists()


def test_the_same_target_may_lie_elsewhere(published: Path, toy_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(published, tmp_path / "published")
    shutil.copytree(toy_folder, tmp_path / "elsewhere")
    contract = json.loads((published / "contract.json").read_text()) | {"target_name": "some/toy"}
    (tmp_path / "published" / "contract.json").write_text(json.dumps(contract))
    settings = refit_settings(config_file(tmp_path, tmp_path / "elsewhere"), [], str(tmp_path / "published"))
    assert settings.evaluate.baselines == {"baseline": str(tmp_path / "published")}


def test_one_answer_shows_its_rounds(published: Path, toy_folder: Path, tmp_path: Path) -> None:
    settings = load_settings(config_file(tmp_path, toy_folder))
    watched: list[Piece] = []
    answer = decode_one(
        settings, "hello", drafter=str(published), temperature=0.0, max_new_tokens=12, watch=watched.append
    )
    assert tuple(watched) == answer.pieces
    assert sum(piece.kind != "rejected" for piece in answer.pieces) == answer.tokens
    assert answer.pieces[0].kind == "target"  # the token that the prompt's own pass gives
    assert 1 <= answer.tokens <= 12
    assert answer.accepted_length >= 1
    kept = "".join(piece.text for piece in answer.pieces if piece.kind != "rejected")
    # A character of several bytes may be cut between two pieces.
    assert kept.replace("\ufffd", "") in answer.text or "\ufffd" in kept
    assert "rounds, accepted length" in answer.marked_text()
    with pytest.raises(UserError, match="there is no drafter in"):
        decode_one(settings, "hello", drafter=None, temperature=0.0, max_new_tokens=12)


def test_settings_that_one_answer_does_not_depend_on_are_refused() -> None:
    refuse_unread(["target.dtype=float32", "run.seed=3", "unknown.key=1"])
    for word in ("drafter.block_size=3", "train={}", "evaluate.batch_size=1"):
        with pytest.raises(UserError, match=f"{word.split('=')[0]} does not apply to `dspark decode`"):
            refuse_unread(["run.seed=1", word])


def test_drafted_text_stands_in_brackets() -> None:
    kinds = (("target", "Two "), ("accepted", "and "), ("accepted", "two "), ("rejected", "is"), ("target", "make "))
    pieces = tuple(Piece(kind=kind, text=text) for kind, text in kinds)
    answer = Answer(
        text="", pieces=pieces, rounds=1, tokens=4, accepted_length=3.0, finish_reason="length", seconds=0.5
    )
    assert answer.marked_text().startswith("Two [and two ]make \n\n4 tokens in 1 rounds, accepted length 3.00")
