"""Drafters of one target, decoded on the same prompts: paired figures, what is kept, what is refused."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.acceptance import paired_gain
from dspark.config import DrafterConfig
from dspark.contract import Contract
from dspark.decoding.target import Target
from dspark.models.checkpoint import save_drafter
from dspark.models.starting_weights import build_drafter
from pipelines.cli.commands import main
from pipelines.compare import compare, comparison_settings, differences, find_contenders, split_words
from pipelines.evaluation.comparison import account, errors, exactness
from pipelines.progress import Reporter
from pipelines.reporting.comparison import render_comparison
from pipelines.settings import load_settings
from pipelines.target_spec import resolve_target
from pipelines.workers import session

KINDS: dict[str, dict[str, Any]] = {
    "markov": {"markov_rank": 4, "block_size": 3},
    "eagle3": {"algorithm": "eagle3", "block_size": 2},
    "dflash": {"algorithm": "dflash", "block_size": 4},
}


def config_file(folder: Path, target: Path) -> str:
    prompts = [{"id": f"{domain}{i}", "domain": domain, "turns": ["ab c" * i]} for domain in "xy" for i in range(1, 4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    path = folder / "config.yaml"
    source = f"[{{source: {folder / 'prompts.jsonl'}}}]"
    lines = [
        f"run: {{directory: {folder / 'run'}}}",
        f"target: {{model: {target}, dtype: float32, device: cpu}}",
        f"data: {{train: {source}, calibration: {source}, evaluation: {source}}}",
        "evaluate: {max_new_tokens: 10, batch_size: 3, cost: {context: 8, repeats: 1}}",
        "cluster: {num_cpus: 2, cpus_per_worker: 1}",
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def folders(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained drafter of each kind with the toy target's top layer, as published folders."""
    top = tmp_path_factory.mktemp("drafters")
    target = Target.open(toy_folder, dtype="float32", device="cpu", target_layer_ids=(0,))
    settings = load_settings(config_file(top, toy_folder), ["drafter.target_layer_ids=[0]"])
    for name, options in KINDS.items():
        own = {"target_layer_ids": (0,), "num_draft_layers": 1, **options}
        config = DrafterConfig.for_target(target.text_config, mask_token_id=2, **own)
        torch.manual_seed(0)
        (top / name).mkdir()
        save_drafter(build_drafter(config, target, dtype=torch.float32), top / name, target.text_config)
        Contract.from_dict(resolve_target(settings).contract(settings, with_block=False)).write(top / name)
    return top


@pytest.fixture(scope="module")
def in_session(folders: Path) -> Iterator[str]:
    config = str(folders / "config.yaml")
    before = os.getcwd()
    with session(load_settings(config), str(folders)):
        yield config
    os.chdir(before)


