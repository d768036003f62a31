"""What a worker writes: each row's own states, whatever it was batched with, in the plan's order."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pipelines.settings import load_settings
from pipelines.stages import capture
from pipelines.stages.capture import CaptureItem, CaptureWorker, Conversation, FitItem
from pipelines.target_spec import resolve_target
from storage.cache.target_cache import CachePlan, CodecSpec, NonFiniteState, TargetCache, create_or_resume, finish

LENGTHS = [9, 30, 4, 17, 30, 5, 22, 11, 2, 26, 8, 19]


def conversations() -> list[Conversation]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(3, 250, (length,), generator=generator).tolist()
        spans = [(length // 2, length)] if length > 2 else [(1, 2)]
        rows.append(Conversation(sample_id=f"row-{number}", input_ids=ids, spans=spans, extra={"domain": "a"}))
    return rows


@pytest.fixture
def settings(tmp_path: Path, toy_folder: Path) -> Any:
    values = {
        "extends": str(Path(__file__).parents[2] / "configs" / "tiny.yaml"),
        "target": {"model": str(toy_folder), "dtype": "float32"},
        "drafter": {"target_layer_ids": [0, 1]},
        "cache": {"max_num_batched_tokens": 48},
    }
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(values))
    return load_settings(str(tmp_path / "settings.yaml"), [])


def plan_of(spec: Any, settings: Any, codec: str) -> CachePlan:
    rows = conversations()
    return CachePlan(
        contract=spec.contract(settings, with_block=False),
        num_layers=len(spec.target_layer_ids),
        hidden_size=spec.hidden_size,
        samples=[(row.sample_id, len(row.input_ids)) for row in rows],
        spans=[row.spans for row in rows],
        hidden_states=CodecSpec(name=codec),
        teacher=CodecSpec(name=codec),
        tokens_per_shard=100,
    )


def build(root: Path, settings: Any, codec: str = "bf16") -> TargetCache:
    spec = resolve_target(settings)
    plan = plan_of(spec, settings, codec)
    worker, rows = CaptureWorker(settings, spec, str(root)), conversations()
    if codec == "bf16":
        create_or_resume(root, plan)
    else:
        worker.run(FitItem(rows=tuple(rows), plan=plan))
    for number, (start, stop) in enumerate(plan.shards):
        worker.run(CaptureItem(number=number, rows=tuple(rows[start:stop]), audit=frozenset()))
    finish(root)
    return TargetCache.open(root)


def test_batched_rows_equal_rows_alone(tmp_path: Path, settings: Any) -> None:
    cache = build(tmp_path / "cache", settings)
    target = CaptureWorker(settings, resolve_target(settings), str(tmp_path / "cache")).target
    for stored, row in zip(cache, conversations(), strict=True):
        assert (stored.sample_id, list(stored.spans), stored.extra) == (row.sample_id, row.spans, row.extra)
        alone = target.capture(torch.tensor([row.input_ids]))
        torch.testing.assert_close(stored.hidden_states, alone.hidden_states[0].bfloat16(), rtol=2**-7, atol=1e-3)
        last = alone.last_hidden_state[0, stored.teacher_positions].bfloat16()
        torch.testing.assert_close(stored.last_hidden_state, last, rtol=2**-7, atol=1e-3)


def test_a_sample_is_captured_in_its_order(tmp_path: Path, settings: Any) -> None:
    rows = conversations()
    assert [len(row.input_ids) for row in rows] != sorted(
        len(row.input_ids) for row in rows
    )  # batches are of like length
    captured = CaptureWorker(settings, resolve_target(settings), str(tmp_path / "cache")).capture(rows)
    assert [(row.sample_id, list(row.input_ids)) for row in captured] == [(r.sample_id, r.input_ids) for r in rows]


def test_a_fitted_cache_is_the_same_each_time(tmp_path: Path, settings: Any) -> None:
    shards = []
    for name in ("once", "again"):
        build(tmp_path / name, settings, "transform")
        shards.append({path.name: path.read_bytes() for path in (tmp_path / name / "shards").iterdir()})
    assert shards[0]
    assert shards[0] == shards[1]


def test_memory_is_bounded_by_windows_of_rows(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no time do more states wait than those of a window and of the batch that is being computed."""
    monkeypatch.setattr(capture, "WINDOW_BATCHES", 1)
    spec = resolve_target(settings)
    create_or_resume(tmp_path / "cache", plan_of(spec, settings, "bf16"))
    worker = CaptureWorker(settings, spec, str(tmp_path / "cache"))
    forward, captured, ahead = worker._forward, 0, []

    def counted(batch: Any) -> Any:
        nonlocal captured
        captured += sum(len(row.input_ids) for row in batch)
        return forward(batch)

    monkeypatch.setattr(worker, "_forward", counted)
    taken = 0
    for columns in worker._encoded(conversations()):
        ahead.append(captured - taken)
        taken += len(columns["input_ids"])
    assert taken == captured == sum(LENGTHS)
    assert max(ahead) <= 2 * worker._budget + max(LENGTHS)


def test_an_infinite_state_names_unit_and_row(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = resolve_target(settings)
    create_or_resume(tmp_path / "cache", plan_of(spec, settings, "bf16"))
    worker = CaptureWorker(settings, spec, str(tmp_path / "cache"))
    real = worker.target.capture

    def broken(input_ids: Any, mask: Any) -> Any:
        states = real(input_ids, mask)
        states.hidden_states[input_ids[:, 0] == conversations()[1].input_ids[0], 3, 7] = float("inf")
        return states

    monkeypatch.setattr(worker.target, "capture", broken)
    with pytest.raises(NonFiniteState, match=r"shard 0 .*'row-1'.* hold inf at token 3, channel 7"):
        worker.run(CaptureItem(number=0, rows=tuple(conversations()[:5]), audit=frozenset()))
    assert list((tmp_path / "cache" / "shards").iterdir()) == []
