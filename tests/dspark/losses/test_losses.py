"""The fused loss against the formulas written out plainly in float64, and against the conformance data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import BLOCK_DRAFTERS, arrays, packed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from dspark.losses.anchors import anchors_weight
from dspark.losses.fused_loss import fused_loss, slot_losses, slot_weights
from dspark.losses.losses import LossConfig, add_sums, loss_terms, metrics_of, slot_weightings
from dspark.losses.micro_batch import MicroBatch, Teacher
from dspark.losses.output_head import OutputHead, log_normalizers
from dspark.models.checkpoint import load_drafter
from dspark.models.heads import ConfidenceHead, build_head
from dspark.registry import SettingError

Weights = dict[str, float]
NOTHING: Weights = dict.fromkeys(loss_terms, 0.0)
PAPER: Weights = {"ce": 0.1, "l1": 0.9, "confidence": 1.0}
EVERYTHING: Weights = {
    "ce": 0.1,
    "l1": 0.2,
    "kl": 0.3,
    "soft_ce": 0.4,
    "negative_log_acceptance": 0.5,
    "lk_hybrid": 0.6,
    "confidence": 0.7,
}
TERMS: dict[str, Weights] = {
    "paper": PAPER,
    **{name: {name: 1.0} for name in EVERYTHING if name != "confidence"},
    "everything": EVERYTHING,
}


def weighted_terms(
    terms: Weights, weights: Tensor, log_p: Tensor, q: Tensor, outside: Tensor, labels: Tensor, confidence: Tensor
) -> Tensor:
    """Every term from draft log-probabilities and teacher probabilities on the same outcomes [M, D].

    `outside` is teacher mass that the draft cannot reach; a label below 0 has no cross-entropy.
    """
    of = {**NOTHING, **terms}
    p = log_p.exp()
    l1 = (p - q).abs().sum(-1) + outside
    acceptance = torch.minimum(p, q).sum(-1)
    ce = -log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0] * (labels >= 0)
    soft_ce = -(q * log_p).sum(-1)
    renormalised = q / q.sum(-1, keepdim=True)
    kl = (torch.xlogy(renormalised, renormalised) - renormalised * log_p).sum(-1)
    share = torch.exp(-3.0 * acceptance.detach())
    bce = F.binary_cross_entropy_with_logits(confidence, acceptance.detach().clamp(0, 1), reduction="none")
    value = of["ce"] * ce + of["l1"] * l1 + of["kl"] * kl + of["soft_ce"] * soft_ce + of["confidence"] * bce
    value = value - of["negative_log_acceptance"] * acceptance.log()
    return (weights * (value + of["lk_hybrid"] * (share * kl + (1 - share) * l1 / 2))).sum()


class Problem:
    """Random slots; `float32` numbers throughout, so that both precisions start from the same ones."""

    def __init__(self, seed: int, *, slots: int, rows: int, vocabulary: int, reduced: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        size, rank = 24, 6

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.head_weight = normal(vocabulary, size) * 0.6
        self.teacher = normal(rows, size)
        self.row = torch.randint(0, rows, (slots,), generator=generator)
        self.labels = torch.randint(0, vocabulary, (slots,), generator=generator)
        self.weights = torch.rand(slots, generator=generator)
        self.ids = None
        if reduced is not None:
            self.ids = torch.randperm(vocabulary, generator=generator)[:reduced].sort().values
        # Half of the drafts are near their teacher, as they are after training.
        near = self.teacher[self.row] + 0.1 * normal(slots, size)
        states = torch.where(torch.arange(slots)[:, None] % 2 == 0, near, normal(slots, size))
        self.inputs = [states, normal(slots, rank), normal(reduced or vocabulary, rank) * 0.3, normal(slots)]

    def head(self, dtype: torch.dtype, soft_cap: float | None) -> OutputHead:
        return OutputHead.create(self.head_weight.to(dtype), soft_cap=soft_cap, draft_token_ids=self.ids)

    def logits(self, states: Tensor, soft_cap: float | None) -> Tensor:
        logits = states @ self.head_weight.to(states.dtype).T
        return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)

    def draft_log_probs(self, inputs: list[Tensor], soft_cap: float | None) -> Tensor:
        states, bias_states, bias_weight, _ = inputs
        logits = self.logits(states, soft_cap)
        logits = logits if self.ids is None else logits[:, self.ids]
        return (logits + bias_states @ bias_weight.T).log_softmax(-1)

    def draft_labels(self) -> Tensor:
        if self.ids is None:
            return self.labels
        position = {token: at for at, token in enumerate(self.ids.tolist())}
        return torch.tensor([position.get(label, -1) for label in self.labels.tolist()])

    def plain(self, terms: Weights, soft_cap: float | None) -> tuple[Tensor, list[Tensor]]:
        inputs = [tensor.double().requires_grad_() for tensor in self.inputs]
        q = self.logits(self.teacher.double(), soft_cap).softmax(-1)[self.row]
        inside = q if self.ids is None else q[:, self.ids]
        log_p = self.draft_log_probs(inputs, soft_cap)
        outside = torch.zeros(len(q)).double() if self.ids is None else 1 - inside.sum(-1)
        loss = weighted_terms(terms, self.weights.double(), log_p, inside, outside, self.draft_labels(), inputs[3])
        return loss.detach(), gradients(loss, inputs)

    def fused(
        self, terms: Weights, dtype: torch.dtype, teacher: Any, *, soft_cap: float | None = None, chunk: int = 16
    ) -> tuple[Tensor, list[Tensor]]:
        inputs = [tensor.to(dtype).requires_grad_() for tensor in self.inputs]
        loss, _ = slot_losses(
            inputs[0],
            head=self.head(dtype, soft_cap),
            config=LossConfig(**{**NOTHING, **terms}, chunk_slots=chunk),
            weights=self.weights.to(dtype),
            labels=self.labels,
            teacher=teacher,
            teacher_row=self.row,
            bias_states=inputs[1],
            bias_weight=inputs[2],
            confidence_logits=inputs[3],
        )
        return loss.detach(), gradients(loss, inputs)


def gradients(loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def assert_close(ours: tuple[Tensor, list[Tensor]], plain: tuple[Tensor, list[Tensor]], tolerance: float) -> None:
    """Values, and gradients in norm, to a relative tolerance."""
    for mine, reference in zip([ours[0], *ours[1]], [plain[0], *plain[1]], strict=True):
        error = (mine.double() - reference).norm()
        assert error <= tolerance * reference.norm() + 1e-30, (error, reference.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-6)])
@pytest.mark.parametrize("soft_cap", [None, 4.0], ids=["uncapped", "capped"])
@pytest.mark.parametrize("reduced", [None, 300], ids=["full", "reduced"])
@pytest.mark.parametrize("name", TERMS)
def test_every_term_and_gradient_equals_the_plain_loss(
    name: str, reduced: int | None, soft_cap: float | None, dtype: torch.dtype, tolerance: float
) -> None:
    problem = Problem(3, slots=90, rows=40, vocabulary=700, reduced=reduced)
    plain = problem.plain(TERMS[name], soft_cap)
    teacher = Teacher(last_hidden_state=problem.teacher.to(dtype))
    assert_close(problem.fused(TERMS[name], dtype, teacher, soft_cap=soft_cap), plain, tolerance)
    head = problem.head(dtype, soft_cap)
    teacher.log_normalizers = log_normalizers(teacher, head, chunk_rows=7)
    assert_close(problem.fused(TERMS[name], dtype, teacher, soft_cap=soft_cap), plain, tolerance)


@given(
    seed=st.integers(0, 10_000),
    slots=st.integers(1, 40),
    rows=st.integers(1, 20),
    vocabulary=st.integers(3, 60),
    chunk=st.integers(1, 50),
    data=st.data(),
)
@settings(deadline=None, max_examples=40)
def test_any_shape_and_chunk_agrees(
    seed: int, slots: int, rows: int, vocabulary: int, chunk: int, data: st.DataObject
) -> None:
    reduced = data.draw(st.none() | st.integers(2, vocabulary))
    problem = Problem(seed, slots=slots, rows=rows, vocabulary=vocabulary, reduced=reduced)
    teacher = Teacher(last_hidden_state=problem.teacher.double())
    ours = problem.fused(EVERYTHING, torch.float64, teacher, chunk=chunk)
    assert_close(ours, problem.plain(EVERYTHING, None), 1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-6)])
@pytest.mark.parametrize("reduced", [None, 120], ids=["full", "reduced"])
@pytest.mark.parametrize("name", TERMS)
def test_sparse_teacher_is_compared_on_its_tokens_and_one_bucket(
    name: str, reduced: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    terms = TERMS[name]
    problem = Problem(5, slots=60, rows=25, vocabulary=300, reduced=reduced)
    full = problem.logits(problem.teacher.double(), None).log_softmax(-1)
    log_probs, tokens = full.topk(9)
    teacher = Teacher(top_ids=tokens, top_values=log_probs, tail_mass=1 - log_probs.exp().sum(-1))
    inputs = [tensor.double().requires_grad_() for tensor in problem.inputs]
    draft = problem.draft_log_probs(inputs, None).exp()
    columns = list(range(300)) if problem.ids is None else problem.ids.tolist()
    p, q, outside = [], [], []
    for slot, row in enumerate(problem.row.tolist()):
        reachable = [(columns.index(t), full[row, t].exp()) for t in tokens[row].tolist() if t in columns]
        at = torch.tensor([column for column, _ in reachable], dtype=torch.int64)
        mass = torch.stack([probability for _, probability in reachable]) if reachable else torch.zeros(0).double()
        padding = 9 - len(reachable)
        others = torch.ones(len(columns)).double().index_fill_(0, at, 0)
        rest = (draft[slot] * others).sum()
        p.append(torch.cat([F.pad(draft[slot, at], (0, padding)), rest[None]]))
        q.append(torch.cat([F.pad(mass, (0, padding)), teacher.tail_mass[row, None]]))
        outside.append(1 - q[-1].sum())
    log_p = torch.stack(p).clamp(min=1e-300).log()
    loss = weighted_terms(
        {**terms, "ce": 0.0},
        problem.weights.double(),
        log_p,
        torch.stack(q),
        torch.stack(outside),
        torch.zeros(60, dtype=torch.int64),
        inputs[3],
    )
    labels = problem.draft_labels()
    ce = -draft.log().gather(1, labels.clamp(min=0)[:, None])[:, 0] * (labels >= 0)
    loss = loss + terms.get("ce", 0.0) * (problem.weights.double() * ce).sum()
    narrow = Teacher(top_ids=tokens, top_values=log_probs.to(dtype), tail_mass=teacher.tail_mass.to(dtype))
    assert_close(problem.fused(terms, dtype, narrow), (loss.detach(), gradients(loss, inputs)), tolerance)


def test_a_sparse_teacher_that_keeps_everything_is_the_dense_one() -> None:
    problem = Problem(6, slots=30, rows=12, vocabulary=50)
    full = problem.logits(problem.teacher.double(), None).log_softmax(-1)
    log_probs, tokens = full.topk(50)
    sparse = Teacher(top_ids=tokens, top_values=log_probs, tail_mass=torch.zeros(12).double())
    dense = Teacher(last_hidden_state=problem.teacher.double())
    assert_close(
        problem.fused(EVERYTHING, torch.float64, sparse), problem.fused(EVERYTHING, torch.float64, dense), 1e-10
    )


def test_peaked_and_hopeless_slots_stay_finite() -> None:
    """A draft that equals its teacher, one that is certain and right, and one whose teacher it cannot reach."""
    problem = Problem(7, slots=6, rows=6, vocabulary=40)
    problem.row = torch.arange(6)
    problem.teacher = problem.head_weight[:6] * 60
    problem.inputs[0] = torch.stack([problem.teacher[i] for i in (0, 1, 3, 2, 5, 4)])
    for tensor in problem.inputs[1:3]:
        tensor.zero_()
    full = problem.logits(problem.teacher.double(), None).log_softmax(-1)
    log_probs, tokens = full.topk(3)
    tail = (1 - log_probs.exp().sum(-1)).clamp(min=0)
    for teacher in (
        Teacher(last_hidden_state=problem.teacher),
        Teacher(top_ids=tokens, top_values=log_probs.float(), tail_mass=tail.float()),
    ):
        for terms in TERMS.values():
            loss, found = problem.fused(terms, torch.float32, teacher)
            assert torch.isfinite(loss)
            assert all(torch.isfinite(gradient).all() for gradient in found)


# Whole batches: heads with their parameters, packing, normalisation, metrics.


class TinyDrafter(nn.Module):
    """The heads of a drafter without its backbone."""

    def __init__(self, kind: str | None, *, vocabulary: int = 300, draft_token_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config: Any = SimpleNamespace(
            vocab_size=vocabulary,
            hidden_size=20,
            markov_rank=0 if kind is None else 8,
            markov_head_type=kind,
            confidence_head_with_markov=kind is not None,
            final_logit_softcapping=None,
        )
        self.lm_head = nn.Linear(20, vocabulary, bias=False).requires_grad_(False)
        self.sequential_head = build_head(self.config)
        self.confidence_head = ConfidenceHead(self.config)
        self.draft_token_ids = draft_token_ids
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def confidence_logits(self, states: Tensor, previous_ids: Tensor) -> Tensor:
        head = self.sequential_head
        return self.confidence_head(states, None if head is None else head.embed(previous_ids))


def random_batch(seed: int, *, blocks: int = 12, slots: int = 5, rows: int = 30, vocabulary: int = 300) -> MicroBatch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, slots + 1, (blocks, 1), generator=generator)
    loss_mask = torch.arange(slots) < lengths

    def integers(high: int) -> Tensor:
        return torch.randint(0, high, (blocks, slots), generator=generator)

    empty = torch.zeros(0)
    return MicroBatch(
        sample_ids=[],
        input_ids=empty,
        positions=empty,
        sequence_starts=empty,
        hidden_states=empty,
        block_sequence=empty,
        block_anchor=empty,
        block_starts=empty,
        previous_ids=integers(vocabulary),
        labels=integers(vocabulary) * loss_mask,
        loss_mask=loss_mask,
        teacher_index=integers(rows) * loss_mask,
        teacher=Teacher(last_hidden_state=torch.randn(rows, 20, generator=generator)),
    )


def plain_batch_loss(drafter: TinyDrafter, states: Tensor, batch: MicroBatch, config: LossConfig) -> Tensor:
    """All logits at once, in the drafter's dtype."""
    on = batch.loss_mask
    logits = drafter.lm_head(states)
    if drafter.sequential_head is not None:
        logits = logits + drafter.sequential_head.bias(drafter.sequential_head.bias_vectors(states, batch.previous_ids))
    q = drafter.lm_head(batch.teacher.last_hidden_state.to(states.dtype))[batch.teacher_index].softmax(-1)
    labels, outside = batch.labels, torch.zeros(on.shape, dtype=states.dtype)
    if drafter.draft_token_ids is not None:
        logits, q = logits[..., drafter.draft_token_ids], q[..., drafter.draft_token_ids]
        outside = 1 - q.sum(-1)
        hits = labels[..., None] == drafter.draft_token_ids
        labels = torch.where(hits.any(-1), hits.int().argmax(-1), -1)
    weights = (torch.exp(-torch.arange(on.shape[1]).double() / config.position_decay) * on)[on]
    confidence = drafter.confidence_logits(states, batch.previous_ids)
    total = weighted_terms(
        config.weights, weights, logits.log_softmax(-1)[on], q[on], outside[on], labels[on], confidence[on]
    )
    return total / (weights.sum() + 1e-6)