@pytest.mark.slow
def test_a_comparison_is_exact_kept_and_shown(folders: Path, in_session: str, tmp_path: Path) -> None:
    def make(*names: str, words: tuple[str, ...] = ()) -> dict[str, Any]:
        contenders = find_contenders([str(folders / name) for name in names])
        settings = comparison_settings(contenders, in_session, ["evaluate.seeds=[0,1]", *words], str(tmp_path))
        return compare(contenders, settings, Reporter(quiet=True))

    report = make("markov", "eagle3")
    assert [row["name"] for row in report["drafters"]] == ["markov", "eagle3"]
    assert {name: (row["equal"], row["compared"]) for name, row in report["equality"].items()} == {
        "markov": (6, 6),
        "eagle3": (6, 6),
    }
    assert report["errors"] == []
    at = {(row["drafter"], row["temperature"], row["domain"]): row for row in report["accepted_length"]}
    assert at["markov", 1.0, "x"]["prompts"] == 3  # two seeds of a prompt are one prompt
    for row in report["gains"]:
        ours, theirs = (at[name, row["temperature"], row["domain"]]["value"] for name in ("eagle3", "markov"))
        assert row["value"] == pytest.approx(ours / theirs - 1)
        assert row["low"] <= row["high"]
    heads = {row["drafter"]: row["head_ms"] for row in report["costs"]}
    assert heads["markov"] is not None
    assert heads["eagle3"] is None
    assert [row["batch"] for row in report["costs"]] == [1, 16, 64] * 2
    assert {row["setting"] for row in report["differences"]} >= {"drafter.algorithm", "drafter.block_size"}

    page = (tmp_path / "compare.html").read_text()
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)""", page)
    assert not re.search(r"@import|url\((?!#|data:)", page)
    assert page.count('<svg class="chart"') == 6
    assert "eagle3" in (tmp_path / "compare.md").read_text()
    assert json.loads((tmp_path / "compare.json").read_text()) == report

    def parts() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "decoded").glob("*/[pic]*/*.*")}

    before = parts()
    assert len(before) > 0
    again = make("markov", "eagle3", "dflash")
    assert before.items() <= parts().items()  # only the third one was decoded
    assert len({path.parents[1] for path in parts()}) == 4
    assert [row for row in again["accepted_length"] if row["drafter"] == "markov"] == [
        row for row in report["accepted_length"] if row["drafter"] == "markov"
    ]
    kept = parts()
    make("eagle3", "markov", words=("evaluate.temperatures=[0.0]",))
    assert parts() == kept


def test_what_cannot_be_compared_is_refused(
    folders: Path, toy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(folders / "config.yaml")

    def message(*words: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(["compare", *words, "--output", str(tmp_path / "out")])
        assert stopped.value.code == 2
        return capsys.readouterr().err

    markov, eagle = str(folders / "markov"), str(folders / "eagle3")
    assert "two drafters or more" in message(markov)
    assert "add --config CONFIG" in message(markov, eagle)
    assert "neither run.json nor config.json" in message(markov, str(tmp_path))
    assert "the name 'a' is taken" in message(f"a={markov}", f"a={eagle}")
    assert "there is no such drafter" in message(markov, eagle, "--config", config, "--baseline", "other")
    for name in ("weights_sha256", "tokenizer_sha256"):
        other = tmp_path / name
        shutil.copytree(markov, other)
        contract = json.loads((other / "contract.json").read_text())
        (other / "contract.json").write_text(json.dumps({**contract, name: "0" * 64}))
        assert f"{name} is 000" in (said := message(markov, str(other), "--config", config))
        assert "set target.model to its target" in said
    shutil.copytree(markov, tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"cut off")
    assert "is cut off or damaged" in message(markov, str(tmp_path / "cut"), "--config", config)
    assert not (tmp_path / "out" / "decoded").exists()


def test_words_are_drafters_or_settings(folders: Path) -> None:
    words = ["runs/a", "b=runs/b", "evaluate.batch_size=2", "odd.key=x"]
    assert split_words(words) == (["runs/a", "b=runs/b", "odd.key=x"], ["evaluate.batch_size=2"])
    found = find_contenders([str(folders / "markov"), f"mine={folders / 'markov'}", str(folders / "markov")])
    assert [one.name for one in found] == ["markov", "mine", "markov-2"]


def test_a_paired_interval_is_that_of_a_plain_resampling() -> None:
    rng = np.random.default_rng(5)
    domains = []
    for prompts in (5, 7):
        rounds = rng.integers(4, 9, size=(prompts, 2))
        committed = rounds + rng.integers(0, 12, size=(prompts, 2))
        domains.append([np.stack([committed[:, side], rounds[:, side]], axis=1) for side in (0, 1)])
    found = paired_gain([pair[0] for pair in domains], [pair[1] for pair in domains], draws=4000)

    def length(side: int, chosen: list[list[int]]) -> float:
        total = 0.0
        for pair, prompts in zip(domains, chosen, strict=True):
            committed = sum(int(pair[side][p][0]) for p in prompts)
            total += committed / sum(int(pair[side][p][1]) for p in prompts)
        return total / len(domains)

    everyone = [list(range(len(pair[0]))) for pair in domains]
    assert found.value == pytest.approx(length(0, everyone) / length(1, everyone) - 1)
    drawn = []
    for _ in range(4000):
        chosen = [list(rng.integers(0, len(all_), size=len(all_))) for all_ in everyone]
        drawn.append(length(0, chosen) / length(1, chosen) - 1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    # Two bootstraps of 4,000 draws differ by their own noise, a few hundredths of the interval's width.
    assert found.low == pytest.approx(low, abs=0.05 * (high - low))
    assert found.high == pytest.approx(high, abs=0.05 * (high - low))
    alone = paired_gain([domains[0][0][:1]], [domains[0][1][:1]])
    assert np.isnan(alone.low)
    assert np.isnan(alone.high)


def test_a_text_that_differs_is_an_error_and_a_baseline_that_wins_is_named() -> None:
    def row(drafter: str, *ids: int) -> dict[str, Any]:
        place = {"request_id": "p", "prompt_id": "p", "turn": 0, "seed": 0, "temperature": 0.0}
        return {**place, "drafter": drafter, "output_ids": ids, "logit_gaps": [1.0] * len(ids)}

    found = exactness([row("plain", 1, 2, 3), row("good", 1, 2, 3), row("bad", 1, 5, 3)], ["good", "bad"])
    (said,) = errors(found)
    assert said.startswith("bad: 1 of 1 texts at temperature 0 differ from plain greedy decoding (first: p, token 2)")
    gain = {"drafter": "a", "against": "b", "temperature": 0.0, "domain": "mean", "prompts": 9}
    values = [(-0.1, -0.2, -0.05), (0.2, 0.1, 0.3), (0.0, -0.1, 0.1), (0.1, None, None)]
    texts = list(account([{**gain, "value": value, "low": low, "high": high} for value, low, high in values]))
    for text, expected in zip(
        texts, ("a is behind b by 10.0%", "a is ahead of b by 20.0%", "told apart", "too few"), strict=True
    ):
        assert expected in text


def test_only_settings_that_differ_are_told() -> None:
    own = {"a": {"train.learning_rate": 1e-3, "run.seed": 0, "cache.codec": "x"}, "b": {"train.learning_rate": 2e-3}}
    own["b"]["run.seed"] = 0
    assert differences(own) == [{"setting": "train.learning_rate", "values": {"a": 1e-3, "b": 2e-3}}]


def test_names_are_shown_as_text() -> None:
    drafter = {"algorithm": "dspark", "block_size": 1, "num_draft_layers": 1, "parameters": 1, "weights_sha256": "0"}
    report = {
        "title": "t",
        "target": {"name": "t"},
        "baseline": "a",
        "prompts": 1,
        "created": "2026-01-01",
        "temperatures": [],
        "drafters": [{**drafter, "name": "<script>alert(1)</script>", "folder": "f"}],
        "errors": ["<b>wrong</b>"],
        "skipped": {},
        "equality": {},
        "account": [],
        **{name: [] for name in ("accepted_length", "gains", "positions", "costs", "differences")},
    }
    page = render_comparison(report)
    assert "<script" not in page
    assert "&lt;b&gt;wrong" in page
