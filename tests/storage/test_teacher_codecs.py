"""Teacher codecs that know the target, against the exact teacher. P positions, V vocabulary, d hidden size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.codecs.base import Codec, StoredTeacher, TargetParts, TeacherRow
from storage.codecs.fitting import dump_codec, fit_teacher, load_codec
from storage.codecs.measure import teacher_error
from storage.codecs.registry import CodecSpec
from storage.codecs.top_tokens import pack_top, unpack_top

HIDDEN, LAYERS, VOCABULARY = 32, 2, 300
KINDS = ["corrected", "recomputed", "sparse"]
MIXING = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(3)) / HIDDEN**0.5


def finish(states: torch.Tensor) -> torch.Tensor:
    """Stands for the target's layers above the last captured one: each row depends on the rows before it."""
    mean = states.cumsum(0) / torch.arange(1, len(states) + 1)[:, None]
    return torch.tanh(0.2 * states + 0.1 * mean) @ MIXING


def there_and_back(codec: Codec, row: TeacherRow) -> StoredTeacher:
    payload = codec.encode_teacher(row.hidden_states, row.last_hidden_state, row.positions)
    return codec.decode_teacher(payload, row.positions)


def target(soft_cap: float | None = None) -> TargetParts:
    head = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(4))
    return TargetParts(head=0.7 * head, soft_cap=soft_cap, finish=finish)


def rows(count: int = 8, length: int = 60, seed: int = 0) -> list[TeacherRow]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        hidden_states = torch.randn(length, LAYERS * HIDDEN, generator=generator) * torch.linspace(
            1, 4, LAYERS * HIDDEN
        )
        hidden_states[0] = 500.0
        last = finish(hidden_states[:, -HIDDEN:])
        positions = np.arange(0 if index % 2 else 20, length - 1)
        found.append(TeacherRow(hidden_states=hidden_states, last_hidden_state=last, positions=positions))
    return found


def fitted(kind: str, **options: Any) -> Codec:
    return fit_teacher(CodecSpec(name=kind, settings=options), rows(), width=HIDDEN, target=target())


def probabilities(stored: StoredTeacher, positions: np.ndarray) -> torch.Tensor:
    """[P, V], spelt out row by row; the tail of a sparse teacher is left out."""
    if stored.tail_mass is not None:
        assert stored.top_ids is not None
        assert stored.top_values is not None
        full = torch.zeros(len(positions), VOCABULARY)
        for p in range(len(positions)):
            full[p, stored.top_ids[p]] = stored.top_values[p].exp()
        return full
    states = stored.last_hidden_state if stored.source is None else finish(stored.source)[torch.from_numpy(positions)]
    logits = target().logits(states)  # type: ignore[arg-type]
    for p in range(len(positions)):
        assert stored.top_ids is not None
        assert stored.top_values is not None
        for token, offset in zip(stored.top_ids[p], stored.top_values[p], strict=True):
            logits[p, token] += offset
    return logits.softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [0, 1])
def test_the_teacher_comes_back_and_its_top_is_right(kind: str, index: int) -> None:
    codec = fitted(kind, top=12)
    row = rows(seed=5)[index]
    payload = codec.encode_teacher(row.hidden_states, row.last_hidden_state, row.positions)
    again = load_codec(*dump_codec(codec)).decode_teacher(payload, row.positions, dtype=torch.float32)
    exact = target().logits(row.last_hidden_state[torch.from_numpy(row.positions)]).softmax(-1)
    coded = probabilities(again, row.positions)
    top = exact.topk(12, dim=-1).indices
    assert torch.allclose(coded.gather(1, top), exact.gather(1, top), rtol=0.04, atol=2e-3)


def test_offsets_leave_the_rest_with_its_exact_mass() -> None:
    codec = fitted("corrected", top=5, step=0.2, resolution=64)
    row = rows(seed=6)[0]
    payload = codec.encode_teacher(row.hidden_states, row.last_hidden_state, row.positions)
    stored = codec.decode_teacher(payload, row.positions, dtype=torch.float32)
    coded = probabilities(stored, row.positions)
    exact = target().logits(row.last_hidden_state[torch.from_numpy(row.positions)]).softmax(-1)
    assert stored.top_ids is not None
    rest = 1 - exact.gather(1, stored.top_ids).sum(-1)
    assert torch.allclose(1 - coded.gather(1, stored.top_ids).sum(-1), rest, rtol=0.1, atol=0.01)


def test_finer_steps_and_more_corrections_cost_bytes_and_save_error() -> None:
    kinds = [
        fitted("corrected", step=step, top=top).measured for step, top in ((0.5, 0), (0.5, 16), (0.1, 16), (0.02, 16))
    ]
    assert [k["bytes_per_token"] for k in kinds] == sorted(k["bytes_per_token"] for k in kinds)
    bounds = [k["acceptance"]["bound"] for k in kinds]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] < 0.02 < bounds[0]