@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
@pytest.mark.parametrize("kind", [None, "vanilla", "gated", "rnn"])
def test_gradients_of_every_parameter_equal_the_plain_loss_in_float64(kind: str | None, reduced: bool) -> None:
    torch.manual_seed(11)
    ids = torch.randperm(300)[:130].sort().values if reduced else None
    narrow, wide = TinyDrafter(kind, draft_token_ids=ids), TinyDrafter(kind, draft_token_ids=ids)
    wide.load_state_dict(narrow.state_dict())
    wide.double()
    batch, config = random_batch(1), LossConfig()
    states = torch.randn(12, 5, 20, requires_grad=True)
    wide_states = states.detach().double().requires_grad_()
    ours = fused_loss(narrow, states, batch, config).loss
    reference = plain_batch_loss(wide, wide_states, batch, config)
    ours.backward()
    reference.backward()
    assert ours.item() == pytest.approx(reference.item(), rel=1e-6)
    compared = {"states": (states, wide_states)}
    trained = dict(wide.named_parameters())
    compared |= {name: (p, trained[name]) for name, p in narrow.named_parameters() if p.requires_grad}
    for name, (mine, theirs) in compared.items():
        assert mine.grad is not None, name
        assert theirs.grad is not None, name
        assert (mine.grad.double() - theirs.grad).norm() <= 1e-6 * theirs.grad.norm(), name


