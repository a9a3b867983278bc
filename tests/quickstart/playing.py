"""A harness in miniature: the tools' formats over a dict, enough to play scripted sessions in tests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from etude.records import Task, ToolCall, ToolErrorClass, ToolResult


def run_tests(files: Mapping[str, str], path: str) -> tuple[list[str], dict[str, str]]:
    """Executes one test file against the other files: (names passed, name failed -> message)."""
    modules: dict[str, dict[str, Any]] = {}

    def execute(source: str) -> dict[str, Any]:
        namespace: dict[str, Any] = {}
        for module, name in re.findall(r"^from (\S+) import (\S+)$", source, flags=re.MULTILINE):
            if module not in modules:
                modules[module] = execute(files[module.replace(".", "/") + ".py"])
            namespace[name] = modules[module][name]
        exec(re.sub(r"^from .*\n", "", source, flags=re.MULTILINE), namespace)
        return namespace

    try:
        tests = execute(files[path])
    except SyntaxError as error:
        return [], {"import": f"SyntaxError: {error.msg}"}
    passed: list[str] = []
    failed: dict[str, str] = {}
    for name, test in tests.items():
        if name.startswith("test_"):
            try:
                test()
                passed.append(name)
            except AssertionError:
                failed[name] = "1 != 2"
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
    return passed, failed


def passes(task: Task, files: Mapping[str, str], hidden: bool = False) -> bool:
    """Whether all visible (or all hidden) tests pass on `files`."""
    paths = task.hidden_test_paths if hidden else task.test_paths
    workspace = {**files, **task.hidden_files} if hidden else files
    return all(not run_tests(workspace, path)[1] for path in paths)


class Workspace:
    """Runs tool calls on the files of one task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.files = dict(task.files)

    def run(self, call: ToolCall) -> ToolResult:
        try:
            return getattr(self, f"_{call.name}")(**call.arguments)
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            return ToolResult(f"error: {error}", ToolErrorClass.INVALID_ARGUMENTS)

    def _list_dir(self, path: str = ".") -> ToolResult:
        return ToolResult("\n".join(sorted(self.files)))

    def _grep(self, pattern: str, path: str = ".") -> ToolResult:
        found = [
            f"{name}:{number}: {line}"
            for name, text in sorted(self.files.items())
            for number, line in enumerate(text.splitlines(), 1)
            if re.search(pattern, line)
        ]
        return ToolResult("\n".join(found))

    def _read_file(self, path: str) -> ToolResult:
        lines = self.files[path].splitlines()
        return ToolResult("\n".join(f"{number}\t{line}" for number, line in enumerate(lines, 1)))

    def _edit_lines(self, path: str, start: str, text: str, end: str | None = None) -> ToolResult:
        lines = self.files[path].split("\n")
        first, last = int(start), int(end or start)
        if not 1 <= first <= last <= len(lines):
            raise ValueError("no such line")
        if lines[first - 1 : last] == text.split("\n"):
            return ToolResult("no change")
        lines[first - 1 : last] = text.split("\n") if text else []
        self.files[path] = "\n".join(lines)
        return ToolResult("ok")

    def _search_replace(self, path: str, old: str, new: str) -> ToolResult:
        if self.files[path].count(old) != 1:
            raise ValueError("no unique match")
        self.files[path] = self.files[path].replace(old, new)
        return ToolResult("ok")

    def _run_tests(self) -> ToolResult:
        passed, failed = run_tests(self.files, self.task.test_paths[0])
        lines = [f"FAIL {name}: {message}" for name, message in failed.items()]
        summary = f"{len(failed)} failed, {len(passed)} passed" if failed else f"{len(passed)} passed"
        return ToolResult("\n".join([*lines, summary]))

    def _run_command(self, command: str) -> ToolResult:
        return ToolResult("")

    def _finish(self) -> ToolResult:
        return ToolResult("", finished=True)
