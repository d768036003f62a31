"""Drafters that cannot be are refused before anything is computed, with value, allowed range and the option's name."""

from pathlib import Path

import pytest
from whole_run import write_config

from pipelines.progress import Reporter
from pipelines.runs.executor import run_stages
from pipelines.settings import load_settings


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("drafter.target_layer_ids=[1]", r"target_layer_ids is 1; allowed: -1 .* to 0 .*drafter\.target_layer_ids"),
        ("drafter.target_layer_ids=[7]", r"target_layer_ids is 7; .* 2 layers .*drafter\.target_layer_ids"),
        ("drafter.target_layer_ids=[-1]", r"target_layer_ids has -1; .*publish\.engines"),
        ("drafter.mask_token_id=4000", r"mask_token_id is 4000; allowed: 0 to .*drafter\.mask_token_id"),
        ("drafter.block_size=65", r"drafter\.block_size is 65; .*64"),
        ("drafter.markov_rank=0", r"drafter\.confidence_head_with_markov=false"),
        ("drafter.markov_head_type=gated", r"draft_vocab_size is 128; .*gated .*drafter\.draft_vocab_size"),
        ("drafter.draft_vocab_size=5000", r"draft_vocab_size is 5000; allowed: 1 to .*drafter\.draft_vocab_size"),
        ("drafter.algorithm=eagle3 drafter.num_draft_layers=2", r"num_draft_layers is 2; allowed: 1 for eagle3"),
        ("drafter.block_layout=mask-first", r"block_layout is 'mask-first'; .*drafter\.block_layout"),
        ("train.loss.l1=-1.0", r"train\.loss\.l1 is -1"),
        ("drafter.algorithm=eagle3 drafter.block_size=0", r"drafter\.block_size is 0; .*1"),
    ],
)
def test_nothing_is_started(words: str, message: str, toy_folder: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, toy_folder)
    with pytest.raises(ValueError, match=message):
        run_stages(load_settings(config, [f"run.directory={tmp_path / 'run'}", *words.split()]), Reporter())
    assert not (tmp_path / "run" / "conversations").exists()