@given(order=st.permutations(range(12)), cut=st.integers(0, 12))
@settings(deadline=None, max_examples=25)
def test_any_split_with_the_global_normalizer_is_the_same_step(order: list[int], cut: int) -> None:
    torch.manual_seed(12)
    drafter, batch, config = TinyDrafter("gated").double(), random_batch(2), LossConfig()
    states = torch.randn(12, 5, 20).double()

    def step(parts: list[list[int]], normalizer: float | None) -> tuple[Tensor, list[Tensor], dict[str, float]]:
        total, sums = torch.zeros(()).double(), dict[str, float]()
        for part in parts:
            names = ("previous_ids", "labels", "loss_mask", "teacher_index")
            piece = replace(batch, **{name: getattr(batch, name)[part] for name in names})
            result = fused_loss(drafter, states[part], piece, config, normalizer=normalizer)
            total, sums = total + result.loss, add_sums(sums, result.sums)
        return total, gradients(total, [p for p in drafter.parameters() if p.requires_grad]), sums

    normalizer = float(slot_weights(batch.loss_mask, config.position_decay).double().sum())
    whole = step([list(range(12))], None)
    parts = step([order[:cut], order[cut:]], normalizer)
    assert_close(parts[:2], whole[:2], 1e-7)  # weights are float32, the normaliser's sum float64
    assert parts[2] == pytest.approx(whole[2], rel=1e-9)


