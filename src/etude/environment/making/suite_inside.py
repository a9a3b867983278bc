"""Runs a project's tests by pytest and says how each ended. Runs inside a sandbox, alone.

Standard library and pytest only: its source enters on standard input, or lies beside a task's `test.sh`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.util
import json
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LOGS = "/logs/verifier"
TOP = f"{Path.cwd()}/"
"""The project, whatever directory a test changes to."""
_MESSAGE_CHARS = 600
_VALUE_CHARS = 200
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
        lines_of: dict[str, dict[int, str]] = {}
        for name, known in self._lines.items():
            found: dict[int, int] = {}
            for test, lines in known.items():
                for line in lines:
                    found[line] = found.get(line, 0) | bits.get(test, 0)
            lines_of[name.removeprefix(TOP)] = {line: format(number, "x") for line, number in found.items()}
        return {"tests": tests, "lines": lines_of}


class Watcher:
    """A plugin of pytest's: chooses and shuffles tests, and keeps how each ended."""

    def __init__(self, ids: list[str] | None, seed: int | None, tracer: Tracer | None) -> None:
        self.outcomes: dict[str, str] = {}
        self.failures: dict[str, dict[str, Any]] = {}
        self.errors: dict[str, str] = {}
        self.functions: dict[str, list[str]] = {}
        self.broken: str | None = None
        self._arguments: dict[str, Any] = {}
        self._ids = None if ids is None else frozenset(ids)
        self._seed, self._tracer = seed, tracer

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leaves those that were asked for, in an order of the seed's; a file's tests stay together."""
        if self._ids is not None:
            items[:] = [item for item in items if item.nodeid in self._ids]
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

    def to_document(self, status: int) -> dict[str, Any]:
        """How the tests ended."""
        found = {"status": status, "broken": self.broken, "outcomes": self.outcomes}
        found |= {"failures": self.failures, "errors": self.errors}
        return {**found, "functions": self.functions}

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
        if call.when == "setup":
            self._arguments = _arguments(item)  # as they are before the test can change them
            self.functions[item.nodeid] = list(_function(item))
        result: Any = yield
        report = result.get_result()
        before = self.outcomes.get(item.nodeid, "passed")
        self.outcomes[item.nodeid] = max(before, report.outcome, key=_RANKS.__getitem__)
        if report.outcome == "failed" and item.nodeid not in self.failures:
            crash = getattr(report.longrepr, "reprcrash", None)
            words = getattr(crash, "message", None) or str(report.longrepr)
            file, function = self.functions[item.nodeid]
            row = {"test": item.nodeid, "message": words[:_MESSAGE_CHARS], "file": file, "function": function}
            line, innermost = _failing_line(item, file, call.excinfo), _innermost(call.excinfo)
            row |= {"test_line": line, "innermost": innermost}
            self.failures[item.nodeid] = {**row, **self._arguments}

    def pytest_internalerror(self, excrepr: Any) -> None:
        """Keeps why pytest itself, or a plugin of the project's, failed."""
        self.broken = str(excrepr)[-_MESSAGE_CHARS:]

    def pytest_collectreport(self, report: Any) -> None:
        """Keeps the files whose tests could not be collected."""
        if report.failed:
            self.errors[report.nodeid] = str(report.longrepr)[-_MESSAGE_CHARS:]


class Rounds:
    """A plugin of pytest's: runs collected tests several times, each time in a child of this process that
    has them as they were collected; it ends with a round in which all that was asked for passes."""

    def __init__(self, request: dict[str, Any], errors: dict[str, str]) -> None:
        """`errors`: of the collection."""
        self.found: list[dict[str, Any]] = []
        self._rounds, self._stable, self._limit_s = request["rounds"], request["stable"], request["limit_s"]
        self._errors = errors

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> bool:
        """In place of pytest's own loop."""
        for row in self._rounds:
            found = self._run(session, row)
            self.found.append({**found, "errors": self._errors})
            asked = self._stable if row["ids"] is None else row["ids"]
            if "problem" in found or all(found["outcomes"].get(test) == "passed" for test in asked):
                break
        return True

    def _run(self, session: Any, row: dict[str, Any]) -> dict[str, Any]:
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            os.close(receiver)
            with os.fdopen(sender, "wb") as file:
                file.write(json.dumps(_run_round(session, row)).encode())
            os._exit(0)
        os.close(sender)
        parts: list[bytes] = []
        until = time.monotonic() + self._limit_s
        while select.select([receiver], [], [], max(0.0, until - time.monotonic()))[0]:
            part = os.read(receiver, 1 << 20)
            if not part:
                break
            parts.append(part)
        hangs = time.monotonic() >= until
        os.close(receiver)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        with contextlib.suppress(ValueError):
            return dict(json.loads(b"".join(parts)))
        words = f"hangs: the tests did not end within {self._limit_s:.0f} s"
        problem = words if hangs else f"dies: pytest ended with {status}"
        return {"problem": problem, "outcomes": {}}


