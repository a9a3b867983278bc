import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rollout.collector_metrics import LengthBias


def test_a_bias_against_long_sessions_shows_in_the_last_tenths() -> None:
    bias = LengthBias()
    for length in range(100):
        bias.add(length)
    for length in range(95, 100):
        bias.leave_out(length, ended=True)
    assert bias.share == pytest.approx(0.05)
    assert bias.by_decile() == [0.0] * 9 + [0.5]


def test_sessions_that_were_cut_short_count_with_what_they_had() -> None:
    bias = LengthBias()
    for length in range(9):
        bias.add(length)
    bias.leave_out(9, ended=False)
    assert bias.share == pytest.approx(0.1)
    assert bias.by_decile()[-1] == 1.0


def test_nothing_left_out_is_no_division_by_zero() -> None:
    assert LengthBias().share == 0.0
    assert LengthBias().by_decile() == [0.0] * 10


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=60))
def test_shares_are_shares_and_where_all_is_left_out_they_say_so(sessions: list[tuple[int, bool]]) -> None:
    bias = LengthBias()
    for length, left_out in sessions:
        bias.add(length)
        if left_out:
            bias.leave_out(length, ended=True)
    assert all(0.0 <= share <= 1.0 for share in bias.by_decile())
    assert (bias.share > 0) == any(share > 0 for share in bias.by_decile())
    if all(left_out for _, left_out in sessions):
        assert set(bias.by_decile()) <= {0.0, 1.0}
