"""Values marked SciPy are those of SciPy 1.17.1, values marked statsmodels those of statsmodels 0.15.0."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import ConfigError
from etude.evaluation import compare_rows, comparison
from etude.evaluation.comparison import bootstrap_interval, exact_difference, exact_p_value
from etude.evaluation.results import conclusion
from tests.evaluation.rows import numbered, row, rows_of
from tests.evaluation.test_intervals import CLUSTERS, DIFFERENCES


@pytest.mark.parametrize(
    ("better", "worse", "p"),
    [  # SciPy: binomtest(better, better + worse); statsmodels: mcnemar(exact=True)
        (20, 10, 0.09873714670538905),
        (10, 0, 0.001953125),
        (1, 5, 0.21875),
        (3, 3, 1.0),
        (0, 0, 1.0),
    ],
)
def test_without_clusters_the_p_value_is_that_of_mcnemar(better: int, worse: int, p: float) -> None:
    differences = [1.0] * better + [-1.0] * worse + [0.0] * 50
    assert exact_p_value(differences, [str(place) for place in range(len(differences))]) == pytest.approx(p)


def test_with_clusters_it_is_that_of_all_signs() -> None:
    # SciPy: permutation_test of paired samples over all 256 signs.
    sums = [1.0, -0.5, 0.75, 2.0, -0.25, 0.0, 1.5, 0.125]
    assert exact_p_value(sums, list("abcdefgh")) == pytest.approx(0.125)


def test_the_bootstrap_is_that_of_scipy() -> None:
    # SciPy: bootstrap(method="percentile", n_resamples=200_000), of tasks, and of clusters.
    alone = bootstrap_interval(DIFFERENCES, [str(place) for place in range(12)])
    assert alone == pytest.approx((-0.0417, 0.7083), abs=0.021)
    assert bootstrap_interval(DIFFERENCES, CLUSTERS) == pytest.approx((0.15, 0.5625), abs=0.01)
    assert bootstrap_interval([0.5, 0.25], ["one", "one"]) is None


@settings(max_examples=20)
@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0]), min_size=2, max_size=40))
def test_exact_bounds_hold_the_difference_and_mirror(differences: list[float]) -> None:
    clusters = [str(place) for place in range(len(differences))]
    low, high = exact_difference(differences, clusters)
    assert -1 <= low <= sum(differences) / len(differences) <= high <= 1
    mirrored = exact_difference([-value for value in differences], clusters)
    assert mirrored == pytest.approx((-high, -low), abs=1e-9)


def test_where_no_task_differs_the_bounds_still_have_a_width() -> None:
    same = rows_of(numbered("++--" * 5))
    compared = compare_rows(same, same)["pass_rate"]
    assert (compared["difference"], compared["ci95"], compared["p_value"]) == (0.0, [0.0, 0.0], 1.0)
    assert compared["exact95"] == [pytest.approx(-0.1967, abs=1e-3), pytest.approx(0.1967, abs=1e-3)]
    assert conclusion(compared).startswith("a tie")


def test_models_are_compared_task_by_task() -> None:
    first = rows_of(numbered(["--", "+-", "++", "--", "?-", "--"] * 4))
    second = rows_of(numbered(["++", "+-", "++", "+-", "++", "??"] * 4))
    compared = compare_rows(first, second)
    rate = compared["pass_rate"]
    assert (rate["tasks"], rate["better"], rate["worse"]) == (20, 12, 0)
    assert (rate["first"], rate["second"]) == (pytest.approx(0.3), pytest.approx(0.8))
    assert rate["difference"] == pytest.approx(0.5)
    assert rate["ci95"][0] < 0.5 < rate["ci95"][1]
    assert rate["p_value"] < 0.001
    assert conclusion(rate).startswith("a difference is shown")
    failed = compared["pass_rate_voided_failed"]
    assert (failed["first"], failed["second"]) == (pytest.approx(0.25), pytest.approx(4 / 6))
    at_two = compared["pass_at"]["2"]
    assert (at_two["first"], at_two["second"]) == (pytest.approx(0.5), pytest.approx(1.0))
    assert compared["turns"]["difference"] == 0.0


def test_families_count_as_one_each() -> None:
    families = {task: str(place // 4) for place, task in enumerate(numbered("-" * 24))}
    first, second = rows_of(numbered("-" * 24), families), rows_of(numbered("++++----" * 3), families)
    clustered = compare_rows(first, second)["pass_rate"]
    apart = compare_rows(rows_of(numbered("-" * 24)), rows_of(numbered("++++----" * 3)))["pass_rate"]
    assert (clustered["clusters"], clustered["p_value"]) == (6, 0.25)
    assert apart["p_value"] == pytest.approx(2 / 2**12)
    assert clustered["ci95"][0] < apart["ci95"][0]
    assert conclusion({**clustered, "clusters": 5}).startswith("undecided")
    assert clustered["standard_error"] > apart["standard_error"]


@pytest.mark.parametrize("num_better", range(12))
@pytest.mark.parametrize("num_worse", [0, 1, 3])
def test_the_conclusion_says_what_the_interval_beside_it_says(num_better: int, num_worse: int) -> None:
    second = rows_of(numbered("+" * num_better + "-" * num_worse + "+" * 2 + "-" * 6))
    first = rows_of(numbered("-" * num_better + "+" * num_worse + "+" * 2 + "-" * 6))
    rate = compare_rows(first, second)["pass_rate"]
    low, high = rate["ci95"]
    verdict, holds_0 = conclusion(rate), low <= 0 <= high
    assert not verdict.startswith("a tie") or holds_0
    assert not verdict.startswith("a difference") or (not holds_0 and rate["p_value"] < 0.05)


def test_many_tasks_are_compared_by_the_normal_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "MAX_EXACT_CLUSTERS", 29)
    first, second = rows_of(numbered("-" * 30)), rows_of(numbered("+" * 6 + "-" * 24))
    compared = compare_rows(first, second)["pass_rate"]
    assert compared["exact95"] is None
    assert compared["p_value"] == pytest.approx(0.00709010122381553)  # SciPy: norm.sf


def test_models_with_no_task_in_common_are_refused() -> None:
    with pytest.raises(ConfigError, match="no graded task in common"):
        compare_rows([row("one", True)], [row("other", True), row("one", None)])
