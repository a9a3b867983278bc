"""Values marked SciPy are those of SciPy 1.17.1, values marked statsmodels those of statsmodels 0.15.0."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.evaluation import clopper_pearson, clustered_interval
from etude.evaluation.intervals import beta_quantile, incomplete_beta, standard_error, student_quantile

DIFFERENCES = [1, 0, 0, -1, 1, 1, 0, 0.5, -0.5, 0, 1, 1.0]
CLUSTERS = list("000112223334")


def test_without_trials_anything_is_possible() -> None:
    assert clopper_pearson(0, 0) == clustered_interval([], []) == (0.0, 1.0)


@given(st.integers(1, 5_000), st.floats(0, 1))
def test_the_interval_holds_the_share_and_mirrors(n: int, share: float) -> None:
    passed = round(share * n)
    low, high = clopper_pearson(passed, n)
    assert 0.0 <= low <= passed / n <= high <= 1.0
    mirrored = clopper_pearson(n - passed, n)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-9)
    wider = clopper_pearson(passed, n, 0.99)
    assert wider[0] <= low
    assert high <= wider[1]


@given(st.integers(1, 200), st.integers(2, 20))
def test_more_trials_make_it_narrower(n: int, times: int) -> None:
    few, many = clopper_pearson(n // 2, n), clopper_pearson(n // 2 * times, n * times)
    assert many[1] - many[0] < few[1] - few[0]


@pytest.mark.parametrize(
    ("passed", "n", "low", "high"),
    [  # SciPy: binomtest(passed, n).proportion_ci(method="exact")
        (0, 10, 0.0, 0.30849710781876294),
        (10, 10, 0.6915028921812371, 1.0),
        (7, 24, 0.12615208852368912, 0.5109478138578329),
        (193, 240, 0.748233962773372, 0.8524164506532469),
        (1, 1000, 2.5317487491674634e-05, 0.0055589242798499),
    ],
)
def test_the_exact_interval_of_a_share_is_that_of_scipy(passed: int, n: int, low: float, high: float) -> None:
    assert clopper_pearson(passed, n) == pytest.approx((low, high), rel=1e-9, abs=1e-15)
    alone = [1.0] * passed + [0.0] * (n - passed)
    assert clustered_interval(alone, [str(place) for place in range(n)]) == pytest.approx(
        (low, high), rel=1e-6
    )


def test_quantiles_are_those_of_scipy() -> None:
    # SciPy: beta.ppf(p, a, b)
    assert beta_quantile(0.025, 3.7, 12.4) == pytest.approx(0.06635432236726894, rel=1e-9)
    assert beta_quantile(0.975, 3.7, 12.4) == pytest.approx(0.45627475839152476, rel=1e-9)
    assert beta_quantile(0.975, 0.3, 0.4) == pytest.approx(0.9994092983379227, rel=1e-9)
    assert beta_quantile(0.025, 400.5, 2) == pytest.approx(0.9862016783023616, rel=1e-9)
    # SciPy: t.ppf(p, degrees)
    assert student_quantile(0.975, 1) == pytest.approx(12.706204736174694, rel=1e-8)
    assert student_quantile(0.975, 5) == pytest.approx(2.5705818356363146, rel=1e-9)
    assert student_quantile(0.9875, 23) == pytest.approx(2.3978750646571103, rel=1e-9)


@given(st.floats(0.01, 0.99), st.floats(0.1, 50), st.floats(0.1, 50))
def test_the_incomplete_beta_function_is_symmetric(x: float, a: float, b: float) -> None:
    assert incomplete_beta(x, a, b) + incomplete_beta(1 - x, b, a) == pytest.approx(1.0, abs=1e-9)


def test_the_clustered_error_is_that_of_statsmodels() -> None:
    # statsmodels: OLS(DIFFERENCES, ones).fit(cov_type="cluster", cov_kwds={"groups": CLUSTERS}).bse
    assert standard_error(DIFFERENCES, CLUSTERS) == pytest.approx(0.10980130764473546, rel=1e-12)


def test_tasks_that_succeed_together_count_for_less() -> None:
    together = [1.0] * 20 + [0.0] * 20
    alone = clustered_interval(together, [str(place) for place in range(40)])
    families = clustered_interval(together, [str(place // 4) for place in range(40)])
    assert families[0] < alone[0] < 0.5 < alone[1] < families[1]
    assert clustered_interval(together, ["one"] * 40) == (0.0, 1.0)
    assert math.isinf(standard_error(together, ["one"] * 40))


def test_only_successes_say_as_much_as_there_are_clusters() -> None:
    interval = clustered_interval([1.0] * 40, [str(place // 4) for place in range(40)])
    assert interval == clopper_pearson(10, 10)
