"""Drafters that read components of the features, and teachers made of stored parts."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from small_models import a_drafter, tiny_target
from torch import Tensor

from dspark.config import SettingError
from dspark.decoding.target import TargetError
from dspark.decoding.target_tail import TargetTail
from dspark.losses.micro_batch import Teacher
from dspark.losses.output_head import OutputHead, TeacherReader, log_normalizers
from dspark.models.checkpoint import load_drafter, save_drafter
from dspark.models.merged_projection import context_projection, merge_projection

WIDTH, COMPONENTS = 96, 40


def projection() -> tuple[Tensor, Tensor]:
    """P [C, W] and a unprojection [W, C] that undoes it on the space that P keeps."""
    p = torch.randn(COMPONENTS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return p.float(), torch.linalg.pinv(p).float()


@pytest.mark.parametrize("kind", ["vanilla", "dflash", "eagle3", "reduced"])
def test_a_drafter_trained_on_components_is_published_as_one_on_hidden_states(kind: str, tmp_path: Path) -> None:
    """Exactly the same function, without a bias, whatever its weights on the components have become."""
    target = tiny_target()
    drafter = a_drafter(target, kind)
    hidden_states = torch.randn(11, WIDTH, generator=torch.Generator().manual_seed(1))
    p, unprojection = projection()
    merge_projection(drafter, p, unprojection)
    torch.nn.init.normal_(drafter.fc.weight, std=0.3)  # as training would leave it
    trained = drafter.project_context(hidden_states @ p.t())
    save_drafter(drafter, tmp_path, target.text_config)
    published = load_drafter(tmp_path)
    assert published.fc.weight.shape == (32, WIDTH)
    torch.testing.assert_close(published.project_context(hidden_states), trained, rtol=1e-5, atol=1e-5)
    names = {name for name, _ in drafter.named_parameters()}
    assert names == {name for name, _ in published.named_parameters()}


def test_what_the_components_know_of_the_hidden_states_is_read_as_before() -> None:
    drafter = a_drafter(tiny_target(), "vanilla")
    p, unprojection = projection()
    before = context_projection(drafter).clone()
    kept = (
        torch.randn(7, COMPONENTS, generator=torch.Generator().manual_seed(2)) @ unprojection.t()
    )  # in the space P keeps
    expected = drafter.project_context(kept)
    merge_projection(drafter, p, unprojection)
    torch.testing.assert_close(drafter.project_context(kept @ p.t()), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(context_projection(drafter) @ kept.t(), before @ kept.t(), rtol=1e-4, atol=1e-4)


def test_hidden_states_of_other_layers_are_refused() -> None:
    drafter = a_drafter(tiny_target(), "vanilla")
    with pytest.raises(SettingError, match="components of 64 values"):
        merge_projection(drafter, torch.randn(8, 64), torch.randn(64, 8))
    merge_projection(drafter, *projection())
    with pytest.raises(SettingError, match="96 wide"):
        drafter.project_context(torch.randn(3, WIDTH))


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("known", [False, True], ids=["normaliser computed", "normaliser known"])
@pytest.mark.parametrize("reduced", [None, 30], ids=["full", "reduced"])
def test_offsets_are_added_to_the_teachers_logits(reduced: int | None, known: bool, soft_cap: float | None) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, states = torch.randn(97, 16, generator=generator), torch.randn(9, 16, generator=generator)
    ids = torch.stack([torch.randperm(97, generator=generator)[:5] for _ in range(9)])
    values = torch.randn(9, 5, generator=generator)
    drafted = None if reduced is None else torch.arange(3, 3 + reduced)
    head = OutputHead.create(weight, soft_cap=soft_cap, draft_token_ids=drafted)
    teacher = Teacher(last_hidden_state=states, top_ids=ids, top_values=values)
    if known:
        teacher.log_normalizers = log_normalizers(teacher, head, chunk_rows=4)
    logits = states @ weight.t()
    logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    for row in range(9):
        for token, value in zip(ids[row], values[row], strict=True):
            logits[row, token] += value
    expected = logits.softmax(-1)
    expected = expected if drafted is None else expected[:, drafted]
    reader = TeacherReader(teacher, head, max_rows=4, entropy=False)
    read = torch.cat([reader.read(start, min(start + 4, 9)).probs.clone() for start in range(0, 9, 4)])
    torch.testing.assert_close(read, expected)
    picked = torch.tensor([4, 2, 2])
    torch.testing.assert_close(
        TeacherReader(teacher.rows(picked), head, max_rows=3, entropy=False).read(0, 3).probs, expected[picked]
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_targets_upper_layers_run_alone(kind: str) -> None:
    target = tiny_target(kind)
    captured = target.capture(torch.arange(3, 43)[None])
    tail = pickle.loads(pickle.dumps(TargetTail(target)))  # as a worker process gets it
    again = tail(captured.hidden_states[0, :, -target.hidden_size :])
    torch.testing.assert_close(again, captured.last_hidden_state[0], rtol=1e-4, atol=1e-4)


def test_a_target_whose_upper_layers_do_not_run_alone_is_refused() -> None:
    target = tiny_target()
    whole = target.decoder.forward
    target.decoder.forward = lambda **inputs: whole(**inputs)  # always all of its layers
    with pytest.raises(TargetError, match=r"another cache\.teacher_codec"):
        TargetTail(target)
