import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.evaluation import Prices, SessionRow, clopper_pearson, pass_at_k, session_figures, summarize
from etude.records import RewardBreakdown, Status, Task, Trajectory
from tests.evaluation.rows import rows_of
from tests.store.builders import make_trajectory


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(1, 9))
def test_pass_at_k_is_the_share_of_choices_with_a_success(verdicts: list[bool], k: int) -> None:
    n = len(verdicts)
    if k > n:
        with pytest.raises(ValueError, match="k must be in"):
            pass_at_k(n, sum(verdicts), k)
        return
    choices = list(itertools.combinations(verdicts, k))
    assert pass_at_k(n, sum(verdicts), k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_sessions_come_to_figures() -> None:
    figures = session_figures(rows_of({"a": "++++", "b": "+---", "c": "----"}), Prices(1.0, 10.0))
    assert (figures["tasks"], figures["sessions"], figures["voided"]) == (3, 12, 0)
    assert figures["pass_rate"] == pytest.approx(5 / 12)
    low, high = figures["ci95"]
    assert low < 5 / 12 < high
    assert figures["pass_at"] == {"1": pytest.approx(5 / 12), "2": 0.5, "4": pytest.approx(2 / 3)}
    assert (figures["turns"], figures["parallel_share"]) == (4.0, 0.25)
    assert figures["seconds_per_solved"] == pytest.approx(12 * 3 / 5)
    assert figures["tokens_per_solved"] == pytest.approx(12 * 100 / 5)
    assert figures["cost_per_solved"] == pytest.approx(12 * 2e-3 / 5)


def test_voided_sessions_are_a_second_figure() -> None:
    figures = session_figures(rows_of({"a": "+?", "b": "-?", "c": "??"}))
    assert (figures["tasks"], figures["voided"]) == (3, 4)
    assert figures["pass_rate"] == 0.5
    assert figures["pass_rate_voided_failed"] == pytest.approx(1 / 6)
    assert figures["pass_at"] == {"1": 0.5, "2": None}
    assert session_figures(rows_of({"a": "-"}))["seconds_per_solved"] is None


def judged(
    passed: bool | None, level: int, bug: str, first_edit_right: bool = False, name: str = ""
) -> tuple[Task, Trajectory]:
    """A task with its trajectory; None: the infrastructure failed."""
    task = Task(name or f"t{level}{bug}", "", {}, metadata={"level": level, "bug_kind": bug})
    if passed is None:
        return task, make_trajectory(status=Status.INFRASTRUCTURE, reward=None, facts={})
    facts = {"passed": passed, "first_edit_right": first_edit_right}
    return task, make_trajectory(reward=RewardBreakdown(float(passed), {"malformed": -0.1}), facts=facts)


def test_figures_are_told_by_level_and_by_bug() -> None:
    pairs = [
        judged(True, 1, "operator", True),
        judged(False, 1, "swapped"),
        judged(True, 2, "operator"),
        judged(True, 2, "operator", True, "another"),
    ]
    summary = summarize([task for task, _ in pairs], [trajectory for _, trajectory in pairs])
    assert summary["pass_rate"] == 0.75
    assert summary["ci95"] == list(clopper_pearson(3, 4))
    assert summary["n"] == 4
    assert summary["first_edit_right"] == 0.5
    assert summary["by_level"] == {"1": 0.5, "2": 1.0}
    assert summary["by_bug"] == {"operator": 1.0, "swapped": 0.0}
    assert summary["infrastructure_failures"] == 0


def test_sessions_of_one_task_count_for_less_in_the_interval_than_tasks_of_their_own() -> None:
    def interval_of(num_tasks: int) -> list[float]:
        pairs = [judged(place < 24, 1, "operator", name=f"t{place * num_tasks // 48}") for place in range(48)]
        return summarize(*map(list, zip(*pairs, strict=True)))["ci95"]

    assert interval_of(48) == pytest.approx(list(clopper_pearson(24, 48)), abs=1e-6)
    low, high = interval_of(6)
    assert high - low > 2 * (interval_of(48)[1] - interval_of(48)[0])


@pytest.mark.parametrize("family", ["tally", None])
def test_a_run_and_an_evaluation_have_one_rule_for_the_interval(family: str | None) -> None:
    pairs: list[tuple[Task, Trajectory]] = []
    for place in range(24):
        task, trajectory = judged(place % 4 > 0, 1, "operator", name=f"t{place // 2}")
        metadata = {**task.metadata, **({"family": f"{family} {place // 6}"} if family else {})}
        pairs.append((replace(task, metadata=metadata), trajectory))
    rows = [SessionRow.of(task, trajectory) for task, trajectory in pairs]
    summary = summarize(*map(list, zip(*pairs, strict=True)))
    assert summary["ci95"] == session_figures(rows)["ci95"]


def test_what_the_infrastructure_failed_is_no_failure_of_the_agent() -> None:
    pairs = [judged(True, 1, "operator"), judged(None, 1, "operator"), judged(None, 3, "negation")]
    summary = summarize([task for task, _ in pairs], [trajectory for _, trajectory in pairs])
    assert (summary["pass_rate"], summary["n"], summary["infrastructure_failures"]) == (1.0, 1, 2)
    assert summary["pass_rate_voided_failed"] == 1 / 3
    assert sum(summary["voided_by_cause"].values()) == 2 / 3
    assert summary["by_level"] == {"1": 1.0}
    assert summary["by_bug"] == {"operator": 1.0}


def test_no_session_at_all_says_nothing() -> None:
    task, failed = judged(None, 1, "operator")
    summary = summarize([task], [failed])
    assert (summary["pass_rate"], summary["ci95"], summary["n"]) == (0.0, [0.0, 1.0], 0)


def test_each_task_needs_its_trajectory() -> None:
    task, trajectory = judged(True, 1, "operator")
    with pytest.raises(ValueError, match="zip"):
        summarize([task, task], [trajectory])
