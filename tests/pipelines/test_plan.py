"""A plan is measured: tokens from the target's own answers, bytes from encoded states."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.data.conversations import evenly_spaced
from pipelines.progress import Reporter
from pipelines.runs.plan import make_plan, plan_text
from pipelines.runs.run import Run
from pipelines.settings import Settings, settings_from_dict
from pipelines.stages.capture import CaptureItem, CaptureWorker, Conversation, FitItem
from pipelines.target_spec import resolve_target
from storage.cache.target_cache import CachePlan, CodecSpec, TargetCache, finish
from storage.codecs.registry import HIDDEN_STATES, TEACHER, codec_names


def settings(folder: Path, target: Path, **sections: dict[str, Any]) -> Settings:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"question {index}"]}) + "\n" for index in range(20)))
    return settings_from_dict(
        {
            "run": {"directory": str(folder / "run")},
            "target": {"model": str(target), "dtype": "float32", "device": "cpu"},
            "data": {"train": [{"source": str(prompts)}]},
            "regenerate": {"max_new_tokens": 20, "batch_size": 4},
            "cache": {"hidden_states_codec": "int8", "teacher_codec": "bf16", "max_length": 64},
            "drafter": {"num_draft_layers": 2},
            "train": {"global_batch_size": 8, "num_train_epochs": 2},
            **sections,
        }
    )


def test_a_plan_measures_a_sample_and_scales_it(tmp_path: Path, toy_folder: Path) -> None:
    plan = make_plan(settings(tmp_path, toy_folder), Reporter(quiet=True), rows=6)
    assert (plan["prompts"], plan["sample_rows"], plan["train_steps"]) == (20, 6, 6)
    assert plan["raw_bytes_per_token"] == 2 * 64 * 2  # one captured layer and the last state
    by_name = {entry["codec"]: entry for entry in plan["codecs"]}
    for part, kind in (("features", HIDDEN_STATES), ("teacher", TEACHER)):
        assert {name for name, entry in by_name.items() if part in entry} == set(codec_names(kind))
    assert by_name["bf16"]["teacher"]["bound"] <= by_name["int8"]["teacher"]["bound"] < 0.1
    assert by_name["bf16"]["features"] == {"bytes": 128.0, "snr_db": None}
    assert by_name["int8"]["features"]["bytes"] < 80
    parts = plan["configured"]["parts"]
    assert sum(parts.values()) == pytest.approx(plan["configured"]["bytes_per_token"], abs=0.1)
    assert plan["cache_bytes"] == pytest.approx(plan["tokens"] * plan["configured"]["bytes_per_token"], rel=0.01)
    text = plan_text(json.loads(json.dumps(plan)))
    assert "reference's raw layout: 256 B/token" in text
    assert "fits" in text


def test_recorded_conversations_are_counted_exactly(tmp_path: Path, toy_folder: Path) -> None:
    wanted = settings(tmp_path, toy_folder, cache={"max_length": 30, "max_bytes": 10})
    conversations = tmp_path / "run/conversations"
    conversations.mkdir(parents=True)
    said = {"domain": "a", "thinking": False, "finish_reason": "stop", "conversations": []}
    rows = [{"id": str(index), "prompt_ids": [5] * 10, "response_ids": [6] * (15 + index)} for index in range(8)] + [
        {"id": "long prompt", "prompt_ids": [5] * 30, "response_ids": [6] * 30}
    ]
    (conversations / "train.jsonl").write_text("".join(json.dumps(said | row) + "\n" for row in rows))
    Run(wanted).finish("regenerate", seconds=1.0, result={})
    plan = make_plan(wanted, Reporter(quiet=True), rows=4)
    assert plan["conversations"] == 8  # a prompt that fills the whole length leaves nothing to learn
    assert plan["tokens"] == sum(min(30, 25 + index) for index in range(8))
    assert plan["tokens_are_exact"]
    assert "DOES NOT FIT" in plan_text(plan)


def test_spread_takes_from_everywhere() -> None:
    assert evenly_spaced(list(range(10)), 5) == [0, 2, 4, 6, 8]
    assert evenly_spaced([1, 2], 5) == [1, 2]


@pytest.mark.parametrize("teacher", ["auto", "recomputed"])
def test_a_plan_knows_what_a_pilot_will_leave(tmp_path: Path, toy_folder: Path, teacher: str) -> None:
    cache = {"hidden_states_codec": "auto", "teacher_codec": teacher, "components": 0.5, "max_length": 64}
    plan = make_plan(settings(tmp_path, toy_folder, cache=cache), Reporter(quiet=True), rows=6)
    configured = plan["configured"]
    assert configured["features"] == "projected"
    assert configured["teacher"] == ("corrected" if teacher == "auto" else "recomputed")
    assert configured["bytes_per_token"] < plan["raw_bytes_per_token"]
    (projected,) = (entry for entry in plan["codecs"] if entry["codec"] == "projected")
    assert configured["parts"]["context"] == pytest.approx(projected["features"]["bytes"], rel=0.01)


TOY = '''
import torch
from storage.codecs.base import Codec, from_raw, raw_bytes
from storage.codecs.registry import register


@register
class Rounded(Codec):
    """Whole multiples of a step, two bytes each."""

    name = "toy-rounded"
    defaults = {"step": 0.125}

    def encode(self, values, *, first=False):
        return raw_bytes((values.float() / self.settings["step"]).round().clamp(-32767, 32767).to(torch.int16).cpu())

    def decode(self, payload, rows, *, device="cpu", dtype=torch.bfloat16):
        codes = from_raw(payload, torch.int16, rows, self.width).to(device)
        return (codes.float() * self.settings["step"]).to(dtype)
'''


def test_a_codec_from_one_file_of_one_s_own(tmp_path: Path, toy_folder: Path) -> None:
    """By the settings to a cache and back, and into the table of what codecs cost."""
    plugin = tmp_path / "toy_codec.py"
    plugin.write_text(TOY)
    cache = {
        "hidden_states_codec": "toy-rounded",
        "hidden_states_options": {"step": 0.25},
        "teacher_codec": "toy-rounded",
        "max_length": 64,
    }
    wanted = settings(tmp_path, toy_folder, cache=cache, plugins=[str(plugin)])
    plan = make_plan(wanted, Reporter(quiet=True), rows=6)
    assert plan["configured"]["features"] == plan["configured"]["teacher"] == "toy-rounded"
    by_name = {entry["codec"]: entry for entry in plan["codecs"]}
    assert by_name["toy-rounded"]["features"]["bytes"] == 2 * 64
    assert 0 < by_name["toy-rounded"]["features"]["snr_db"] < by_name["int8"]["features"]["snr_db"]
    assert 0 < by_name["toy-rounded"]["teacher"]["bound"] < 0.2
    assert "toy-rounded" in plan_text(plan)

    spec = resolve_target(wanted)
    ids = [list(range(5, 5 + length)) for length in (9, 12)]
    rows = [Conversation(sample_id=f"row-{len(row)}", input_ids=row, spans=[(4, len(row))], extra={}) for row in ids]
    cache_plan = CachePlan(
        contract={},
        num_layers=len(spec.target_layer_ids),
        hidden_size=spec.hidden_size,
        samples=[(row.sample_id, len(row.input_ids)) for row in rows],
        **{
            part: CodecSpec(name=name, settings=options)
            for part, (name, options) in zip(
                ("hidden_states", "teacher"), map(wanted.cache.codec_of, ("features", "teacher")), strict=True
            )
        },
    )
    worker = CaptureWorker(wanted, spec, str(tmp_path / "cache"))
    worker.run(FitItem(rows=tuple(rows), plan=cache_plan))
    worker.run(CaptureItem(number=0, rows=tuple(rows), audit=frozenset()))
    finish(tmp_path / "cache")
    stored = TargetCache.open(tmp_path / "cache")
    assert stored.info()["codecs"]["features"]["settings"] == {"step": 0.25}
    for row, exact in zip(stored, worker.capture(rows), strict=True):
        expected = (exact.hidden_states.flatten(1).float() / 0.25).round() * 0.25
        assert torch.equal(row.hidden_states, expected.to(torch.bfloat16))
