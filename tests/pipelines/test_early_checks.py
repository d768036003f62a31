"""What cannot work is refused before anything starts, with the cure."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import transformers
from whole_run import write_config

from dspark.decoding.target import Target, TargetError
from dspark.decoding.target_checks import require_decoder
from pipelines.errors import UserError
from pipelines.progress import Reporter
from pipelines.runs.executor import run_stages
from pipelines.runs.plan import make_plan
from pipelines.runs.preflight import require_room
from pipelines.settings import Settings, load_settings, settings_from_dict
from pipelines.stages.train import check as check_training
from pipelines.target_spec import TargetSpec, resolve_target


def examine(folder: Path, **target: Any) -> TargetSpec:
    return resolve_target(
        settings_from_dict({"run": {"directory": "unused"}, "target": {"model": str(folder), **target}})
    )


@pytest.fixture
def target(toy_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_folder, tmp_path / "target"))


def test_a_model_of_another_make_is_refused_by_its_config(target: Path) -> None:
    transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=300).save_pretrained(target)
    with pytest.raises(TargetError, match=r"GPT2LMHeadModel has no layers, norm, embed_tokens: .* Llama, Mistral"):
        examine(target)
    transformers.T5Config(num_layers=1, d_model=32).save_pretrained(target)
    with pytest.raises(TargetError, match=r"T5Config\) is no causal language model"):
        examine(target)


@pytest.mark.parametrize(
    ("attention", "cure"),
    [
        ("sdpa", r"set target\.attn_implementation=eager"),
        pytest.param(
            "flash_attention_2",
            r"set target\.attn_implementation=sdpa",
            marks=pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed here"),
        ),
    ],
)
def test_an_attention_that_the_target_lacks_names_the_cure(attention: str, cure: str, tmp_path: Path) -> None:
    config = transformers.Gemma2Config(
        **{"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    )
    with pytest.raises(TargetError, match=cure):
        require_decoder(config, "toy", attention)
    transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(TargetError, match=cure):
        Target.open(tmp_path, attn_implementation=attention)
    assert Target.open(tmp_path, attn_implementation="eager", target_layer_ids=[0]).num_layers == 2


@pytest.mark.parametrize("content", ['{"a":', "[1]", "{}", '{"model_type": "no-such-model"}', '{"model_type": 3}'])
def test_a_broken_config_names_its_file(content: str, target: Path) -> None:
    (target / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"^target\.model: .*config\.json cannot be read \(.*fetch"):
        examine(target)


def test_weights_cut_short_or_missing_name_the_file(target: Path) -> None:
    file = target / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    for attempt in (lambda: examine(target), lambda: Target.open(target)):
        with pytest.raises(TargetError, match=r"model\.safetensors .* cut short or damaged .* fetch the target again"):
            attempt()
    file.write_bytes(content)
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(TargetError, match=r"model-00002-of-00002\.safetensors is missing"):
        examine(target)


def test_thinking_needs_a_template_with_the_switch(target: Path) -> None:
    for mode in ("on", "mixed"):
        with pytest.raises(UserError, match=r"has no thinking switch: .* set target\.thinking=off"):
            examine(target, thinking=mode)
    config = json.loads((target / "tokenizer_config.json").read_text())
    template = target / "chat_template.jinja"
    old = template.read_text() if template.exists() else config["chat_template"]
    new = old + "{% if not enable_thinking %}<|start|>{% endif %}"
    template.write_text(new)
    if "chat_template" in config:
        (target / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": new}))
    assert examine(target, thinking="mixed").num_layers == 2


def toy_run(folder: Path, target: Path, *words: str) -> Settings:
    return load_settings(write_config(folder, target), words)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("drafter.mask_token_id=60000", r"mask_token_id is 60000; allowed: 0 to \d+"),
        ("drafter.target_layer_ids=[0,1]", "target_layer_ids is 1; allowed: -1 .* to 0"),
        ("drafter.target_layer_ids=[0,20]", "target_layer_ids is 20; allowed"),
        ("drafter.draft_vocab_size=100000", "draft_vocab_size is 100000; allowed: 1 to"),
        ("cluster.cpus_per_worker=4", r"a worker wants cluster\.cpus_per_worker=4 CPUs .*there: 2 CPUs"),
        ("cluster.gpus_per_worker=1", r"cluster\.gpus_per_worker=1 GPUs, and no machine has them"),
        ("target.device=cuda", r"target\.device is cuda, and torch .* finds 0 GPUs here"),
        (
            "target.attn_implementation=flash_attention_2",
            r"flash-attn is not installed here; .* target\.attn_implementation=sdpa",
        ),
    ],
)
@pytest.mark.parametrize("stage", ["regenerate", None])
def test_what_cannot_work_is_refused_at_the_start_and_leaves_nothing(
    word: str, expected: str, stage: str | None, toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    if "flash" in word and find_spec("flash_attn") is not None:
        pytest.skip("flash-attn is installed here")
    wanted = toy_run(tmp_path, toy_folder, word)
    with pytest.raises(ValueError, match=expected):
        run_stages(wanted, Reporter(quiet=True), only=None if stage is None else [stage])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("algorithm", ["dspark", "dflash", "eagle3"])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("phi3", "0 of its layers are made as the 1 draft layers are .*; set drafter.initial_weights=random$"),
        ("olmo2", "0 of its layers are made as the 1 draft layers are .*; set drafter.initial_weights=random$"),
        ("olmo", "0 of its layers are made as the 1 draft layers are .*; set drafter.initial_weights=random$"),
        ("solar_open", "solar_open.* has no intermediate_size, from which draft layers take their sizes"),
    ],
)
def test_a_drafter_that_the_target_cannot_have_is_refused_before_the_first_answer(
    kind: str, expected: str, algorithm: str, target: Path, tmp_path: Path
) -> None:
    config = json.loads((target / "config.json").read_text())
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    made = transformers.CONFIG_MAPPING[kind](**{key: config[key] for key in sizes}, pad_token_id=0)
    made.save_pretrained(target)
    words = [f"drafter.algorithm={algorithm}", "drafter.num_draft_layers=1"]
    wanted = toy_run(tmp_path, target, *words)
    for attempt in (
        lambda: run_stages(wanted, Reporter(quiet=True), only=["regenerate"]),
        lambda: make_plan(wanted, Reporter(quiet=True), rows=4),
    ):
        with pytest.raises(ValueError, match=expected):
            attempt()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("broken", ["missing", "torn"])
def test_a_baseline_and_a_cost_table_that_cannot_be_used_are_refused_before_the_first_answer(
    broken: str, toy_folder: Path, tmp_path: Path
) -> None:
    baseline, table = tmp_path / "baseline", tmp_path / "costs.json"
    if broken == "torn":
        baseline.mkdir()
        (baseline / "config.json").write_text('{"architectures": [')
        table.write_text('[{"temperature": ')
    for word, expected in (
        (f"evaluate.baselines.old={baseline}", r"evaluate\.baselines\.old|baseline.config\.json"),
        (f"evaluate.cost.table={table}", r"costs\.json"),
    ):
        with pytest.raises(UserError, match=expected):
            run_stages(toy_run(tmp_path, toy_folder, word), Reporter(quiet=True))
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "there is no prompts file .*train.jsonl"),
        (b"", "'.*train.jsonl' gives no prompt"),
        (b"\xff\xfe", r"train\.jsonl:1: not UTF-8"),
        (b'{"turns": ["ok"]}\n{"turns": ["cut', r"train\.jsonl:2: not valid JSON"),
    ],
)
def test_prompts_that_cannot_be_read_leave_nothing(
    content: bytes | None, expected: str, toy_folder: Path, tmp_path: Path
) -> None:
    wanted = toy_run(tmp_path, toy_folder)
    prompts = tmp_path / "train.jsonl"
    prompts.unlink()
    if content is not None:
        prompts.write_bytes(content)
    with pytest.raises(UserError, match=expected):
        run_stages(wanted, Reporter(quiet=True))
    assert not (tmp_path / "run").exists()


def test_a_stage_without_its_inputs_leaves_nothing(toy_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train needs .*cache, which is not there yet"):
        run_stages(toy_run(tmp_path, toy_folder), Reporter(quiet=True), only=["train"])
    assert not (tmp_path / "run").exists()


def test_foreign_files_in_a_later_stages_place_are_seen_before_the_first_starts(
    toy_folder: Path, tmp_path: Path
) -> None:
    foreign = tmp_path / "run" / "cache" / "notes.txt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine")
    with pytest.raises(UserError, match=r"cache holds files, but no stages/cache\.json says what they are"):
        run_stages(toy_run(tmp_path, toy_folder), Reporter(quiet=True))
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_file()] == [foreign]


def test_room_is_counted_node_by_node(toy_folder: Path, tmp_path: Path) -> None:
    wanted = toy_run(tmp_path, toy_folder, "cluster.address=head:1", "cluster.cpus_per_worker=2", "train.num_workers=2")
    with pytest.raises(UserError, match=r"train\.num_workers=2 want 2 CPUs and 0 GPUs each, and there is room for 1"):
        require_room(wanted, ["train"], [{"CPU": 3}, {"CPU": 1}])
    require_room(wanted, ["regenerate"], [{"CPU": 3}, {"CPU": 1}])
    require_room(wanted, ["train"], [{"CPU": 3}, {"CPU": 2}])
    shared = toy_run(tmp_path, toy_folder, "train.num_workers=7")  # ranks share the CPUs of a cluster of the run's own
    require_room(shared, ["train"], [{"CPU": 2}])


def test_keys_that_deepspeed_does_not_read_are_refused(toy_folder: Path, tmp_path: Path) -> None:
    for word, expected in (
        ("train.deepspeed.foo=1", "no top-level key 'foo'; it knows activation_checkpointing, "),
        ("train.deepspeed.zero_optimisation.stage=2", "did you mean zero_optimization?"),
        ("train.deepspeed.zero_optimization.foo=2", "DeepSpeed refuses the overrides .*foo"),
        ("train.deepspeed.optimizer.type=Adam", "may not set optimizer"),
    ):
        with pytest.raises(UserError, match=rf"train\.deepspeed: .*{expected}"):
            check_training(toy_run(tmp_path, toy_folder, word))
    check_training(toy_run(tmp_path, toy_folder, "train.deepspeed.zero_optimization.reduce_bucket_size=1000"))
