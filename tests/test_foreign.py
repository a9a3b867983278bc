"""Tests against external software (`foreign`) may be skipped here, but not in `.ci/run`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

_TESTS = """
import pytest

@pytest.mark.foreign
@pytest.mark.skipif(True, reason="podman is not installed")
def test_before():
    pass

@pytest.mark.foreign
def test_within():
    pytest.skip("the server does not answer")

@pytest.mark.foreign
@pytest.mark.xfail
def test_known():
    assert False

def test_own():
    pytest.skip("for another reason")
"""


def test_a_foreign_test_that_is_skipped_has_failed_where_it_must_run(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    pytester.makepyfile(_TESTS)
    options = ("-p", "no:cacheprovider", "-W", "ignore")
    pytester.runpytest_inprocess(*options).assert_outcomes(skipped=3, xfailed=1)
    strict = pytester.runpytest_inprocess(*options, "--foreign-must-run")
    strict.assert_outcomes(errors=1, failed=1, skipped=1, xfailed=1)
    strict.stdout.fnmatch_lines(
        ["*was skipped: *podman is not installed*", "*was skipped: *does not answer*"]
    )
