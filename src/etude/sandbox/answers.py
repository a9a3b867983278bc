"""Validates answers of the program inside a sandbox.

Each frame is checked as a whole when it arrives (`frame_problem`), and each field where it is used. Our own
program never sends what these readers refuse, so a refused answer means that it was taken over, which only
the agent can do: a `SandboxKilledByAgentError`. What an agent can make an *honest* program send is accepted
(names with lone surrogates). The payload of a test run comes from the process that ran the agent's code: if
it is not a report, the run ended early.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from etude.errors import AgentError
from etude.sandbox.errors import SandboxKilledByAgentError
from etude.sandbox.inside.frames import Header
from etude.sandbox.paths import normal_path
from etude.sandbox.types import ProbeReport, ProbeResult, TestFailure, TestReport

MAX_INTEGER = (1 << 63) - 1
"""Integers from inside must be between minus this and this."""
MAX_EXIT_CODE = 255
"""The largest exit code of a process; also the bound of a signal's negated number."""
Shapes = frozenset[tuple[type, ...]]
"""The allowed types of a row, field by field."""

_DIFF_SHAPES: Shapes = frozenset({(str, int), (str, type(None))})


class _Shortened(reprlib.Repr):
    """Shows values of any size in one line. Objects are not sorted: one may have a million fields."""

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return f"<object of {len(x)} fields>"


_shortened = _Shortened()
_shortened.maxstring = 80


def invalid_answer(sandbox: str, field: str, received: object, wanted: str) -> SandboxKilledByAgentError:
    """The error for a field of `sandbox`'s answer that is not as `wanted` describes."""
    return SandboxKilledByAgentError(
        f"sandbox {sandbox} sent an invalid answer: must be {wanted}",
        field=f"answer.{field}",
        received=_shortened.repr(received),
        fix="create another sandbox: the server in this one was compromised or is broken",
    )


def text(header: Header, name: str, sandbox: str) -> str:
    """A string field; lone surrogates encode bytes that are not UTF-8. Raises SandboxKilledByAgentError."""
    value = header.get(name)
    if type(value) is not str:
        raise invalid_answer(sandbox, name, value, "a text")
    return value


def flag(header: Header, name: str, sandbox: str) -> bool:
    """A boolean field. Raises SandboxKilledByAgentError."""
    value = header.get(name)
    if type(value) is not bool:
        raise invalid_answer(sandbox, name, value, "true or false")
    return value


def integer(header: Header, name: str, sandbox: str, least: int = -MAX_INTEGER) -> int:
    """An integer field from `least` to `MAX_INTEGER`. Raises SandboxKilledByAgentError."""
    value = header.get(name)
    if type(value) is not int or not least <= value <= MAX_INTEGER:
        raise invalid_answer(sandbox, name, value, f"an integer, at least {least}")
    return value


def exit_code(header: Header, sandbox: str) -> int:
    """How a command ended: its code, or minus a signal's number. Raises SandboxKilledByAgentError."""
    value = integer(header, "exit_code", sandbox, least=-MAX_EXIT_CODE)
    if value > MAX_EXIT_CODE:
        raise invalid_answer(sandbox, "exit_code", value, f"at most {MAX_EXIT_CODE}")
    return value


def duration_s(header: Header, name: str, sandbox: str) -> float:
    """A finite number of seconds, not negative. Raises SandboxKilledByAgentError."""
    value = header.get(name)
    if type(value) is float and 0.0 <= value < math.inf:
        return value
    if type(value) is int and 0 <= value <= MAX_INTEGER:
        return float(value)
    raise invalid_answer(sandbox, name, value, "a finite number of seconds")


