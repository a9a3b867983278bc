"""The tool `run_tests`: the task's visible tests, or with paths the repository's own runner."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from etude.agent.tools.interface import WRITES_ALL, Access, Arguments, ToolContext, failure, shorten, shown
from etude.agent.tools.junit import JunitReport, parse_junit
from etude.agent.tools.output_files import OUTPUT_BYTES, OUTPUTS, bounded, keep_output, readable
from etude.agent.tools.values import TEXTS, words_of
from etude.errors import ToolArgumentError
from etude.records import ToolErrorClass, ToolResult
from etude.sandbox.errors import PathMissingError, Unsupported
from etude.sandbox.paths import normal_path
from etude.sandbox.types import CommandResult, TestFailure, TestReport
from etude.tokens.grammar import Parameter, ToolSchema

_NUM_PATHS = 100
_REPORT = f"{OUTPUTS}/tests.xml"
_NO_PYTEST = 96
"""Exit code of our own line if there is no pytest; pytest itself uses 0 to 5."""
_COMMAND = (
    "mkdir -p {directory} && rm -f {report}\n"
    'for py in python python3; do "$py" -c "import pytest" 2>/dev/null && exec "$py" -m pytest -q --no-header'
    " --tb=short -p no:cacheprovider -o junit_family=xunit1 --junitxml={report} {paths}; done; exit {absent}"
)
_MISSING, _NOTHING = 4, 5
_NEEDS_PYTEST = "No module named 'pytest'"
"""Error of the built-in runner for tests that import pytest: its interpreter has no packages."""


class RunTests:
    """Runs the task's visible tests.

    Takes no arguments. Returns one line `FAIL test_x: 12 != 14` for each of the first `test_failures`
    failures, then `2 failed, 3 passed` or `5 passed`. Files that do not import give `error: ...`: what the
    agent wrote, not a failure of the tool. Where the sandbox holds the project's own environment, or the
    task's image and no visible tests are named, its pytest runs all tests that the configuration names.
    Limits: `test_timeout_s`.
    Errors: timeout where the tests hang; unexpected_environment where the task has no visible tests.
    """

    repeatable = False
    schema = ToolSchema("run_tests", "Run the tests.")

    def access(self, arguments: Arguments) -> Access:
        return WRITES_ALL

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        if context.has_environment:
            return await _run_pytest([], context)
        if not context.test_paths:
            return failure("no tests", ToolErrorClass.UNEXPECTED_ENVIRONMENT)
        return await run_built_in(context.test_paths, context)


class RunChosenTests(RunTests):
    """Runs the task's visible tests, or with `paths` those that it names, by the repository's own runner.

    Arguments: `paths`: files, directories or `file::test`, between blanks or as a JSON list; `.` is all.
    Without it everything is as with the short `run_tests`, unless the visible tests import pytest.
    Returns the first `test_failures` failures as `FAIL tests/test_a.py::test_x: assert 12 == 14`, then
    `2 failed, 3 passed, 1 skipped` and where the whole output is. Runs pytest with the repository's
    configuration; where the sandbox has no pytest the built-in runner, which knows test functions only.
    Limits: 100 paths; `command_timeout_s` for pytest, `test_timeout_s` for the built-in runner.
    Errors: timeout where the tests hang; invalid_arguments for paths that leave the workspace;
    unexpected_environment for paths that do not exist or hold no tests.
    """

    schema = ToolSchema(
        "run_tests",
        "Run the tests.",
        (
            Parameter(
                "paths",
                "files, directories or file::test; default the visible tests",
                required=False,
                kind="array",
                schema=TEXTS,
            ),
        ),
    )

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        paths = words_of(arguments, "paths", _NUM_PATHS)
        if not paths:
            result = await super().run(arguments, context)
            if _NEEDS_PYTEST not in result.output:
                return result
            paths = list(context.test_paths)
        return await _run_pytest([_checked(path, context.workspace) for path in paths], context)


async def _run_pytest(paths: Sequence[str], context: ToolContext) -> ToolResult:
    """Runs the tests at `paths` (none: those that the repository's configuration names) with its own pytest;
    with the built-in runner if there is none."""
    timeout_s = context.limits.command_timeout_s
    line = _COMMAND.format(directory=OUTPUTS, report=_REPORT, paths=shlex.join(paths), absent=_NO_PYTEST)
    try:
        result = await context.sandbox.commands.run(line, timeout_s, limit_bytes=OUTPUT_BYTES)
    except Unsupported:
        return await _run_without_pytest(paths or context.test_paths, context)
    finally:
        context.changed_somewhere()
    if result.exit_code == _NO_PYTEST:
        return await _run_without_pytest(paths or context.test_paths, context)
    return await _result_of(result, context)


async def run_built_in(
    paths: Sequence[str], context: ToolContext, names: frozenset[str] = frozenset()
) -> ToolResult:
    """Runs test files with the sandbox's own runner; `names`, if given, selects the tests that count."""
    limits = context.limits
    report = await context.sandbox.run_tests(paths, limits.test_timeout_s)
    if names:
        passed = tuple(name for name in report.passed if name in names)
        failed = tuple(test for test in report.failed if test.name in names)
        report = TestReport(passed, failed, report.error, report.timed_out, report.duration_s)
    facts = {
        "kind": "test",
        "num_passed": len(report.passed),
        "num_failed": len(report.failed),
        "green": report.error is None and not report.failed and not report.timed_out,
    }
    if report.timed_out:
        return ToolResult("error: tests timed out", ToolErrorClass.TIMEOUT, facts=facts)
    return ToolResult(shown(format_report(report, limits.test_failures, limits.line_characters)), facts=facts)


def format_report(report: TestReport, num_failures: int, line_characters: int) -> str:
    """The report in a few lines."""
    if report.error is not None:
        return shorten(f"error: {report.error}", line_characters)
    lines = _failure_lines(report.failed, num_failures, line_characters)
    summary = f"{len(report.passed)} passed"
    if report.failed:
        summary = f"{len(report.failed)} failed, {summary}"
    return "\n".join([*lines, summary])


def _failure_lines(failed: Sequence[TestFailure], num_failures: int, line_characters: int) -> list[str]:
    return [shorten(f"FAIL {test.name}: {test.message}", line_characters) for test in failed[:num_failures]]


def _checked(path: str, workspace: str) -> str:
    """The path for pytest. Raises ToolArgumentError for options and for paths outside the workspace."""
    if path.startswith("-"):
        raise ToolArgumentError(f"not a path: {path[:40]}", field="paths", received=path[:40])
    file, colons, test = path.partition("::")
    return normal_path(file, workspace) + colons + test


async def _result_of(result: CommandResult, context: ToolContext) -> ToolResult:
    """The result shown for a run of pytest."""
    printed = readable("\n".join(text.rstrip("\n") for text in (result.stdout, result.stderr) if text))
    if result.timed_out:
        facts = {"kind": "test", "num_passed": 0, "num_failed": 0, "green": False}
        output = "\n".join(
            part for part in (await bounded(printed, context), "error: tests timed out") if part
        )
        return ToolResult(output, ToolErrorClass.TIMEOUT, facts=facts)
    if result.exit_code == _MISSING:
        message = next(
            (line for line in printed.split("\n") if line.startswith("ERROR: ")), "ERROR: no such path"
        )
        return failure(shorten(message.removeprefix("ERROR: "), 160), ToolErrorClass.UNEXPECTED_ENVIRONMENT)
    if result.exit_code == _NOTHING:
        return failure("no tests there", ToolErrorClass.UNEXPECTED_ENVIRONMENT)
    report = await _read_report(context)
    facts = {
        "kind": "test",
        "num_passed": report.num_passed if report else 0,
        "num_failed": len(report.failed) if report else 0,
        "green": result.exit_code == 0,
    }
    if report is None or (not report.failed and result.exit_code != 0):
        output = f"{await bounded(printed, context)}\nerror: the test runner failed: exit {result.exit_code}"
        return ToolResult(output.lstrip("\n"), facts=facts)
    kept = await keep_output(printed, context) if report.failed else ""
    return ToolResult(_format_junit(report, context) + kept, facts=facts)


def _format_junit(report: JunitReport, context: ToolContext) -> str:
    limits = context.limits
    lines = _failure_lines(report.failed, limits.test_failures, limits.line_characters)
    if (rest := len(report.failed) - len(lines)) > 0:
        lines.append(f"... {rest} more")
    counts = [f"{len(report.failed)} failed"] if report.failed else []
    counts.append(f"{report.num_passed} passed")
    if report.num_skipped:
        counts.append(f"{report.num_skipped} skipped")
    return "\n".join([*lines, ", ".join(counts)])


async def _read_report(context: ToolContext) -> JunitReport | None:
    """The XML report of the run that has just ended; None if pytest ended before writing it."""
    try:
        data = await context.sandbox.files.read(_REPORT, OUTPUT_BYTES)
    except PathMissingError:
        return None
    return parse_junit(data)


async def _run_without_pytest(paths: Sequence[str], context: ToolContext) -> ToolResult:
    """Runs the files that `paths` name with the built-in runner; a directory means all test files below."""
    files: list[str] = []
    names: set[str] = set()
    for path in paths:
        file, _, test = path.partition("::")
        if test:
            names.add(test.rpartition("::")[2].partition("[")[0])
        files += [file] if file.endswith(".py") else await _test_files(file, context)
    if not files:
        return failure("no tests there", ToolErrorClass.UNEXPECTED_ENVIRONMENT)
    return await run_built_in(list(dict.fromkeys(files)), context, frozenset(names))


async def _test_files(directory: str, context: ToolContext) -> list[str]:
    entries = await context.sandbox.files.list(directory, context.limits.list_depth)
    names = ((entry, entry.path.rpartition("/")[2]) for entry in entries if entry.kind == "file")
    return [
        entry.path
        for entry, name in names
        if name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))
    ][: 2 * _NUM_PATHS]
