"""Settings and hooks for all tests."""

import os
import re
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported: two spinning compute threads on two busy cores are far slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before any test imports Ray: it listens on loopback only, and its workers have the same priority on busy
# cores as the tests.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_worker_niceness", "0")

# No deadline per example, since the machine may be busy. Few examples of each property in `make test`, more
# in `.ci/run`, by --hypothesis-profile=thorough.
for profile, num_examples in (("quick", 20), ("thorough", 40)):
    settings.register_profile(
        profile,
        max_examples=num_examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("quick")

TESTS = re.compile(r"^(?:async )?def test_|^class Test|^Test\w+ = ", re.MULTILINE)
SLOW = re.compile(r"^@pytest\.mark\.slow$", re.MULTILINE)
ALL_SLOW = re.compile(r"^pytestmark = .*pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without slow tests, skips importing files that have only slow ones: imports take seconds."""
    if "not slow" not in config.option.markexpr or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    if ALL_SLOW.search(text) or len(SLOW.findall(text)) >= len(TESTS.findall(text)) > 0:
        return True
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--foreign-must-run", action="store_true", help="a test marked `foreign` that is skipped has failed"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With --foreign-must-run, reports a skipped foreign test as failed."""
    report = yield
    must_run = item.config.getoption("--foreign-must-run") and item.get_closest_marker("foreign") is not None
    if must_run and report.skipped and not hasattr(report, "wasxfail"):
        assert isinstance(report.longrepr, tuple), "longrepr of a skip: file, line, reason"
        report.outcome = "failed"
        report.longrepr = f"it must run here, and was skipped: {report.longrepr[2]}"
    return report
