from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.identity import MISSING, IdentityMismatch, differences, identity_of, require_same

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False, allow_infinity=False)
)
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


@given(st.dictionaries(st.text(max_size=4), TREES, max_size=4))
def test_equal_fields_have_equal_identities(fields: dict[str, object]) -> None:
    backwards = dict(reversed(list(fields.items())))
    assert identity_of(fields) == identity_of(backwards)
    assert differences(fields, backwards) == []
    assert len(identity_of(fields)) == 32


def test_tuples_and_lists_are_the_same_thing() -> None:
    assert identity_of({"layers": (1, 2)}) == identity_of({"layers": [1, 2]})


def test_differences_name_the_path() -> None:
    ours = {"contract": {"layers": [1, 2], "name": "a"}, "seed": 1}
    theirs = {"contract": {"layers": [1, 3], "name": "a"}, "dtype": "bf16", "seed": 1}
    assert differences(ours, theirs) == [("contract.layers", [1, 2], [1, 3]), ("dtype", MISSING, "bf16")]
    assert differences({"x": 1}, {"x": True}) == [("x", 1, True)]


def test_a_mismatch_says_what_and_how_to_cure_it() -> None:
    with pytest.raises(IdentityMismatch, match=r"seed: asked for 2, stored 1\n.*another folder") as caught:
        require_same({"seed": 2}, {"seed": 1}, what="the cache", cure="Choose another folder.")
    assert caught.value.differences == [("seed", 2, 1)]


def test_nan_has_no_identity() -> None:
    with pytest.raises(ValueError, match=r"[Oo]ut of range float"):
        identity_of({"x": float("nan")})