def _run_round(session: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Runs chosen ones of the collected tests; does not return in a test's own children."""
    process, manager = os.getpid(), session.config.pluginmanager
    for plugin in manager.get_plugins():
        if type(plugin) in (Watcher, Rounds):
            manager.unregister(plugin)
    watcher = Watcher(row["ids"], row["seed"], None)
    manager.register(watcher)
    watcher.pytest_collection_modifyitems(session.items)
    session.config.option.maxfail = 1 if row["ids"] is not None else 0
    session.testsfailed = 0
    with contextlib.suppress(session.Failed, session.Interrupted):
        session.config.hook.pytest_runtestloop(session=session)
    if os.getpid() != process:
        os._exit(1)
    return watcher.to_document(0)


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


def _innermost(excinfo: Any) -> dict[str, Any] | None:
    """Where the traceback's last frame below the working directory is."""
    for path, name, line in reversed(_frames(excinfo)):
        if path.startswith(TOP):
            return {"path": path[len(TOP) :], "name": name, "first_line": line, "last_line": line}
    return None


def _function(item: Any) -> tuple[str, str]:
    """The file that a test is written in, and its function's qualified name."""
    function = getattr(item, "function", None)
    code = getattr(function, "__code__", None)
    path = code.co_filename if code is not None else str(item.path)
    return path.removeprefix(TOP), getattr(function, "__qualname__", "")


def _failing_line(item: Any, file: str, excinfo: Any) -> int:
    """A test's last line in the traceback, of the file that it is written in; 0 if there is none."""
    name = getattr(item, "originalname", item.name)
    for path, function, line in reversed(_frames(excinfo)):
        if (path.removeprefix(TOP), function.rpartition(".")[2]) == (file, name):
            return line
    return 0


def _arguments(item: Any) -> dict[str, Any]:
    """What a test is given: plain values as code, which of a parametrization's values, and where its
    fixtures are defined: file and line."""
    names = {id(value): name for name, value in vars(getattr(item, "module", item)).items()}
    values = {
        name: text
        for name, value in getattr(item, "funcargs", {}).items()
        if name != "request" and (text := _as_code(value, names)) and len(text) <= _VALUE_CHARS
    }
    indices = dict(getattr(getattr(item, "callspec", None), "indices", {}))
    fixtures: dict[str, Any] = {}
    for name, found in getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {}).items():
        code = getattr(found[-1].func, "__code__", None)
        if code is not None and code.co_filename.startswith(TOP):
            fixtures[name] = [code.co_filename[len(TOP) :], code.co_firstlineno]
    return {"values": values, "indices": indices, "fixtures": fixtures}


def _as_code(value: Any, names: dict[int, str], depth: int = 0) -> str:
    """An expression for a plain value, or for what the test's module has a name for; else empty."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return repr(value)
    if kind in (list, tuple, dict, set) and len(value) <= 20 and depth < 3:
        parts = [*value, *value.values()] if kind is dict else list(value)
        codes = [_as_code(part, names, depth + 1) for part in parts]
        plain = repr(value)
        return plain if all(codes) and [repr(part) for part in parts] == codes else ""
    name = names.get(id(value), "") if callable(value) else ""
    return "" if name.startswith(("_", "@")) else name


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Runs the tests that `request` names and says how they ended."""
    sys.path[0] = str(Path.cwd())
    patterns = [f"{TOP}{pattern}" for pattern in request.get("cover", [])]
    tracer = Tracer(patterns) if patterns else None
    if tracer is not None:
        tracer.begin("")
    watcher = Watcher(request.get("ids"), request.get("seed"), tracer)
    words = ["-q", "--tb=native", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly"]
    words += ["-o", "addopts=", "--continue-on-collection-errors", *request.get("options", [])]
    if not request.get("explain"):
        words.append("--assert=plain")  # what is compared needs no telling; to rewrite that takes longest
    words += ["-p", "no:cov"] if importlib.util.find_spec("pytest_cov") else []
    is_loaded = "PYTEST_DISABLE_PLUGIN_AUTOLOAD" not in os.environ
    words += ["--hypothesis-seed=0"] if is_loaded and importlib.util.find_spec("hypothesis") else []
    plugins: list[Any] = [watcher]
    if "rounds" in request:
        plugins.append(Rounds(request, watcher.errors))
    status = pytest.main([*words, *request["paths"]], plugins=plugins)
    found = watcher.to_document(int(status))
    if len(plugins) > 1:
        found["rounds"] = plugins[1].found
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
    """Writes how the tests ended that the file names, and the reward: 1 if all of them pass, else 0."""
    request = json.loads(Path(path).read_text())
    process = os.getpid()
    outcomes = run(request)["outcomes"]
    missed = [test for test in request["ids"] if outcomes.get(test) != "passed"]
    if os.getpid() == process:
        sys.stdout.write("".join(f"not passed: {test}\n" for test in missed[:20]))
        sys.stdout.flush()
        Path(LOGS, "outcomes.json").write_text(json.dumps(outcomes))
        Path(LOGS, "reward.txt").write_text("0\n" if missed else "1\n")
    os._exit(0)


if __name__ == "__main__" and len(sys.argv) == 2:
    grade(sys.argv[1])
