"""Settings files: every shipped one loads, overrides apply, and mistakes are named with their place."""

import json
from pathlib import Path

import pytest

from pipelines.errors import UserError
from pipelines.settings import Settings, load_settings, settings_from_dict
from pipelines.settings.errors import RENAMED, known_keys
from pipelines.settings.reference import reference

CONFIGS = Path(__file__).parents[2] / "configs"
BASES = {"base.yaml", "paper.yaml"}
MINIMAL = "run: {directory: out}\ntarget: {model: some/model}\n"


def write(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_settings(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml") if path.name not in BASES))
def test_every_shipped_config_loads_and_survives_a_dump(name: str, tmp_path: Path) -> None:
    settings = load_settings(CONFIGS / name)
    assert settings_from_dict(settings.to_dict()) == settings
    assert load_settings(write(tmp_path, settings.to_yaml())) == settings


@pytest.mark.parametrize("name", sorted(BASES))
def test_bases_load_once_a_run_and_a_target_are_given(name: str) -> None:
    load_settings(CONFIGS / name, ["run.directory=out", "target.model=some/model"])


@pytest.mark.parametrize(
    ("name", "model", "layers", "mask"),
    [
        ("qwen3-4b", "Qwen/Qwen3-4B", (1, 9, 17, 25, 33), 151669),
        ("qwen3-8b", "Qwen/Qwen3-8B", (1, 9, 17, 25, 33), 151669),
        ("qwen3-14b", "Qwen/Qwen3-14B", (1, 10, 19, 28, 37), 151669),
        ("gemma4-12b", "google/gemma-4-12B-it", (5, 17, 29, 41, 46), 4),
    ],
)
def test_the_papers_table(name: str, model: str, layers: tuple[int, ...], mask: int) -> None:
    settings = load_settings(CONFIGS / f"{name}.yaml")
    drafter, train, loss = settings.drafter, settings.train, settings.train.loss
    assert (settings.target.model, drafter.target_layer_ids, drafter.mask_token_id) == (model, layers, mask)
    assert (drafter.block_size, drafter.num_draft_layers, drafter.markov_rank) == (7, 5, 256)
    assert {getattr(settings, s).num_workers for s in ("regenerate", "cache", "train", "evaluate")} == {8}
    assert settings.cluster.threads_per_worker == 8  # encode the cache's rows
    assert (train.num_anchors, train.learning_rate, train.global_batch_size, train.num_train_epochs) == (
        512,
        6e-4,
        512,
        10,
    )
    assert (train.lr_scheduler_type, train.warmup_ratio, train.weight_decay, train.max_grad_norm) == (
        "cosine",
        0.04,
        0,
        1.0,
    )
    assert (loss.ce, loss.l1, loss.confidence, loss.position_decay) == (0.1, 0.9, 1.0, 4.0)
    assert settings.cache.max_length == 4096
    sampling = settings.regenerate
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens) == (0.7, 0.8, 20, 4096)
    assert (settings.target.thinking, settings.data.min_supervised_tokens) == ("off", 14)
    assert settings.evaluate.max_new_tokens == 2048


def test_extends_merges_sections_and_replaces_lists(tmp_path: Path) -> None:
    write(
        tmp_path,
        MINIMAL + "train: {num_train_epochs: 3, num_workers: 2}\nevaluate: {temperatures: [0.0, 1.0]}\n",
        "base.yaml",
    )
    path = write(tmp_path, "extends: base.yaml\ntrain: {num_workers: 4}\nevaluate: {temperatures: [0.5]}\n")
    settings = load_settings(path)
    assert (settings.train.num_train_epochs, settings.train.num_workers, settings.evaluate.temperatures) == (
        3,
        4,
        (0.5,),
    )


def test_overrides_are_read_as_yaml_and_reach_into_lists(tmp_path: Path) -> None:
    words = [
        "train.learning_rate=1e-3",
        "target.thinking=off",
        "data.train=[{source: a.jsonl}]",
        "data.train.0.limit=5",
    ]
    settings = load_settings(write(tmp_path, MINIMAL), words)
    assert settings.train.learning_rate == 1e-3
    assert settings.target.thinking == "off"
    assert (settings.data.train[0].source, settings.data.train[0].limit) == ("a.jsonl", 5)


def test_a_number_with_an_exponent_is_a_number_in_a_file(tmp_path: Path) -> None:
    assert load_settings(write(tmp_path, MINIMAL + "train: {learning_rate: 6e-4}\n")).train.learning_rate == 6e-4


def test_an_unknown_key_names_the_nearest_and_the_line(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "train:\n  learning_rat: 1e-3\n")
    assert message(path) == f"{path}:4: unknown key `train.learning_rat`; did you mean `train.learning_rate`?"


def test_the_place_is_in_the_base_that_wrote_the_key(tmp_path: Path) -> None:
    base = write(tmp_path, MINIMAL + "cache:\n  hidden_states_codec: int9\n", "base.yaml")
    path = write(tmp_path, "extends: base.yaml\ntrain: {num_workers: 2}\n")
    text = message(path)
    assert text.startswith(
        f"{base}:4: cache.hidden_states_codec: no codec of the hidden states is named 'int9'; did you mean int8?"
    )


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("learning_rate=1e-3", "did you mean `train.learning_rate`?"),
        ("trian.epochs=2", "command line (trian.epochs=2): unknown key `trian`; did you mean `train`?"),
        ("train.num_train_epochs=true", "train.num_train_epochs is True; expected a valid number"),
        ("train.num_workers=1.5", "train.num_workers is 1.5; expected a valid integer"),
        ("train.num_workers='2'", "train.num_workers is '2'; expected a valid integer"),
        ("train.loss=3", "expected a section with keys"),
        ("train.max_grad_norm=.nan", "train.max_grad_norm"),
        ("drafter.block_size=65", "drafter.block_size is 65; expected less than or equal to 64"),
        ("drafter.markov_rank=0", "drafter.confidence_head_with_markov=false"),
        ("target.device=gpu", "expected auto, cpu, cuda or cuda:N"),
        ("data.train.7.limit=3", "there is no item 7 in `data.train`"),
        ("epochs", "expected key=value"),
        ("train.num_train_epochs=", "'train.num_train_epochs=' has no value; write train.num_train_epochs=VALUE"),
        ("extends=foo.yaml", "`extends` is for settings files"),
        ("train.min_workers=3", "command line (train.min_workers=3): train: min_workers 3 is more than"),
        ("evaluate.temperatures=0", "expected a list, for example temperatures: [0]"),
        ("data.train=prompts.jsonl", 'expected a list, for example train: [{source: "prompts.jsonl"}]'),
        ("train.deepspeed=!!python/object/apply:os.system [ls]", "!!python/object/apply:os.system is not allowed"),
        ("evaluate.temperatures=[0,1,1.0]", "evaluate.temperatures: 1 stands there more than once"),
        ("evaluate.temperatures=[0.1,0.1000000001,-0.0,0]", "evaluate.temperatures: 0.1, 0 stands there more than"),
        ("evaluate.temperatures=[]", "evaluate.temperatures"),
        ("evaluate.seeds=[3,3]", "evaluate.seeds: 3 stands there more than once"),
        ("calibrate.temperatures=[1,1]", "calibrate.temperatures: 1 stands there more than once"),
        ("calibrate.seeds=[0,1,0]", "calibrate.seeds: 0 stands there more than once"),
        ("evaluate.cost.tokens=[1,2,2]", "evaluate.cost.tokens: 2 stands there more than once"),
        ("run.directory=s3://", "'s3://', which names no bucket"),
        ("drafter.target_layer_ids=[]", "expected one or more layers"),
        ("drafter.target_layer_ids=[1,1]", "set drafter.target_layer_ids to [1]"),
        ("drafter.target_layer_ids=[5,2]", "set drafter.target_layer_ids to [2, 5]"),
    ],
)
def test_mistakes_on_the_command_line(word: str, expected: str) -> None:
    assert expected in message(CONFIGS / "quickstart.yaml", word)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("cache.hidden_states_options={stp: 1}", "codec 'projected' has no setting 'stp'; it has step, focus, level"),
        ("cache.hidden_states_options={step: nan}", "step = 'nan', it must be a number from 0.0001 to 8"),
        ("cache.hidden_states_options={directions: 0}", "directions = 0, it must be a whole number of 1 or more"),
        ("cache.teacher_options={top: -3}", "codec 'corrected': top = -3, it must be a whole number from 0 to 1024"),
        ("cache.teacher_options={resolution: 0}", "resolution = 0, it must be a whole number from 1 to 1024"),
    ],
)
def test_a_codec_option_is_checked_with_the_settings(word: str, expected: str) -> None:
    assert expected in message(CONFIGS / "base.yaml", "run.directory=out", "target.model=some/model", word)


