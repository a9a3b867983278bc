"""What answers about test and probe runs mean.

The server's fields are checked as everywhere. The bytes beside them come from the process in which the
agent's code ran, and may be anything: what is no report is the agent's doing, a run that ended early.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from etude.sandbox.answers import duration_s, exit_code, flag
from etude.sandbox.inside.frames import Header
from etude.sandbox.types import ProbeReport, ProbeResult, TestFailure, TestReport


def tests_report(answer: Header, data: bytes, sandbox: str) -> TestReport:
    """The report of a test run. Raises SandboxError for an answer that makes no sense."""
    taken_s, timed_out = duration_s(answer, "duration_s", sandbox), flag(answer, "timed_out", sandbox)
    run, error = _run(answer, data, sandbox, "failed", _is_failure)
    if run is None:
        return TestReport((), (), error, timed_out, taken_s)
    return TestReport(
        tuple(run["passed"]), tuple(TestFailure(*row) for row in run["failed"]), error, False, taken_s
    )


def probes_report(answer: Header, data: bytes, sandbox: str) -> ProbeReport:
    """The report of a probe run. Raises SandboxError for an answer that makes no sense."""
    taken_s, timed_out = duration_s(answer, "duration_s", sandbox), flag(answer, "timed_out", sandbox)
    run, error = _run(answer, data, sandbox, "results", _is_probe)
    if run is None:
        return ProbeReport((), error, timed_out, taken_s)
    results = (
        ProbeResult(path, name, tuple(values), failure) for path, name, values, failure in run["results"]
    )
    return ProbeReport(tuple(results), error, False, taken_s)


def _run(
    answer: Header, data: bytes, sandbox: str, key: str, is_row: Callable[[object], bool]
) -> tuple[dict[str, Any] | None, str | None]:
    """(what the runner said, if it said it all; error)."""
    if answer["timed_out"]:
        return None, "timeout"
    run = _parsed(data, key, is_row)
    if run is not None:
        return run, run.get("error")
    code = exit_code(answer, sandbox)
    used_up = flag(answer, "memory_exceeded", sandbox)
    reason = "memory limit exceeded" if used_up else f"exit code {code}"
    return None, f"the test run ended early: {reason}"


def _parsed(data: bytes, key: str, is_row: Callable[[object], bool]) -> dict[str, Any] | None:
    """What a test process sent; None if it is not whole. The agent's code ran there: nothing is trusted."""
    try:
        run: object = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(run, dict) or not isinstance(run.get("error"), str | None):
        return None
    passed, found = run.setdefault("passed", []), run.get(key)
    if not isinstance(passed, list) or not all(isinstance(name, str) for name in passed):
        return None
    return run if isinstance(found, list) and all(map(is_row, found)) else None


def _is_failure(row: object) -> bool:
    return isinstance(row, list) and len(row) == 2 and all(isinstance(item, str) for item in row)


def _is_probe(row: object) -> bool:
    if not isinstance(row, list) or len(row) != 4:
        return False
    path, name, values, failure = row
    return (
        isinstance(path, str)
        and isinstance(name, str)
        and isinstance(values, list)
        and isinstance(failure, str | None)
    )
