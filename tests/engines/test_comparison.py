"""The comparison itself, on lines copied from llama-server's log and on rounds written by hand."""

from llamacpp.comparison import Round, compare_rounds, first_difference, place, without_stop


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_output_ends_before_the_stop_token() -> None:
    assert without_stop([5, 6, 2, 9], frozenset({2})) == [5, 6]
    assert without_stop([5, 6], frozenset({2})) == [5, 6]


def test_rounds_are_placed_by_what_they_commit() -> None:
    placed = place([((7, 8, 9), 2), ((4, 4, 4), 0), ((1, 2, 3), 3)])
    assert [r.position for r in placed] == [1, 4, 5]


def test_equal_rounds_agree_and_a_cut_by_the_token_limit_is_no_difference() -> None:
    ours = [Round(position=1, draft_ids=(7, 8, 9), accepted=2), Round(position=4, draft_ids=(4, 5, 6), accepted=3)]
    engine = [Round(position=1, draft_ids=(7, 8, 9), accepted=2), Round(position=4, draft_ids=(4,), accepted=1)]
    found = compare_rounds(ours, engine, max_new_tokens=6)
    assert (found.paired, found.same_accepted, found.same_drafts) == (2, 2, 2)
    assert found.ours_per_round == found.engine_per_round == 1.5


def test_a_round_without_room_is_left_out_and_a_difference_is_counted() -> None:
    ours = [Round(position=1, draft_ids=(7, 8), accepted=1), Round(position=3, draft_ids=(1, 2), accepted=2)]
    engine = [Round(position=1, draft_ids=(7, 5), accepted=0), Round(position=2, draft_ids=(8, 8), accepted=0)]
    found = compare_rounds(ours, engine, max_new_tokens=4)
    assert (found.ours, found.engine, found.paired, found.same_accepted) == (1, 2, 1, 0)
    assert (found.tokens_compared, found.tokens_equal) == (2, 1)
