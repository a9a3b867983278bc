"""Files read together: each as if it were read alone, whatever the program inside can or says."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import AgentError, ToolArgumentError
from etude.sandbox.calls import Answer, prepared
from etude.sandbox.errors import PathMissingError, SandboxKilledByAgentError, fault_error
from etude.sandbox.inside import server
from etude.sandbox.inside.faults import MISSING
from etude.sandbox.inside.filesystem import Workspace
from etude.sandbox.inside.frames import Header
from etude.sandbox.inside.processes import DescendantProcesses
from etude.sandbox.inside.server import Server
from etude.sandbox.inside.settings import Settings
from etude.sandbox.interface import Files, OnOutput, Sandbox
from tests.sandbox.scenes import answers_of, in_sandbox


def told(outcome: bytes | AgentError) -> object:
    """An outcome in a form that can be compared."""
    if isinstance(outcome, bytes):
        return outcome
    return type(outcome), outcome.message, outcome.field, outcome.received


async def one_by_one(files: Any, paths: list[str], limit_bytes: int = 1 << 20) -> list[object]:
    """What `read` makes of each path."""
    found: list[object] = []
    for path in paths:
        try:
            found.append(told(await files.read(path, limit_bytes)))
        except AgentError as error:
            found.append(told(error))
    return found


def test_each_file_is_what_it_is_alone(tmp_path: Path) -> None:
    paths = [
        "a",
        "none",
        "b/c",
        "b",
        "a/d",
        "empty",
        "out",
        "pipe",
        "../x",
        "a\0b",
        "/workspace/a",
        "a",
        "long",
    ]

    async def scenario(s: Sandbox) -> None:
        await s.commands.run("ln -s /etc/passwd out; mkfifo pipe")
        files: Any = s.files
        for limit_bytes in (1 << 20, 3, 0):
            together = [told(outcome) for outcome in await files.read_many(paths, limit_bytes)]
            assert together == await one_by_one(files, paths, limit_bytes)
        assert together[0] == b"" and isinstance(together[1], tuple)
        assert await files.read_many([]) == []

    in_sandbox(tmp_path, scenario, {"a": "one", "b/c": b"\xff\0", "empty": "", "long": "x" * 200_000})


def test_eight_files_are_one_request(tmp_path: Path) -> None:
    async def scenario(s: Any) -> None:
        before = s.channel.next_id()
        assert await s.files.read_many([str(n) for n in range(8)]) == [b"%d" % n for n in range(8)]
        assert s.channel.next_id() == before + 2

    in_sandbox(tmp_path, scenario, {str(n): str(n) for n in range(8)})


def test_files_that_fill_an_answer_come_in_several(tmp_path: Path) -> None:
    async def scenario(s: Any) -> None:
        paths = [str(n) for n in range(9)] + ["none"]
        before = s.channel.next_id()
        *found, missing = await s.files.read_many(paths, 2 << 20)
        assert [(len(data), data[:1]) for data in found] == [(1 << 20, b"%d" % n) for n in range(9)]
        assert isinstance(missing, PathMissingError)
        # Four, four, and the rest.
        assert s.channel.next_id() == before + 4

    in_sandbox(tmp_path, scenario, {str(n): str(n) * (1 << 20) for n in range(9)})


def files_of(line: Any) -> Files:
    """The files of a sandbox of which there is nothing but this line."""
    return Files(line)


class Inside:
    """A line to a program inside that answers for as many files at a time as it likes."""

    id = "one"

    def __init__(self, files: dict[str, bytes], at_once: list[int]) -> None:
        """`at_once`: of how many each next answer tells; 0: an older program, -1: one without memory."""
        self._files = files
        self._at_once = at_once

    async def call(self, header: Header, payload: bytes = b"", on_output: OnOutput | None = None) -> Answer:
        """See Sandbox.call."""
        path, header = header["path"], prepared(header, "/workspace", {})
        paths, limit_bytes = [header["path"], *header.get("more", [])], header["limit_bytes"]
        at_once = self._at_once.pop(0) if "more" in header and self._at_once else 0
        if at_once < 0:
            raise fault_error(("argument", "the answer is too large"))
        if at_once == 0:
            if paths[0] not in self._files:
                raise fault_error(MISSING, *(() if "more" in header else ("path", path)))
            return {}, self._files[paths[0]][:limit_bytes]
        rows: list[Any] = []
        found: list[bytes] = []
        for name in paths[:at_once]:
            data = self._files.get(name)
            rows.append(list(MISSING) if data is None else len(data[:limit_bytes]))
            found.append(b"" if data is None else data[:limit_bytes])
        return {"files": rows}, b"".join(found)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.binary(max_size=5)),
    st.lists(st.sampled_from(["a", "b", "c", "d", "../x", "./a", "\0"]), max_size=8),
    st.lists(st.integers(-1, 4), max_size=8),
    st.integers(0, 5),
)
def test_whatever_the_program_inside_can_the_outcome_is_that_of_single_reads(
    contents: dict[str, bytes], paths: list[str], at_once: list[int], limit_bytes: int
) -> None:
    async def run() -> None:
        files = files_of(Inside(contents, list(at_once)))
        together = [told(outcome) for outcome in await files.read_many(paths, limit_bytes)]
        assert together == await one_by_one(files_of(Inside(contents, [])), paths, limit_bytes)

    asyncio.run(run())


class Liar:
    """A line to a program inside that was taken over: every answer is the same."""

    id = "one"

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def call(self, header: Header, payload: bytes = b"", on_output: OnOutput | None = None) -> Answer:
        """See Sandbox.call."""
        return self._answer


@pytest.mark.parametrize(
    ("rows", "payload"),
    [
        (7, b""),
        (None, b""),
        ([], b""),
        ([1, 1, 1], b"abc"),
        ([1, 1], b"a"),
        ([1], b"ab"),
        ([-1, 2], b"a"),
        ([True, 1], b"ab"),
        ([1.0], b"a"),
        (["1"], b"a"),
        ([["missing"]], b""),
        ([["missing", 1]], b""),
        ([[["missing"], "x"]], b""),
        ([4], b"abcd"),
        ({"0": 1}, b"a"),
    ],
)
def test_an_answer_that_makes_no_sense_is_the_agents_doing_and_of_no_one_file(
    rows: object, payload: bytes
) -> None:
    with pytest.raises(SandboxKilledByAgentError, match="sent an invalid answer"):
        asyncio.run(files_of(Liar(({"files": rows}, payload))).read_many(["a", "b"], 3))


def test_more_bytes_than_were_asked_for_are_refused_of_an_older_program_as_well() -> None:
    with pytest.raises(SandboxKilledByAgentError, match="sent an invalid answer"):
        asyncio.run(files_of(Liar(({}, b"abcd"))).read_many(["a", "b"], 3))


def test_a_cancelled_reader_leaves_the_line_usable(tmp_path: Path) -> None:
    async def scenario(s: Any) -> None:
        for _ in range(20):
            task = asyncio.create_task(s.files.read_many(["a", "b"]))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await s.files.read_many(["b", "a"]) == [b"two", b"one"]

    in_sandbox(tmp_path, scenario, {"a": "one", "b": "two"})


class SlowWorkspace(Workspace):
    """Files on a disk that takes its time: with the first file all the time is over."""

    def read(self, path: str, limit_bytes: int, offset: int = 0) -> bytes:
        """See Workspace.read."""
        if path != "a":
            server._deadlines_s = (0.0, 0.0)
            signal.raise_signal(signal.SIGALRM)
        return super().read(path, limit_bytes, offset)


def test_a_file_is_not_blamed_for_the_time_that_those_before_it_took(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name)

    def serve(line: socket.socket) -> None:
        settings = Settings(memory_bytes=1 << 40, cpu_s=10, path="/usr/bin:/bin")
        workspace = SlowWorkspace(str(tmp_path), -1)
        Server(line.fileno(), line.fileno(), workspace, DescendantProcesses(), settings).serve()

    asked = {"op": "read", "path": "a", "more": ["b", "c"], "limit_bytes": 9}
    assert answers_of(serve, [asked], 2)[1] == ({"files": [1], "id": 1}, b"a")


TIMED = """
import signal, time
from etude.sandbox.inside import server
from etude.sandbox.inside.faults import Fault

