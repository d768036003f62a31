from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.codecs.base import Codec, StoredTeacher, TargetParts
from storage.codecs.components import leading_components
from storage.codecs.fitting import dump_codec, fit_codec, load_codec
from storage.codecs.measure import snr_db, teacher_error
from storage.codecs.registry import CodecSpec, codec_class, codec_names
from storage.codecs.symbols import NIBBLE, PAIR, WIDE, pack, unpack
from storage.codecs.transform import head_metric

LAYERS, HIDDEN = 3, 64
WIDTH = LAYERS * HIDDEN
LOSSY = ["int8", "fp8", "transform", "projected"]
STATES = sorted(name for name in codec_names() if not codec_class(name).teacher_only)


def sequences(count: int = 6, length: int = 80, seed: int = 0) -> list[tuple[torch.Tensor, bool]]:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(99)) / WIDTH**0.5
    found = []
    for _ in range(count):
        values = torch.randn(length, WIDTH, generator=generator) @ mixing * torch.linspace(0.3, 8, WIDTH) + 2
        values[0] = 1000 * torch.cos(torch.arange(WIDTH))
        found.append((values.to(torch.bfloat16), True))
    return found


def fitted(name: str, **settings_: object) -> Codec:
    generator = torch.Generator().manual_seed(5)
    tensors = {"projection": torch.randn(48, WIDTH, generator=generator) / 10} if name == "projected" else None
    return fit_codec(CodecSpec(name=name, settings=settings_), sequences(), width=WIDTH, layers=LAYERS, tensors=tensors)


@pytest.mark.parametrize("name", ["bf16", "bf16-planes"])
def test_exact_codecs_return_every_bit(name: str) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16).repeat(3)[: 1024 * WIDTH].view(-1, WIDTH)
    values = bits.view(torch.bfloat16)
    codec = fitted(name)
    again = codec.decode(codec.encode(values, first=True), len(values))
    assert torch.equal(again.view(torch.int16), bits)


FORMS = [(name, {}) for name in STATES] + [("transform", {"decorrelate": kind}) for kind in ("none", "layer")]


@pytest.mark.parametrize(("name", "options"), FORMS)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 79])
def test_round_trip_after_saving(name: str, options: dict[str, str], first: bool, rows: int) -> None:
    codec = fitted(name, **options)
    values = sequences(seed=3)[0][0][:rows] if first else sequences(seed=3)[0][0][1 : rows + 1]
    description, tensors = dump_codec(codec)
    loaded = load_codec(description, tensors)
    payload = codec.encode(values, first=first)
    assert payload == loaded.encode(values, first=first)
    decoded = loaded.decode(payload, len(values), dtype=torch.float32)
    assert decoded.shape == (len(values), codec.out_width)
    assert torch.equal(decoded, codec.decode(payload, len(values), dtype=torch.float32))
    exact = codec.components(values)
    if first:  # the first token's state is kept exact
        assert torch.allclose(decoded[0], exact[0], rtol=1e-2, atol=1e-2)
    if len(values) > 5:
        assert snr_db(exact[1:], decoded[1:]) > 15


@pytest.mark.parametrize("name", LOSSY)
def test_measured_error_stands_in_the_description(name: str) -> None:
    measured = fitted(name).measured
    assert measured["bytes_per_token"] > 0
    assert measured["snr_db"] > 15
    assert measured["bits_per_value"] < 10
    fresh = sequences(seed=8)
    codec = fitted(name)
    exact = torch.cat([codec.components(v)[1:] for v, _ in fresh])
    coded = torch.cat([codec.decode(codec.encode(v, first=True), len(v), dtype=torch.float32)[1:] for v, _ in fresh])
    assert snr_db(exact, coded) == pytest.approx(measured["snr_db"], abs=1.5)


@pytest.mark.parametrize("step", [0.125, 0.25, 0.5])
@pytest.mark.parametrize("decorrelate", ["none", "layer", "joint"])
def test_the_step_is_the_error(step: float, decorrelate: str) -> None:
    """A uniform step of s standard deviations leaves noise s²/12: SNR = -10 log10(s²/12)."""
    codec = fitted("transform", step=step, decorrelate=decorrelate, metric="variance")
    assert codec.measured["snr_db"] == pytest.approx(-10 * np.log10(step**2 / 12), abs=0.6)


