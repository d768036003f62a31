from typing import Any

import pytest

from pipelines.evaluation import quality


@pytest.mark.parametrize(
    ("tokens", "loop"),
    [
        ([], False),
        (list(range(50)), False),
        ([1, 2, 3] + [7, 8, 9] * 4, True),
        ([1, 2, 3] + [7, 8, 9] * 3, False),
        ([5] * 20, True),
        ([1, 2, 3, 4, 5, 6, 7, 5, 5, 5, 5], False),
    ],
)
def test_loops_at_the_end(tokens: list[int], loop: bool) -> None:
    assert quality.ends_in_loop(tokens) is loop


def test_repetition_is_the_share_of_grams_seen_before() -> None:
    assert quality.repetition([1, 2, 3]) == 0
    assert quality.repetition(list(range(20))) == 0
    assert quality.repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)


def _row(request: str, tokens: list[int], gap: float = 1.0, reason: str = "stop") -> dict[str, Any]:
    return {
        "request_id": request,
        "prompt_id": request,
        "turn": 0,
        "seed": 0,
        "output_ids": tokens,
        "finish_reason": reason,
        "logit_gaps": [gap] * len(tokens),
    }


def test_degenerate_outputs_are_counted() -> None:
    rows = [_row("empty", []), _row("loop", [3] * 20), _row("same", [1, 2]), _row("same too", [1, 2], reason="length")]
    found = quality.degenerate_outputs(rows)
    assert (found["empty"], found["looping"], found["identical"]) == (["empty"], ["loop"], 2)
    assert found["cut_by_length"] == 1


def test_a_tie_is_judged_where_the_texts_part() -> None:
    ours = [_row("same", [1, 2, 3]), _row("tie", [1, 9, 3], gap=1e-4), _row("wrong", [1, 9]), _row("alone", [1])]
    plain = [_row("same", [1, 2, 3]), _row("tie", [1, 2, 3], gap=1e-4), _row("wrong", [1, 2])]
    found = quality.equality_with_plain(ours, plain, gap_tolerance=1e-3)
    assert (found["compared"], found["equal"], found["ties"]) == (3, 1, 1)
    assert [entry["first_difference"] for entry in found["differing"]] == [1, 1]


def test_a_text_that_ends_early_differs() -> None:
    found = quality.equality_with_plain([_row("a", [1, 2])], [_row("a", [1, 2, 3])], gap_tolerance=1e-3)
    assert found["differing"][0]["first_difference"] == 2
    assert not found["differing"][0]["tie"]