def test_nothing_supervised_gives_zero_gradients_and_no_error() -> None:
    drafter, batch = TinyDrafter("rnn"), random_batch(3)
    batch.loss_mask.zero_()
    batch.teacher_index.zero_()
    states = torch.randn(12, 5, 20, requires_grad=True)
    result = fused_loss(drafter, states, batch, LossConfig(), normalizer=7.0)
    result.loss.backward()
    assert result.loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters() if p.requires_grad)


def test_without_gradients_the_loss_is_the_same() -> None:
    drafter, batch = TinyDrafter("vanilla"), random_batch(4)
    states = torch.randn(12, 5, 20)
    with torch.no_grad():
        quiet = fused_loss(drafter, states, batch, LossConfig())
    assert not quiet.loss.requires_grad
    assert quiet.loss.item() == fused_loss(drafter, states, batch, LossConfig()).loss.item()


def test_half_precision_inputs_train_in_float32_inside() -> None:
    drafter, batch = TinyDrafter("vanilla"), random_batch(5)
    states = torch.randn(12, 5, 20)
    expected = fused_loss(drafter, states, batch, LossConfig()).loss.item()
    drafter.to(torch.bfloat16)
    half_states = states.bfloat16().requires_grad_()
    result = fused_loss(drafter, half_states, batch, LossConfig())
    result.loss.backward()
    assert result.loss.dtype == torch.float32
    assert half_states.grad is not None
    assert half_states.grad.dtype == torch.bfloat16
    assert result.loss.item() == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("name", BLOCK_DRAFTERS)
