"""What cannot work is refused before anything starts, with the cure."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from dspark.target import Target, TargetError
from dspark.target_checks import require_decoder
from pipelines.errors import UserError
from pipelines.settings import settings_from_dict
from pipelines.target_facts import TargetFacts, examine_target


def examine(folder: Path, **target: Any) -> TargetFacts:
    return examine_target(
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
    ("attention", "cure"), [("sdpa", "set target.attention=eager"), ("flash_attention_2", "set target.attention=sdpa")]
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