def what_becomes_of(operation):
    try:
        with server._time_limit(0.05):
            operation()
    except Fault:
        return "fault"
    return "done"

def work():
    while True:
        pass

signal.signal(signal.SIGALRM, server._on_alarm)
print(what_becomes_of(lambda: time.sleep(0.3)), what_becomes_of(work))
server.FILE_OPERATION_WALL_S = 0.1
print(what_becomes_of(lambda: time.sleep(600)))
"""


def test_time_that_the_machine_takes_for_others_is_not_the_agents_fault() -> None:
    # A process of its own: signals are the test runner's here.
    done = subprocess.run([sys.executable, "-c", TIMED], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["done fault", "fault"], done.stderr


STORM = """
looks = server._is_time_over

def look():
    signal.raise_signal(signal.SIGALRM)
    return looks()

def miss():
    server._is_alarmed, end_s = True, time.process_time() + 0.1
    while time.process_time() < end_s:
        pass
    server._is_alarmed = False
    work()

server.FILE_OPERATION_WALL_S, server.ALARM_REPEAT_S = 20.0, 0.05
server._is_time_over = look
print(what_becomes_of(lambda: signal.raise_signal(signal.SIGALRM)), what_becomes_of(work))
server._is_time_over = looks
print(what_becomes_of(miss))
"""


def test_an_alarm_that_meets_another_calls_nothing_and_is_not_lost() -> None:
    program = [sys.executable, "-c", TIMED + STORM]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=30)
    assert done.stdout.splitlines()[2:] == ["done fault", "fault"], done.stderr


def test_an_argument_error_is_no_reason_to_lose_the_others(tmp_path: Path) -> None:
    async def scenario(s: Any) -> None:
        found = await s.files.read_many(["a", "x" * 5000, "b"])
        assert (found[0], found[2]) == (b"one", b"two")
        assert isinstance(found[1], ToolArgumentError)

    in_sandbox(tmp_path, scenario, {"a": "one", "b": "two"})
