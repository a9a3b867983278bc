import pytest

from etude.observe import summarize_behaviour
from etude.records import Status
from tests.store.builders import make_trajectory


def test_means_are_per_episode_and_the_read_share_is_per_edit() -> None:
    careful = {"num_turns": 4, "num_calls": 6, "parallel_turns": 2, "num_edits": 3, "edits_after_read": 3}
    hasty = {"num_turns": 2, "num_calls": 2, "num_edits": 1, "edits_after_read": 0, "malformed": 1}
    first = make_trajectory(
        0, facts={**careful, "finished": True, "num_test_runs": 2, "first_edit_right": True}
    )
    second = make_trajectory(1, facts={**hasty, "finished": False})
    summary = summarize_behaviour([first, second])
    assert summary == {
        "turns": 3.0,
        "calls": 4.0,
        "parallel_turns": 1.0,
        "edits": 2.0,
        "test_runs": 1.0,
        "malformed": 0.5,
        "finish_share": 0.5,
        "first_edit_right": 0.5,
        "questions": 0.0,
        "open_todos": 0.0,
        "sampled_tokens": pytest.approx((first.num_sampled_tokens + second.num_sampled_tokens) / 2),
        "reads_before_edits": 0.75,
        "calls_per_turn": 8 / 6,
        "edits_per_turn": 4 / 6,
        "parallel_share": 2 / 6,
        "terminal_share": 0.0,
    }


def test_infrastructure_failures_say_nothing_about_the_agent() -> None:
    good = make_trajectory(0, facts={"num_turns": 4})
    failed = make_trajectory(1, facts={"num_turns": 0}, status=Status.INFRASTRUCTURE)
    assert summarize_behaviour([good, failed])["turns"] == 4.0
    assert summarize_behaviour([failed]) == {}


def test_without_edits_there_is_no_share_of_edits() -> None:
    assert "reads_before_edits" not in summarize_behaviour([make_trajectory(facts={"num_edits": 0})])
