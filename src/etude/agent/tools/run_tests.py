"""The tool `run_tests`."""

from __future__ import annotations

from etude.agent.tools.interface import Arguments, ToolContext, failure, shorten, shown
from etude.records import ToolErrorClass, ToolResult
from etude.sandbox.types import TestReport
from etude.tokens.grammar import ToolSchema


class RunTests:
    """Runs the task's visible tests.

    Takes no arguments. Returns one line `FAIL test_x: 12 != 14` for each of the first `test_failures`
    failures, then `2 failed, 3 passed` or `5 passed`. Files that do not import give `error: ...`: what the
    agent wrote, not a failure of the tool.
    Limits: `test_timeout_s`. Errors: the tests hang, the task has no visible tests.
    """

    only_reads = False
    schema = ToolSchema("run_tests", "Run the tests.")

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        if not context.test_paths:
            return failure("no tests", ToolErrorClass.UNEXPECTED_ENVIRONMENT)
        limits = context.limits
        report = await context.sandbox.run_tests(context.test_paths, limits.test_timeout_s)
        facts = {
            "kind": "test",
            "num_passed": len(report.passed),
            "num_failed": len(report.failed),
            "green": report.error is None and not report.failed and not report.timed_out,
        }
        if report.timed_out:
            return ToolResult("error: tests timed out", ToolErrorClass.TIMEOUT, facts=facts)
        return ToolResult(
            shown(format_report(report, limits.test_failures, limits.line_characters)), facts=facts
        )


def format_report(report: TestReport, num_failures: int, line_characters: int) -> str:
    """The report in a few lines."""
    if report.error is not None:
        return shorten(f"error: {report.error}", line_characters)
    lines = [
        shorten(f"FAIL {failed.name}: {failed.message}", line_characters)
        for failed in report.failed[:num_failures]
    ]
    summary = f"{len(report.passed)} passed"
    if report.failed:
        summary = f"{len(report.failed)} failed, {summary}"
    return "\n".join([*lines, summary])