@pytest.mark.parametrize("name", LOSSY)
def test_outliers_stay_finite_and_harm_no_other_row(name: str) -> None:
    codec = fitted(name)
    values = sequences(seed=4)[0][0].clone()
    plain = codec.decode(codec.encode(values, first=True), len(values), dtype=torch.float32)
    values[40, 7], values[40, 100] = 1e5, -1e5
    decoded = codec.decode(codec.encode(values, first=True), len(values), dtype=torch.float32)
    assert bool(torch.isfinite(decoded).all())
    others = torch.arange(len(values)) != 40
    assert torch.equal(decoded[others], plain[others])
    exact = codec.components(values)[40]
    assert (decoded[40] - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("name", LOSSY)
def test_the_shared_first_row_is_stored_once(name: str) -> None:
    codec = fitted(name)
    values = sequences(seed=4)[0][0].clone()
    shared = codec.encode(values, first=True)
    values[0] += 500  # another first token
    inline = codec.encode(values, first=True)
    assert len(inline) - len(shared) >= 2 * codec.out_width
    decoded = codec.decode(inline, len(values), dtype=torch.float32)
    assert torch.allclose(decoded[0], codec.components(values)[0], rtol=5e-3)


@pytest.mark.parametrize("output", ["states", "coordinates"])
def test_components_give_the_states_back(output: str) -> None:
    codec = fitted("transform", output=output)
    values = sequences(seed=4)[0][0]
    decoded = codec.decode(codec.encode(values, first=True), len(values), dtype=torch.float32)
    states = decoded if output == "states" else decoded @ codec.tensors["inverse"].t()
    assert snr_db(values.float()[1:], states[1:]) > 20


def test_a_projection_folds_without_bias() -> None:
    """A consumer F on components equals F P on states, up to the quantiser's error."""
    codec = fitted("projected", step=0.001)
    consumer = torch.randn(16, codec.out_width, generator=torch.Generator().manual_seed(1))
    values = sequences(seed=4)[0][0]
    decoded = codec.decode(codec.encode(values, first=True), len(values), dtype=torch.float32)
    folded = consumer @ codec.tensors["forward"]
    expected = values.float() @ folded.t()
    assert torch.allclose(decoded @ consumer.t(), expected, rtol=1e-3, atol=0.02 * float(expected.std()))


def test_the_head_metric_spends_bits_where_the_head_looks() -> None:
    generator = torch.Generator().manual_seed(2)
    head = torch.randn(500, HIDDEN, generator=generator) * torch.logspace(0, -2, HIDDEN)
    sample = [(torch.randn(200, HIDDEN, generator=generator), False) for _ in range(4)]
    states = torch.cat([values for values, _ in sample])
    metric = head_metric(head, states)
    given = fit_codec(
        CodecSpec(name="transform", settings={"metric": "given", "step": 0.1}),
        sample,
        width=HIDDEN,
        tensors={"metric": metric},
    )
    plain = fit_codec(CodecSpec(name="transform", settings={"step": 0.5}), sample, width=HIDDEN)

    def error(codec: Codec) -> float:
        coded = torch.cat([codec.decode(codec.encode(v), len(v), dtype=torch.float32) for v, _ in sample])
        return teacher_error(states, StoredTeacher(last_hidden_state=coded), TargetParts(head=head))["bound"]

    assert given.measured["bytes_per_token"] < plain.measured["bytes_per_token"]
    assert error(given) < error(plain)


@settings(max_examples=60)
@given(
    st.integers(0, 70),
    st.integers(1, 40),
    st.sampled_from([0.05, 0.4, 1, 4, 60, 3000]),
    st.integers(0, 10**6),
    st.sampled_from([(0, 1, 2), (0,), (1,), (2,)]),
)
def test_symbols_come_back(rows: int, count: int, scale: float, seed: int, kinds: tuple[int, ...]) -> None:
    generator = np.random.default_rng(seed)
    classes = generator.choice(np.array(kinds, np.uint8), count)
    codes = np.rint(generator.standard_t(2, (count, rows)) * scale).clip(-(2**30), 2**30).astype(np.int32)
    assert np.array_equal(unpack(pack(codes, classes), classes, rows), codes)


def test_packed_symbols_come_near_their_entropy() -> None:
    generator = np.random.default_rng(0)
    for deviation, kind in ((0.4, PAIR), (1.0, NIBBLE), (2.0, NIBBLE), (4.0, WIDE)):
        codes = np.rint(generator.normal(0, deviation, (64, 4000))).astype(np.int32)
        _, counts = np.unique(codes, return_counts=True)
        share = counts / counts.sum()
        entropy = -(share * np.log2(share)).sum()
        bits = 8 * len(pack(codes, np.full(64, kind, np.uint8))) / codes.size
        assert bits < 1.06 * entropy, (deviation, bits, entropy)


@pytest.mark.parametrize("name", STATES)
def test_a_payload_of_other_length_is_refused(name: str) -> None:
    codec = fitted(name)
    values = sequences(seed=4)[0][0]
    payload = codec.encode(values, first=True)
    with pytest.raises((ValueError, RuntimeError)):
        codec.decode(payload, len(values) + 1)


def test_unknown_names_and_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"no codec is named 'int9'; did you mean int8\? choose one of projected"):
        CodecSpec(name="int9")
    with pytest.raises(ValueError, match=r"no setting 'stepp'"):
        fitted("transform", stepp=1)
    with pytest.raises(ValueError, match="choose one of none, layer, joint"):
        fitted("transform", decorrelate="layers")
    with pytest.raises(ValueError, match="pilot"):
        fit_codec(CodecSpec(name="projected"), sequences(), width=WIDTH)