def test_conformance_losses_metrics_and_gradient_norms(golden: Path, name: str) -> None:
    case = arrays(golden / name / "train_forward.npz")
    drafter = load_drafter(golden / name / "checkpoint")
    batch = packed(case, 7)
    config = LossConfig(chunk_slots=10)
    if drafter.confidence_head is None:
        config = LossConfig(ce=1.0, l1=0.0, confidence=0.0)
    result = fused_loss(drafter, drafter.block_states(batch), batch, config)
    assert result.loss.item() == pytest.approx(float(case["loss"]), rel=1e-5)
    metrics = metrics_of(result.sums)
    names = {"ce": "ce_loss", "l1": "l1_loss", "confidence": "confidence_loss"}
    for key, value in metrics.items():
        reference = names.get(key, key.replace("acceptance@", "accept_rate@"))
        if f"metric/{reference}" in case:
            assert value == pytest.approx(float(case[f"metric/{reference}"]), rel=1e-5, abs=1e-6), key
    assert {"tau_probabilistic", "acceptance@0", "acceptance@6", "ce"} <= metrics.keys()
    result.loss.backward()
    trained = dict(drafter.named_parameters())
    norms = {key.removeprefix("grad_norm/"): float(v) for key, v in case.items() if key.startswith("grad_norm/")}
    assert norms
    for parameter, norm in norms.items():
        assert float(trained[parameter].grad.norm()) == pytest.approx(norm, rel=1e-4, abs=1e-6), parameter


