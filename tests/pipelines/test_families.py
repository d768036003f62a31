"""Targets of other families through the product: tiny random ones, with the toy target's tokenizer."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from whole_run import write_config

from dspark.manifest import damaged_files
from dspark.models.checkpoint import load_drafter
from pipelines.progress import Reporter
from pipelines.runs.executor import run_stages
from pipelines.settings import load_settings
from pipelines.workers import session

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def model_of(family: str, vocabulary: int) -> Any:
    import transformers

    sizes = {**SIZES, "vocab_size": vocabulary, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
    torch.manual_seed(0)
    if family == "gemma4":
        return transformers.Gemma4ForCausalLM(
            transformers.Gemma4TextConfig(
                **sizes,
                head_dim=8,
                global_head_dim=16,
                attention_k_eq_v=True,
                num_global_key_value_heads=2,
                hidden_size_per_layer_input=0,
                vocab_size_per_layer_input=vocabulary,
                layer_types=["sliding_attention", "full_attention"] * 2,
                sliding_window=16,
                final_logit_softcapping=30.0,
            )
        )
    config, model = {
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }[family]
    tied = {} if family == "mistral" else {"tie_word_embeddings": True}
    return model(config(**sizes, **tied, **({} if family == "qwen2" else {"head_dim": 8})))


@pytest.fixture(scope="module")
def ray(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Ray session for the module."""
    folder = tmp_path_factory.mktemp("ray")
    with session(load_settings(write_config(folder, toy_folder)), str(folder)):
        yield


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("gemma4", "Gemma4DSparkModel"),
        ("mistral", "Qwen3DSparkModel"),
        ("qwen2", "Qwen3DSparkModel"),
    ],
)
def test_a_drafter_for_a_target_of_the_family(
    family: str, architecture: str, ray: None, toy_folder: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    shutil.copytree(toy_folder, target, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    vocabulary = json.loads((toy_folder / "config.json").read_text())["vocab_size"]
    model = model_of(family, vocabulary)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(target)
    words = ["drafter.target_layer_ids=[0,2]", "train.max_steps=2", "evaluate.temperatures=[0.0]"]
    words += ["evaluate.serving=null", f"run.directory={tmp_path / 'run'}"]
    settings = load_settings(write_config(tmp_path, target), words)
    # Decoding and publishing do not depend on the family, but for Gemma-4's own block.
    stages = None if family == "gemma4" else ["regenerate", "cache", "train"]
    run_stages(settings, Reporter(), only=stages)
    final = tmp_path / "run" / "checkpoints" / "final"
    drafter, values = load_drafter(final), json.loads((final / "config.json").read_text())
    assert values["architectures"] == [architecture]
    assert torch.equal(drafter.lm_head.weight, model.lm_head.weight.detach())
    assert torch.equal(drafter.embed_tokens.weight, model.get_input_embeddings().weight.detach())
    log = [json.loads(line) for line in (tmp_path / "run" / "checkpoints" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2]
    assert all(0 < line["loss"] < 20 and line["gradient_norm"] > 0 for line in log)
    if stages is None:
        assert damaged_files(tmp_path / "run" / "published") == []
        report = json.loads((tmp_path / "run" / "report" / "report.json").read_text())
        assert report["equality"]["equal"] == report["equality"]["compared"] > 0