def rows(header: Header, name: str, sandbox: str, shapes: Shapes, least: int = 0) -> list[list[Any]]:
    """A list of rows, each of one of the `shapes`, integers from `least` on. Raises as `text`."""
    value = header.get(name)
    if type(value) is not list:
        raise invalid_answer(sandbox, name, value, "a list")
    for row in value:
        if type(row) is not list or tuple(map(type, row)) not in shapes:
            raise invalid_answer(sandbox, name, row, f"rows of {_named(shapes)}")
        for item in row:
            if type(item) is int and not least <= item <= MAX_INTEGER:
                raise invalid_answer(sandbox, name, row, f"rows with integers that are at least {least}")
    return value


def parts(header: Header, data: bytes, sandbox: str) -> tuple[bytes, bytes]:
    """Splits the payload in two by the field `sizes`, which must add up to it. Raises as `text`."""
    sizes: Any = header.get("sizes")
    if type(sizes) is list and len(sizes) == 2 and type(sizes[0]) is int and type(sizes[1]) is int:
        first, second = sizes
        if first >= 0 and second >= 0 and first + second == len(data):
            return data[:first], data[first:]
    raise invalid_answer(sandbox, "sizes", sizes, f"two sizes that add up to {len(data)} bytes")


def changes(header: Header, data: bytes, sandbox: str) -> dict[str, bytes | None]:
    """The changed files of a diff, sorted by path. Raises as `text`, also for a path that leads out."""
    found: dict[str, bytes | None] = {}
    changed, end = _changed_files(header, data, sandbox)
    start = 0
    for path, size in changed:
        if path in found or not _is_inside(path):
            raise invalid_answer(sandbox, "files", path, "paths below the workspace, each once")
        found[path] = None if size is None else data[start : start + size]
        start += size or 0
    if start != end:
        raise invalid_answer(sandbox, "files", start, f"files of {end} bytes together")
    return dict(sorted(found.items()))


def root_changes(names: bytes, sandbox: str) -> dict[str, bool]:
    """Parses the changed paths of a root from `inside.gathering`: absolute path -> whether it exists."""
    found: dict[str, bool] = {}
    for row in names.split(b"\0")[:-1]:
        path = os.fsdecode(row[1:])
        if row[:1] not in (b"+", b"-") or not _is_inside(path):
            raise invalid_answer(sandbox, "names", path, "signs and paths below the root")
        found[f"/{path}"] = row[:1] == b"+"
    return found


def file_kinds(rows: bytes, sandbox: str) -> dict[str, str]:
    """Parses the links and executables of a workspace from `inside.gathering`: path -> link target or ""."""
    words = [os.fsdecode(word) for word in rows.split(b"\0")[:-1]]
    if len(words) % 2 or not all(map(_is_inside, words[::2])):
        raise invalid_answer(sandbox, "rows", words[:2], "pairs of a path below the workspace and a target")
    return dict(zip(words[::2], words[1::2], strict=True))


def encode_changes(found: Mapping[str, bytes | None]) -> tuple[Header, bytes]:
    """Encodes a diff for `changes`: sizes in the header, contents and NUL-terminated names as payload."""
    names = b"".join(os.fsencode(path) + b"\0" for path in found)
    sizes = [None if data is None else len(data) for data in found.values()]
    contents = (data for data in found.values() if data is not None)
    return {"name_bytes": len(names), "sizes": sizes}, b"".join((*contents, names))


def _changed_files(header: Header, data: bytes, sandbox: str) -> tuple[list[list[Any]], int]:
    """(path, size or None) of each file of a diff, and the offset at which their contents end."""
    if "files" in header:
        # From a program of an older version, in a restored machine.
        return rows(header, "files", sandbox, _DIFF_SHAPES), len(data)
    end = len(data) - integer(header, "name_bytes", sandbox, least=0)
    names = data[end:].split(b"\0")[:-1] if end >= 0 else []
    sizes: Any = header.get("sizes")
    if type(sizes) is not list or len(sizes) != len(names):
        raise invalid_answer(sandbox, "sizes", sizes, f"the sizes of {len(names)} files")
    pairs = [[os.fsdecode(name), size] for name, size in zip(names, sizes, strict=True)]
    return rows({"sizes": pairs}, "sizes", sandbox, _DIFF_SHAPES), end