def test_the_normalizer_is_known_before_the_forward_pass(golden: Path) -> None:
    case = arrays(golden / "dspark_vanilla" / "train_forward.npz")
    batch = packed(case, 7)
    from_masks = sum(
        anchors_weight(
            case["loss_mask"][row].astype(bool), case["anchor_positions"][row][case["block_keep_mask"][row]], 7, 4.0
        )
        for row in range(len(case["input_ids"]))
    )
    assert float(slot_weights(batch.loss_mask, 4.0).double().sum()) == pytest.approx(from_masks, rel=1e-7)
    assert from_masks == pytest.approx(float((np.exp(-np.arange(7) / 4) * case["eval_mask"]).sum()), rel=1e-12)


def test_bad_settings_name_their_option() -> None:
    with pytest.raises(ValueError, match=r"loss\.l1 is -1.*train\.loss\.l1"):
        LossConfig(l1=-1)
    with pytest.raises(ValueError, match=r"loss\.position_decay is 0.*above 0"):
        LossConfig(position_decay=0)
    with pytest.raises(ValueError, match="would learn nothing"):
        LossConfig(ce=0, l1=0)
    drafter, batch = TinyDrafter(None), random_batch(6)
    drafter.confidence_logits = lambda *_: None  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ValueError, match=r"set `train\.loss\.confidence` to 0"):
        fused_loss(drafter, torch.randn(12, 5, 20), batch, LossConfig())
    with pytest.raises(ValueError, match=r"0\.\.9, the rows"):
        OutputHead.create(torch.zeros(10, 3), draft_token_ids=torch.tensor([3, 10]))


def test_a_term_that_reads_what_no_slot_has_is_refused_with_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_terms["kl"], "reads", ("js",))
    with pytest.raises(SettingError, match=r"'kl' reads js, which no slot has; a term is a function of ce"):
        LossConfig(kl=0.5)


def test_dpace_weights_are_the_derivative_of_the_expected_length() -> None:
    """Without smoothing: of sum_m q_1 ... q_m in log q_j, by finite differences; with it, the published example."""
    weighting = slot_weightings["d-pace"]()
    q, on = torch.tensor([[0.8, 0.6, 0.7]]).double(), torch.ones(1, 3, dtype=torch.bool)

    def expected_length(log_q: Tensor) -> float:
        return sum(float(log_q[:end].sum().exp()) for end in (1, 2, 3))

    weighting.smoothing = 0.0  # type: ignore[misc]
    weights = weighting.weights(q, q, on)[0][0]
    assert weights.tolist() == pytest.approx([1.616, 0.816, 0.336])
    for slot in range(3):
        step = torch.zeros(3).double().index_fill_(0, torch.tensor([slot]), 1e-6)
        slope = (expected_length(q[0].log() + step) - expected_length(q[0].log() - step)) / 2e-6
        assert weights[slot].item() == pytest.approx(slope, rel=1e-6)
    smoothed, reached = slot_weightings["acceptance"]().weights(torch.zeros(1, 3).double(), q, on)
    assert smoothed[0].tolist() == pytest.approx([2.232, 1.332, 0.612])
    assert reached[0].tolist() == pytest.approx([1, 0.8, 0.48])


def test_slot_weights_by_chance_by_hand() -> None:
    generator = torch.Generator().manual_seed(3)
    label, acceptance = (torch.rand(6, 4, generator=generator).double() for _ in range(2))
    lengths = [0, 1, 2, 3, 4, 4]
    on = torch.arange(4) < torch.tensor(lengths)[:, None]
    for name, chance in (("d-pace", label), ("acceptance", acceptance)):
        weights, reached = slot_weightings[name]().weights(label, acceptance, on)
        for block, length in enumerate(lengths):
            for slot in range(4):
                ends = [np.prod([0.5 * chance[block, i].item() + 0.5 for i in range(m + 1)]) for m in range(length)]
                assert weights[block, slot].item() == pytest.approx(sum(ends[slot:]) if slot < length else 0)
                before = np.prod(acceptance[block, :slot].tolist())
                assert reached[block, slot].item() == pytest.approx(before if slot < length else 0)