def test_a_recomputed_teacher_sees_the_whole_context() -> None:
    codec = fitted("recomputed", step=0.05, top=0)
    row = rows(seed=7)[0]
    stored = codec.decode_teacher(
        codec.encode_teacher(row.hidden_states, row.last_hidden_state, row.positions), row.positions
    )
    assert stored.last_hidden_state is None
    assert stored.source is not None
    assert stored.source.shape == (int(row.positions[-1]) + 1, HIDDEN)
    assert codec.measured["acceptance"]["bound"] < 0.05


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_holds_for_any_drafter(kind: str, temperature: float) -> None:
    """The rate of drafters of many kinds, computed one by one, moves by no more than the bound."""
    codec = fitted(kind, **({} if kind == "sparse" else {"step": 0.3}))
    row = rows(seed=8)[1]
    stored = codec.decode_teacher(
        codec.encode_teacher(row.hidden_states, row.last_hidden_state, row.positions), row.positions
    )
    if stored.source is not None:
        states = finish(stored.source)[torch.from_numpy(row.positions)]
        stored = replace(stored, source=None, last_hidden_state=states)
    exact_states = row.last_hidden_state[torch.from_numpy(row.positions)]
    found = teacher_error(exact_states, stored, target(), temperature=temperature)
    logits = target().logits(exact_states)

    def sharpened(values: torch.Tensor) -> torch.Tensor:
        if temperature == 0:
            return torch.nn.functional.one_hot(values.argmax(-1), VOCABULARY).float()
        return (values / temperature).softmax(-1)

    exact = sharpened(logits)
    coded = sharpened(probabilities(stored, row.positions).clamp_min(1e-30).log())
    for seed, noise in enumerate((0.1, 1.0, 3.0)):
        draft = sharpened(logits + noise * torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)))
        moved = (torch.minimum(draft, exact).sum(-1) - torch.minimum(draft, coded).sum(-1)).abs().mean()
        assert moved <= found["bound"] + 1e-3
    assert found["error"] <= found["bound"] + 1e-6


def test_the_bound_is_total_variation() -> None:
    exact, coded = torch.tensor([[0.0, 0.0, 0.0]]).log_softmax(-1), torch.tensor([[0.5, 0.25, 0.25]]).log()
    found = teacher_error(exact, StoredTeacher(last_hidden_state=coded), TargetParts(head=torch.eye(3)))
    assert found["bound"] == pytest.approx(0.5 - 1 / 3, abs=1e-4)
    with pytest.raises(ValueError, match="temperature"):
        teacher_error(exact, StoredTeacher(last_hidden_state=coded), TargetParts(head=torch.eye(3)), temperature=-1.0)


@settings(max_examples=40)
@given(st.integers(0, 30), st.integers(1, 9), st.sampled_from([300, 65_536, 151_936, 262_144]), st.integers(0, 10**6))
def test_top_tokens_come_back(count: int, top: int, vocabulary: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    ids = np.stack([np.sort(generator.choice(vocabulary, top, replace=False)) for _ in range(count)] or [np.empty(0)])
    ids = torch.from_numpy(ids.reshape(count, top).astype(np.int64))
    codes = torch.from_numpy(generator.integers(-127, 128, (count, top)).astype(np.int8))
    again = unpack_top(pack_top(ids, codes, vocabulary, level=1), count, top)
    assert torch.equal(again[0], ids)
    assert torch.equal(again[1], codes)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="give the target"):
        fit_teacher(CodecSpec(name="corrected"), rows(), width=HIDDEN)
    loaded = load_codec(*dump_codec(fitted("corrected")))
    row = rows()[0]
    with pytest.raises(ValueError, match="needs the target's head"):
        loaded.encode_teacher(row.hidden_states, row.last_hidden_state, row.positions)
    payload = fitted("sparse").encode_teacher(row.hidden_states, row.last_hidden_state, row.positions)
    with pytest.raises(ValueError, match="keeps no states"):
        fitted("sparse").decode(payload, 3)
    with pytest.raises(ValueError, match="a zstd frame announces"):
        fitted("sparse").decode_teacher(payload, row.positions[:-1])
    with pytest.raises(ValueError, match="top = -1"):
        fitted("corrected", top=-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", [[0], [5], [0, 7]])
def test_rows_of_few_tokens(kind: str, positions: list[int]) -> None:
    codec = fitted(kind)
    length = positions[-1] + 1
    row = rows(seed=9)[0]
    hidden_states, last, at = row.hidden_states[:length], row.last_hidden_state[:length], np.array(positions)
    stored = codec.decode_teacher(codec.encode_teacher(hidden_states, last, at), at, dtype=torch.float32)
    exact = target().logits(last[torch.from_numpy(at)]).softmax(-1)
    assert (probabilities(stored, at) - exact).abs().sum(-1).max() < 0.4


@pytest.mark.parametrize("kind", KINDS)
def test_an_outlier_of_1e5_stays_finite_and_harms_no_other_row(kind: str) -> None:
    codec = fitted(kind)
    row = rows(seed=10)[1]
    plain = codec.decode_teacher(
        codec.encode_teacher(row.hidden_states, row.last_hidden_state, row.positions), row.positions
    )
    hidden_states, last = row.hidden_states.clone(), row.last_hidden_state.clone()
    hidden_states[40, 3], last[40, 3] = 1e5, 1e5
    stored = codec.decode_teacher(codec.encode_teacher(hidden_states, last, row.positions), row.positions)
    # What is recomputed sees what came before: there the outlier is a fact of the rows behind it.
    others = row.positions < 40 if kind == "recomputed" else row.positions != 40
    for name in ("last_hidden_state", "top_ids", "top_values", "tail_mass"):
        value, before = getattr(stored, name), getattr(plain, name)
        if value is not None:
            assert bool(torch.isfinite(value).all())
            assert torch.equal(value[others], before[others])


@pytest.mark.parametrize("kind", KINDS)
def test_32k_teacher_positions(kind: str) -> None:
    codec = fitted(kind)
    length = 2**15
    generator = torch.Generator().manual_seed(12)
    hidden_states = torch.randn(length, LAYERS * HIDDEN, generator=generator) * torch.linspace(1, 4, LAYERS * HIDDEN)
    last, positions = finish(hidden_states[:, -HIDDEN:]), np.arange(1, length)
    stored = codec.decode_teacher(codec.encode_teacher(hidden_states, last, positions), positions)
    ids = stored.top_ids
    assert ids is not None
    assert len(ids) == length - 1
    assert bool((ids[:, 1:] > ids[:, :-1]).all())