def test_components_keep_what_drafters_read() -> None:
    """Against the best of the linear reductions for one reader: those of a regression of F x on x of full rank."""
    sample = sequences(count=8, length=200)
    states = torch.cat([values[1:].float() for values, _ in sample])
    reader = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(6))
    projection, shares = leading_components([reader], sample, 30, prior=1e-6)
    assert shares[:20].sum() == pytest.approx(1.0, abs=1e-3)  # twenty outputs have twenty components
    components = states @ projection[:20].t()
    read = states @ reader.t()
    again = components @ torch.linalg.lstsq(components, read).solution
    assert (again - read).norm() < 1e-2 * read.norm()
    centred = states - states.mean(0)
    seen = centred.t() @ centred / len(centred)
    trust = len(states) / (len(states) + WIDTH)
    believed = trust * seen + (1 - trust) * torch.diag(seen.diagonal())
    covariance = projection @ believed @ projection.t()
    scale = covariance.diagonal().mean()
    assert torch.allclose(covariance, scale * torch.eye(30), atol=0.02 * float(scale))
    assert (states @ projection.t()).abs().sum(1).mean() == pytest.approx(float(states.abs().sum(1).mean()), rel=1e-3)


def test_what_few_rows_take_for_constant_is_not_amplified() -> None:
    """Fewer rows than channels: the sample spans no more than 99 components, other rows have as much in the others."""
    few, others = sequences(count=1, length=100, seed=1), sequences(count=8, length=200, seed=2)
    reader = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(6))
    projection, _ = leading_components([reader], few, WIDTH)
    spread = (torch.cat([values[1:].float() for values, _ in others]) @ projection.t()).std(0)
    assert spread.max() < 10 * spread.median()


def test_several_drafters_share_the_components() -> None:
    sample = sequences(count=8, length=200)
    states = torch.cat([values[1:].float() for values, _ in sample])
    one, other = torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(7))
    projection, _ = leading_components([one, other], sample, 24, prior=1e-6)
    components = states @ projection.t()
    for reader in (one, other):
        read = states @ reader.t()
        again = components @ torch.linalg.lstsq(components, read).solution
        assert (again - read).norm() < 1e-2 * read.norm()
    with pytest.raises(ValueError, match="the captured states have 192"):
        leading_components([one], sample, WIDTH + 1)


def test_a_projected_codec_gives_the_states_back_where_it_knows_them() -> None:
    sample = sequences(count=8, length=200)
    reader = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(6))
    projection, _ = leading_components([reader], sample, 60)
    codec = fit_codec(
        CodecSpec(name="projected", settings={"step": 0.05}),
        sample,
        width=WIDTH,
        layers=LAYERS,
        tensors={"projection": projection},
    )
    values = sample[2][0]
    components = codec.decode(codec.encode(values, first=True), len(values), dtype=torch.float32)
    assert codec.unprojection is not None
    read, again = values.float()[1:] @ reader.t(), components[1:] @ codec.unprojection.t() @ reader.t()
    assert (read - again).norm() < 0.1 * read.norm()


@pytest.mark.parametrize("name", STATES)
def test_32k_tokens_in_one_sequence(name: str) -> None:
    codec = fitted(name)
    base = sequences(count=1, length=1025, seed=11)[0][0]
    values = torch.cat([base[:1], base[1:].repeat(32, 1)[: 2**15 - 1]])
    decoded = codec.decode(codec.encode(values, first=True), len(values), dtype=torch.float32)
    assert decoded.shape == (2**15, codec.out_width)
    assert snr_db(codec.components(values)[1:], decoded[1:]) > 15
