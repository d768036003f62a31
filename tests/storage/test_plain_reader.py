"""docs/cache-format.md is enough to read a cache: a reader written from it alone gets what ours gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_builders import HIDDEN, LAYERS, SAMPLES, make_plan, make_row
from plain_reader import PlainReader

from storage.cache import shards
from storage.cache.plan import CachePlan, Codecs
from storage.cache.records import CacheRow, teacher_positions
from storage.cache.shards import StoredRow
from storage.cache.target_cache import TargetCache, create_or_resume, finish, write_shard
from storage.codecs.base import TargetParts, TeacherRow
from storage.codecs.fitting import fit_codec, fit_teacher
from storage.codecs.registry import CodecSpec

WIDTH, VOCABULARY = LAYERS * HIDDEN, 300
HEAD = 0.7 * torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(4))
CASES: dict[str, tuple[str, str | None, str, dict[str, Any], dict[str, Any]]] = {
    "exact": ("bf16", "bf16", "all", {}, {}),
    "planes": ("bf16-planes", "bf16-planes", "supervised", {}, {}),
    "int8": ("int8", "int8", "all", {}, {}),
    "fp8": ("fp8", "fp8", "supervised", {}, {}),
    "transform": ("transform", "transform", "all", {}, {}),
    "fine-steps": ("transform", "transform", "all", {"step": 1e-3}, {"step": 1e-3}),
    "layers-apart": ("transform", "corrected", "supervised", {"decorrelate": "layer"}, {"top": 0}),
    "components": ("transform", "corrected", "all", {"output": "coordinates"}, {}),
    "default": ("projected", "corrected", "supervised", {"directions": 40}, {}),
    "recomputed": ("transform", "recomputed", "supervised", {}, {}),
    "sparse": ("int8", "sparse", "all", {}, {}),
    "no-teacher": ("bf16", None, "supervised", {}, {}),
}


def layers_above(states: torch.Tensor) -> torch.Tensor:
    """Stands for the target's layers above the last captured one: each row depends on the rows before it."""
    return torch.tanh(0.2 * states + 0.1 * states.cumsum(0) / torch.arange(1, len(states) + 1)[:, None])


def rows_of(teacher: str | None) -> list[CacheRow]:
    """One of them has outliers, which the codes escape for."""
    rows = [make_row(*sample) for sample in SAMPLES]
    rows[4].hidden_states[3, 1, :7] = torch.tensor([1e5, -3e4, 900.0, -900.0, 77.0, -40.0, 1e4])
    if teacher == "recomputed":
        rows = [replace(row, last_hidden_state=layers_above(row.hidden_states[:, -1].float())) for row in rows]
    return rows


def build(root: Path, case: str) -> CachePlan:
    hidden_states, teacher, scope, of_features, of_teacher = CASES[case]
    rows = rows_of(teacher)
    plan = make_plan(
        hidden_states=CodecSpec(name=hidden_states, settings=of_features),
        teacher=CodecSpec(name=teacher, settings=of_teacher) if teacher else None,
        teacher_scope=scope,
        spans=[row.spans for row in rows],
        tokens_per_shard=150,
    )
    given = None
    if hidden_states == "projected":
        basis = torch.linalg.qr(torch.randn(WIDTH, 60, generator=torch.Generator().manual_seed(9)))[0]
        given = {"projection": basis.T.contiguous(), "shares": torch.linspace(1.0, 0.1, 60)}
    sample = [(row.hidden_states.flatten(1), True) for row in map(make_row, *zip(*SAMPLES, strict=True))]
    fitted = fit_codec(plan.hidden_states, sample, width=WIDTH, layers=LAYERS, tensors=given)
    fitted_teacher = None
    if plan.teacher is not None:
        at = [teacher_positions(tuple(row.spans), len(row.input_ids), scope) for row in rows]
        known = [
            TeacherRow(
                hidden_states=row.hidden_states.flatten(1).float(),
                last_hidden_state=row.last_hidden_state.float(),
                positions=positions,
            )  # type: ignore[union-attr]
            for row, positions in zip(rows, at, strict=True)
            if len(positions)
        ]
        parts = TargetParts(head=HEAD, finish=layers_above)
        fitted_teacher = fit_teacher(plan.teacher, known, width=HIDDEN, target=parts)
    codecs = Codecs(hidden_states=fitted, teacher=fitted_teacher)
    create_or_resume(root, plan, codecs)
    for shard, (start, stop) in enumerate(plan.shards):
        write_shard(root, shard, rows[start:stop], codecs)
    finish(root)
    return plan


@pytest.mark.parametrize("case", CASES)
def test_two_readers_agree(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BATCH_BYTES", 3_000)  # several record batches in a shard
    build(tmp_path, case)
    cache, plain = TargetCache.open(tmp_path), PlainReader(tmp_path)
    assert max(len(commit["batches"]) for commit in plain.commits) > 1
    assert len(plain) == len(cache)
    ours = list(cache.rows(range(len(cache)), dtype=torch.float32))
    for index, (expected, row) in enumerate(zip(ours, plain.rows(), strict=True)):
        assert (row.sample_id, row.extra) == (expected.sample_id, expected.extra)
        assert row.input_ids.tolist() == expected.input_ids.tolist()
        assert [tuple(span) for span in row.spans.tolist()] == list(expected.spans)
        assert_close(row.hidden_states, expected.hidden_states)
        assert_same_teacher(row.teacher, row.positions, expected)
        assert_close(plain.row(index).hidden_states, expected.hidden_states)


def assert_same_teacher(plain: dict[str, np.ndarray], positions: np.ndarray, row: StoredRow) -> None:
    stored = row.teacher
    if stored is None or not len(row.teacher_positions):
        assert plain == {}
        return
    assert positions.tolist() == row.teacher_positions.tolist()
    if stored.tail_mass is not None:
        assert stored.top_values is not None
        assert plain["top_ids"].tolist() == stored.top_ids.tolist()  # type: ignore[union-attr]
        assert_close(plain["top_probabilities"], stored.top_values.exp())
        assert_close(plain["tail"][:, None], stored.tail_mass[:, None])
        return
    if stored.source is not None:
        assert_close(plain["source"], stored.source)
    else:
        assert stored.last_hidden_state is not None
        assert_close(plain["states"], stored.last_hidden_state)
    assert ("top_ids" in plain) == (stored.top_ids is not None)
    if stored.top_ids is not None:
        assert stored.top_values is not None
        assert plain["top_ids"].tolist() == stored.top_ids.tolist()
        assert_close(plain["top_offsets"], stored.top_values)


def assert_close(plain: np.ndarray, ours: torch.Tensor) -> None:
    """Equal up to the order in which the float32 sums of a row are taken."""
    expected = ours.float().numpy()
    assert plain.shape == expected.shape
    assert (np.abs(plain - expected) <= 4e-6 * np.abs(expected).max(axis=-1, keepdims=True)).all()