def frame_problem(header: object) -> str:
    """Why this is not a valid header of an answer or event; empty if it is.

    In a valid one `id` is an integer, `fault` is [kind, message], `failure` a text, and an event of a known
    name has its fields.
    """
    if type(header) is not dict:
        return f"a header that is no object: {_shortened.repr(header)}"
    if "event" in header:
        return _event_problem(header)
    if type(header.get("id", 0)) is not int:
        return f"an id that is no integer: {_shortened.repr(header['id'])}"
    if "fault" in header:
        fault = header["fault"]
        if type(fault) is not list or list(map(type, fault)) != [str, str]:
            return f"a fault that is no kind and message: {_shortened.repr(fault)}"
    if "failure" in header and type(header["failure"]) is not str:
        return f"a failure that is no text: {_shortened.repr(header['failure'])}"
    return ""


def _event_problem(header: Header) -> str:
    event = header["event"]
    if type(event) is not str:
        return f"an event without a name: {_shortened.repr(event)}"
    if event == "output":
        named = ("id", "pid", "fd")
    elif event.startswith("net."):
        named = ("stream", "bytes") if event == "net.took" else ("stream",)
    else:
        return ""
    for name in named:
        value = header.get(name)
        if type(value) is not int or not 0 <= value <= MAX_INTEGER:
            return f"an event {event!r} whose {name!r} is {_shortened.repr(value)}"
    if event == "output" and header["fd"] not in (1, 2):
        return f"output of descriptor {_shortened.repr(header['fd'])}"
    return ""


def _is_inside(path: str) -> bool:
    try:
        return path != "." and normal_path(path) == path
    except AgentError:
        return False


def _named(shapes: Shapes) -> str:
    kinds = (", ".join(kind.__name__ for kind in shape) for shape in shapes)
    return " or ".join(sorted(f"({kind})" for kind in kinds))


def tests_report(answer: Header, data: bytes, sandbox: str) -> TestReport:
    """The report of a test run. Raises SandboxKilledByAgentError for an invalid answer."""
    elapsed_s, timed_out = duration_s(answer, "duration_s", sandbox), flag(answer, "timed_out", sandbox)
    run, error = _test_run(answer, data, sandbox, "failed", _is_failure)
    failed = tuple(TestFailure(*row) for row in run["failed"])
    return TestReport(tuple(run["passed"]), failed, error, timed_out, elapsed_s)


def probes_report(answer: Header, data: bytes, sandbox: str) -> ProbeReport:
    """The report of a probe run. Raises SandboxKilledByAgentError for an invalid answer."""
    elapsed_s, timed_out = duration_s(answer, "duration_s", sandbox), flag(answer, "timed_out", sandbox)
    run, error = _test_run(answer, data, sandbox, "results", _is_probe)
    results = (
        ProbeResult(path, name, tuple(values), failure) for path, name, values, failure in run["results"]
    )
    return ProbeReport(tuple(results), error, timed_out, elapsed_s)


def _test_run(
    answer: Header, data: bytes, sandbox: str, key: str, is_row: Callable[[object], bool]
) -> tuple[dict[str, Any], str | None]:
    """(the runner's report, empty unless it is complete; error)."""
    nothing: dict[str, Any] = {"passed": [], key: []}
    if answer["timed_out"]:
        return nothing, "timeout"
    run = _parsed_run(data, key, is_row)
    if run is not None:
        return run, run.get("error")
    code = exit_code(answer, sandbox)
    used_up = flag(answer, "memory_exceeded", sandbox)
    reason = "memory limit exceeded" if used_up else f"exit code {code}"
    return nothing, f"the test run ended early: {reason}"


def _parsed_run(data: bytes, key: str, is_row: Callable[[object], bool]) -> dict[str, Any] | None:
    """The report that a test process sent; None if it is not valid. The agent's code ran there, so nothing in
    it is trusted."""
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