@pytest.mark.parametrize("old", RENAMED)
def test_a_key_of_earlier_versions_is_refused_with_its_new_name(old: str, tmp_path: Path) -> None:
    new, parts = RENAMED[old].partition(",")[0], old.split(".")
    text = "run: {directory: out}\n" + "\n".join(f"{'  ' * depth}{part}:" for depth, part in enumerate(parts))
    assert f".yaml:{1 + len(parts)}: `{old}` was renamed to {new}" in message(write(tmp_path, text + " 1\n"))
    assert new in known_keys(Settings)
    assert old not in known_keys(Settings)


def test_the_reference_is_that_of_the_schema() -> None:
    page = (CONFIGS.parent / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == reference(), "make docs"
    for key in known_keys(Settings):
        assert f"`{key.rpartition('.')[2]}`" in page or f"## {key}\n" in page


def test_a_shipped_file_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings("configs/tiny.yaml") == load_settings(CONFIGS / "tiny.yaml")
    assert "there is no settings file tiny.yaml" in message(Path("tiny.yaml"))
    (tmp_path / "configs").mkdir()
    write(tmp_path / "configs", MINIMAL, "tiny.yaml")
    assert load_settings("configs/tiny.yaml").run.directory == "out"


def test_every_fault_is_named_at_once(tmp_path: Path) -> None:
    text = message(write(tmp_path, "run: {seed: -1}\ntarget: {modle: x}\n"))
    assert "`run.directory` is missing" in text
    assert "run.seed is -1" in text
    assert "did you mean `target.model`?" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: {a: 1\n", "not valid YAML"),
        ("- 1\n", "expected sections"),
        ("run: {directory: a}\nrun: {directory: b}\n", ":2: `run` is written twice"),
        ("extends: nowhere.yaml\n", "`extends` names 'nowhere.yaml'"),
        ("extends: config.yaml\n", "round in a circle"),
        ("", "run.directory=VALUE"),
        ("run: !!python/object/apply:os.system {directory: a}\n", ":1: the YAML tag !!python/object/apply:os.system"),
    ],
)
def test_broken_files(text: str, expected: str, tmp_path: Path) -> None:
    assert expected in message(write(tmp_path, text))


def test_a_missing_file_names_a_near_one() -> None:
    assert "did you mean" in message(CONFIGS / "quikstart.yaml")
    assert "did you mean" not in message(CONFIGS / "something.yaml")
    assert "is a folder without a run" in message(CONFIGS)


def test_settings_are_frozen() -> None:
    settings = load_settings(CONFIGS / "tiny.yaml")
    with pytest.raises(ValueError, match="frozen"):
        settings.run.seed = 3  # type: ignore[misc]
    assert json.loads(json.dumps(settings.to_dict())) == settings.to_dict()
    assert isinstance(settings, Settings)