@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
@pytest.mark.parametrize("name", ["d-pace", "acceptance"])
def test_weights_by_chance_equal_the_plain_loss_in_float64(name: str, reduced: bool) -> None:
    """The weights are constants, made anew from the same distributions; a label outside has no probability."""
    torch.manual_seed(13)
    ids = torch.randperm(300)[:130].sort().values if reduced else None
    drafter, batch = TinyDrafter("vanilla", draft_token_ids=ids).double(), random_batch(7)
    config = LossConfig(ce=0.3, l1=0.5, soft_ce=0.2, confidence=0.7, slot_weighting=name, chunk_slots=9)
    states = torch.randn(12, 5, 20).double()
    on, head = batch.loss_mask, drafter.sequential_head
    logits = drafter.lm_head(states) + head.bias(head.bias_vectors(states, batch.previous_ids))
    q = drafter.lm_head(batch.teacher.last_hidden_state.double())[batch.teacher_index].softmax(-1)
    labels = batch.labels
    if ids is not None:
        logits, q = logits[..., ids], q[..., ids]
        labels = torch.where((hits := labels[..., None] == ids).any(-1), hits.int().argmax(-1), -1)
    log_p = logits.log_softmax(-1)
    with torch.no_grad():
        acceptance = torch.minimum(log_p.exp(), q).sum(-1)
        chance = log_p.exp().gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels >= 0)
        weights, reached = config.slot_weighting.weights(chance if name == "d-pace" else acceptance, acceptance, on)
    confidence = drafter.confidence_logits(states, batch.previous_ids)

    def part(terms: Weights, weight: Tensor) -> Tensor:
        outside = 1 - q.sum(-1)
        return weighted_terms(terms, weight[on], log_p[on], q[on], outside[on], labels[on], confidence[on])

    blocks = int(on.any(-1).sum())
    reference = (part({"ce": 0.3, "l1": 0.5, "soft_ce": 0.2}, weights) + part({"confidence": 0.7}, reached)) / blocks
    ours = fused_loss(drafter, states, batch, config)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    assert ours.loss.item() == pytest.approx(reference.item(), rel=1e-6)
    assert metrics_of(ours.sums)["loss"] == pytest.approx(ours.loss.item(), rel=1e-6)
    for mine, theirs in zip(gradients(ours.loss, trained), gradients(reference, trained), strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
    halves = torch.zeros(()).double()
    for chosen in (range(5), range(5, 12)):
        names = ("previous_ids", "labels", "loss_mask", "teacher_index")
        piece = replace(batch, **{field: getattr(batch, field)[list(chosen)] for field in names})
        halves = halves + fused_loss(drafter, states[list(chosen)], piece, config, normalizer=blocks).loss
    assert halves.item() == pytest.approx(reference.item(), rel=1e-6)


def test_a_block_by_chance_counts_once_in_the_normalizer() -> None:
    mask = np.array([0, 0, 1, 1, 1, 1, 0, 1], dtype=bool)
    anchors = np.array([1, 2, 4, 5, 6])  # the fourth has no label
    assert anchors_weight(mask, anchors, 3, None) == 4


def test_soft_cross_entropy_gives_way_to_the_other_terms() -> None:
    config = LossConfig(ce=0.2, l1=0.8, confidence=0.5, soft_ce_warmup_ratio=0.5)
    assert config.at(0.0).weights == {"soft_ce": 1.0, "confidence": 0.5}
    assert config.at(0.125).weights == pytest.approx({"soft_ce": 0.75, "ce": 0.05, "l1": 0.2, "confidence": 0.5})
    assert config.at(0.5) is config
    assert config.at(1.0) is config
    assert LossConfig().at(0.0).weights == LossConfig().weights
    torch.manual_seed(14)
    drafter, batch, states = TinyDrafter("vanilla").double(), random_batch(8), torch.randn(12, 5, 20).double()

    def loss(config: LossConfig) -> float:
        return fused_loss(drafter, states, batch, config).loss.item()

    soft = loss(LossConfig(ce=0, l1=0, soft_ce=1, confidence=0.5))
    assert loss(config.at(0.0)) == pytest.approx(soft, rel=1e-9)
    assert loss(config.at(0.25)) == pytest.approx((soft + loss(config)) / 2, rel=1e-9)


def test_a_slot_weighting_that_there_is_not_is_refused() -> None:
    with pytest.raises(SettingError, match=r"no slot weighting 'dpace'; did you mean d-pace\?.*slot_weighting"):
        LossConfig(slot_weighting="dpace")
