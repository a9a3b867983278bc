"""Runs a project's tests by pytest and says how each ended. Runs inside a sandbox, alone.

Standard library and pytest only: its source enters on standard input, or lies beside a task's `test.sh`.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REWARD = "/logs/verifier/reward.txt"
_MESSAGE_CHARS = 600
_RANKS = {"passed": 0, "skipped": 1, "failed": 2}


class Tracer:
    """Which tests run which lines of some files; the name "" stands for what runs outside of every test."""

    def __init__(self, patterns: list[str]) -> None:
        self._patterns = patterns
        self._is_traced: dict[str, bool] = {}
        self._lines: dict[str, dict[str, set[int]]] = {}
        self._tracers: dict[str, Any] = {}
        self.test = ""

    def begin(self, test: str) -> None:
        """What runs from now on belongs to `test`."""
        self.test, self._tracers = test, {}
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def end(self) -> None:
        """Traces no further."""
        threading.settrace(None)  # type: ignore[arg-type]
        sys.settrace(None)

    def _enter(self, frame: Any, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        found = self._tracers.get(name)
        if found is not None:
            return found
        if name not in self._is_traced:
            self._is_traced[name] = any(fnmatch.fnmatch(name, pattern) for pattern in self._patterns)
        if not self._is_traced[name]:
            return None
        add = self._lines.setdefault(name, {}).setdefault(self.test, set()).add

        def see(frame: Any, event: str, argument: Any) -> Any:
            add(frame.f_lineno)
            return see

        self._tracers[name] = see
        return see

    def to_document(self) -> dict[str, Any]:
        """For each line its tests, one bit for each."""
        tests = sorted({test for known in self._lines.values() for test in known if test})
        bits = {test: 1 << number for number, test in enumerate(tests)}
        top, files = f"{Path.cwd()}/", dict[str, dict[int, str]]()
        for name, known in self._lines.items():
            found: dict[int, int] = {}
            for test, lines in known.items():
                for line in lines:
                    found[line] = found.get(line, 0) | bits.get(test, 0)
            files[name.removeprefix(top)] = {line: format(number, "x") for line, number in found.items()}
        return {"tests": tests, "files": files}


class Watcher:
    """A plugin of pytest's: chooses and shuffles tests, and keeps how each ended."""

    def __init__(self, ids: list[str] | None, seed: int | None, tracer: Tracer | None) -> None:
        self.outcomes: dict[str, str] = {}
        self.failures: dict[str, dict[str, Any]] = {}
        self.errors: dict[str, str] = {}
        self.broken: str | None = None
        self._ids = None if ids is None else frozenset(ids)
        self._seed, self._tracer = seed, tracer

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Leaves those that were asked for, in an order of the seed's; a file's tests stay together."""
        if self._ids is not None:
            left_out = [item for item in items if item.nodeid not in self._ids]
            items[:] = [item for item in items if item.nodeid in self._ids]
            config.hook.pytest_deselected(items=left_out)
        if self._seed is not None:
            rng = random.Random(self._seed)
            files: dict[str, list[Any]] = {}
            for item in items:
                files.setdefault(item.nodeid.partition("::")[0], []).append(item)
            order = sorted(files)
            rng.shuffle(order)
            for name in order:
                rng.shuffle(files[name])
            items[:] = [item for name in order for item in files[name]]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        """Says to the tracer whose lines follow."""
        if self._tracer is not None:
            self._tracer.begin(item.nodeid)
        yield
        if self._tracer is not None:
            self._tracer.begin("")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[None]:
        """Keeps how a part of a test ended: its worst part counts."""
        result: Any = yield
        report = result.get_result()
        before = self.outcomes.get(item.nodeid, "passed")
        self.outcomes[item.nodeid] = max(before, report.outcome, key=_RANKS.__getitem__)
        if report.outcome == "failed" and item.nodeid not in self.failures:
            crash = getattr(report.longrepr, "reprcrash", None)
            words = getattr(crash, "message", None) or str(report.longrepr)
            place = _innermost(call.excinfo)
            line = _line_in(str(item.path), call.excinfo)
            self.failures[item.nodeid] = {"message": words[:_MESSAGE_CHARS], "line": line, "place": place}

    def pytest_internalerror(self, excrepr: Any) -> None:
        """Keeps why pytest itself, or a plugin of the project's, failed."""
        self.broken = str(excrepr)[-_MESSAGE_CHARS:]

    def pytest_collectreport(self, report: Any) -> None:
        """Keeps the files whose tests could not be collected."""
        if report.failed:
            self.errors[report.nodeid] = str(report.longrepr)[-_MESSAGE_CHARS:]


def _frames(excinfo: Any) -> list[tuple[str, str, int]]:
    """(file, qualified name, line) of a traceback, outermost first."""
    found: list[tuple[str, str, int]] = []
    entry = excinfo.tb if excinfo is not None else None
    while entry is not None:
        code = entry.tb_frame.f_code
        name = getattr(code, "co_qualname", code.co_name).replace(".<locals>", "")
        found.append((code.co_filename, "" if name == "<module>" else name, entry.tb_lineno))
        entry = entry.tb_next
    return found


def _innermost(excinfo: Any) -> list[Any] | None:
    """(path, qualified name, line) of the traceback's last frame below the working directory."""
    top = f"{Path.cwd()}/"
    for path, name, line in reversed(_frames(excinfo)):
        if path.startswith(top):
            return [path[len(top) :], name, line]
    return None


def _line_in(path: str, excinfo: Any) -> int:
    """The last line of a file in the traceback; 0 if there is none."""
    return next((line for file, _, line in reversed(_frames(excinfo)) if file == path), 0)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Runs the tests that `request` names and says how they ended."""
    sys.path[0] = str(Path.cwd())
    patterns = [f"{Path.cwd()}/{pattern}" for pattern in request.get("cover", [])]
    tracer = Tracer(patterns) if patterns else None
    if tracer is not None:
        tracer.begin("")
    watcher = Watcher(request.get("ids"), request.get("seed"), tracer)
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", "-o", "addopts="]
    words += ["--continue-on-collection-errors", *request.get("options", [])]
    words += ["-p", "no:cov"] if importlib.util.find_spec("pytest_cov") else []
    words += ["--hypothesis-seed=0"] if importlib.util.find_spec("hypothesis") else []
    words += ["--maxfail=1"] if request.get("stop_early") else []
    status = pytest.main([*words, *request["paths"]], plugins=[watcher])
    found: dict[str, Any] = {"status": int(status), "broken": watcher.broken, "outcomes": watcher.outcomes}
    found |= {"failures": watcher.failures, "errors": watcher.errors}
    if tracer is not None:
        tracer.end()
        found["coverage"] = tracer.to_document()
    return found


def answer(request: dict[str, Any]) -> None:
    """Runs tests and prints how they ended, as one line of JSON; what they print themselves goes nowhere."""
    output, process = os.dup(1), os.getpid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    text = json.dumps(run(request)).encode() + b"\n"
    if os.getpid() == process:  # else a test forked, and this is its child
        with os.fdopen(output, "wb") as file:
            file.write(text)
        os._exit(0)  # threads that tests left behind keep nobody waiting
    os._exit(1)


def grade(path: str) -> None:
    """Writes the reward: 1 if every test that the file names passes, else 0."""
    request = json.loads(Path(path).read_text())
    process = os.getpid()
    outcomes = run(request)["outcomes"]
    missed = [test for test in request["ids"] if outcomes.get(test) != "passed"]
    if os.getpid() == process:
        sys.stdout.write("".join(f"not passed: {test}\n" for test in missed[:20]))
        sys.stdout.flush()
        Path(REWARD).write_text("0\n" if missed else "1\n")
    os._exit(0)


if __name__ == "__main__" and len(sys.argv) == 2:
    grade(sys.argv[1])
