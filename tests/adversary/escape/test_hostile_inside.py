"""A hijacked program inside a sandbox answers nonsense: detected at once, and attributed to the agent.

On `local` no process of the agent reaches the server's socket; in a guest of its own, root could.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import EtudeError, SandboxError
from etude.sandbox.blame import Blame, Evidence
from etude.sandbox.channel import Channel
from etude.sandbox.errors import SandboxKilledByAgentError
from etude.sandbox.interface import Sandbox
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.snapshots import Spec
from etude.sandbox.template import Template

Call = Callable[[Sandbox], Awaitable[object]]
Ended = tuple[object, list[str]]
"""What a call gave or raised, and what went unhandled."""
PATIENCE_S = 30.0
"""Less than a caller waits for an answer: a call that ends in time was ended by what it heard."""


class NoOwner:
    """An owner whose sandbox is its only one."""

    name = "hostile"

    async def blame(self, sandbox: MachineSandbox, error: SandboxError) -> EtudeError:
        """By the one rule, on a host that shows no failure of its own."""
        evidence = Evidence(lambda: False, lambda: None, lambda: None, lambda: 1)
        return await Blame().judge(sandbox.id, error, evidence)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **named: None


@pytest.fixture(autouse=True, scope="module")
def _evidence_at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("etude.sandbox.blame.EVIDENCE_S", 0.0)
        yield


def frame(header: object, payload: bytes = b"") -> bytes:
    """A frame with any header: `bytes` go as they are."""
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<II", len(head), len(payload)) + head + payload


def ask(call: Call, answer: Callable[[int], bytes], ends: bool = False, after: bytes = b"") -> Ended:
    """How a call ends when the first request is answered so.

    `after`: what comes a moment later. `ends`: and then the server is gone.
    """

    async def run() -> Ended:
        loop = asyncio.get_running_loop()
        unhandled: list[str] = []
        loop.set_exception_handler(lambda _, context: unhandled.append(repr(context.get("exception"))))
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        channel = Channel(ours, "hostile")
        owner: Any = NoOwner()
        sandbox = MachineSandbox(owner, "hostile", Spec(Template()))
        sandbox.attach(channel)

        async def serve() -> None:
            data = await loop.sock_recv(theirs, 1 << 16)
            (head_bytes,) = struct.unpack_from("<I", data)
            await loop.sock_sendall(theirs, answer(json.loads(data[8 : 8 + head_bytes])["id"]))
            if after:
                await asyncio.sleep(0.02)
                await loop.sock_sendall(theirs, after)
            if ends:
                theirs.shutdown(socket.SHUT_RDWR)

        serving = asyncio.ensure_future(serve())
        ended: object
        try:
            async with asyncio.timeout(PATIENCE_S):
                ended = await call(sandbox)
        except Exception as error:
            ended = error
        finally:
            serving.cancel()
            channel.close("done")
            theirs.close()
        return ended, unhandled

    return asyncio.run(run())


def answer_with(payload: bytes = b"", **fields: object) -> Callable[[int], bytes]:
    """A frame of these fields under the id of the request."""
    return lambda request: frame({"id": request, **fields}, payload)


def header_of(header: object) -> Callable[[int], bytes]:
    """A frame with this header, whatever was asked."""
    return lambda request: frame(header)


READ: Call = lambda s: s.files.read("a")  # noqa: E731
LIST: Call = lambda s: s.files.list()  # noqa: E731
GREP: Call = lambda s: s.files.grep("x")  # noqa: E731
DIFF: Call = lambda s: s.diff()  # noqa: E731
RUN: Call = lambda s: s.commands.run("x")  # noqa: E731
START: Call = lambda s: s.commands.start("x")  # noqa: E731
KILL: Call = lambda s: s.commands.kill(5)  # noqa: E731
TESTS: Call = lambda s: s.run_tests(["x"])  # noqa: E731
PROBES: Call = lambda s: s.run_probes(["x"])  # noqa: E731
PROCESSES: Call = lambda s: s.commands.list()  # noqa: E731
KINDS: Call = lambda s: s.kinds()  # noqa: E731
CALLS = (READ, LIST, GREP, DIFF, RUN, START, KILL, TESTS, PROBES, PROCESSES, KINDS)

RESULT: dict[str, object] = {
    "exit_code": 0,
    "timed_out": False,
    "memory_exceeded": False,
    "duration_s": 0.5,
    "truncated": False,
    "sizes": [1, 2],
}
"""What an honest server says of a command that printed `a` and `bc`."""


def result_with(payload: bytes = b"abc", **fields: object) -> Callable[[int], bytes]:
    """The result of a command in which some fields are others."""
    return answer_with(payload, **{**RESULT, **fields})


FRAMES: dict[str, tuple[Call, Callable[[int], bytes]]] = {
    "no JSON": (READ, header_of(b"\xff{")),
    "JSON deeper than the stack": (READ, header_of(b"[" * 100_000)),
    "a number of 6000 digits": (READ, header_of(b'{"id":' + b"9" * 6000 + b"}")),
    "a frame of 4 GiB": (READ, lambda request: struct.pack("<II", 1 << 31, 1 << 31)),
    "a payload beyond the limit": (READ, lambda request: struct.pack("<II", 2, (256 << 20) + 1)),
    "a list for a header": (READ, header_of([1, 2])),
    "a number for a header": (READ, header_of(5)),
    "null for a header": (READ, header_of(None)),
    "a text for a header": (READ, header_of("id")),
    "a list for an id": (READ, header_of({"id": [1]})),
    "true for an id": (READ, header_of({"id": True})),
    "a fraction for an id": (READ, lambda request: frame({"id": float(request)})),
    "null for an id": (READ, header_of({"id": None})),
    "a fault that is a number": (READ, answer_with(fault=5)),
    "a fault of three": (READ, answer_with(fault=[1, 2, 3])),
    "a fault of another kind": (READ, answer_with(fault=[["missing"], "x"])),
    "a fault that is a text": (READ, answer_with(fault="no")),
    "a failure that is a list": (READ, answer_with(failure=["x"])),
    "an event without fields": (READ, header_of({"event": "output"})),
    "an event without a name": (READ, header_of({"event": None})),
    "an event that is a list": (READ, header_of({"event": ["output"]})),
    "output of descriptor 7": (READ, header_of({"event": "output", "id": 0, "pid": 4, "fd": 7})),
    "output of descriptor true": (READ, header_of({"event": "output", "id": 0, "pid": 4, "fd": True})),
    "output of a process that is a list": (READ, header_of({"event": "output", "id": 0, "pid": [], "fd": 1})),
    "output of a negative process": (READ, header_of({"event": "output", "id": 0, "pid": -1, "fd": 1})),
    "a stream without a number": (READ, header_of({"event": "net.open"})),
    "a stream that is an object": (READ, header_of({"event": "net.open", "stream": {}})),
    "a stream that took less than nothing": (
        READ,
        header_of({"event": "net.took", "stream": 1, "bytes": -1}),
    ),
    "a stream that took a fraction": (READ, header_of({"event": "net.took", "stream": 1, "bytes": 0.5})),
}
"""What is no frame: nothing more is believed."""

ANSWERS: dict[str, tuple[Call, Callable[[int], bytes]]] = {
    "a file beyond the limit": (lambda s: s.files.read("a", 4), answer_with(b"12345")),
    "a listing without entries": (LIST, answer_with()),
    "a listing of numbers": (LIST, answer_with(entries=[5])),
    "a listing that is a text": (LIST, answer_with(entries="ab")),
    "a listing with a negative size": (LIST, answer_with(entries=[["a", "file", -1]])),
    "a listing with a size of true": (LIST, answer_with(entries=[["a", "file", True]])),
    "a listing with a size of 400 digits": (LIST, answer_with(entries=[["a", "file", 10**400]])),
    "a listing with an entry of four": (LIST, answer_with(entries=[["a", "file", 1, 1]])),
    "matches without lines": (GREP, answer_with(matches=[["a", 1]])),
    "a match on a line that is not a number": (GREP, answer_with(matches=[["a", math.nan, "x"]])),
    "a diff without files": (DIFF, answer_with()),
    "a diff with fewer names than sizes": (DIFF, answer_with(b"a\0", name_bytes=2, sizes=[0, 0])),
    "a diff with sizes of true": (DIFF, answer_with(b"a\0", name_bytes=2, sizes=[True])),
    "a diff with names that climb": (DIFF, answer_with(b"../a\0", name_bytes=5, sizes=[None])),
    "a diff with a name twice": (DIFF, answer_with(b"a\0a\0", name_bytes=4, sizes=[0, 0])),
    "a diff with names beyond its end": (DIFF, answer_with(b"a\0", name_bytes=9, sizes=[0])),
    "a diff with sizes beyond its end": (DIFF, answer_with(b"a\0", name_bytes=2, sizes=[7])),
    "a diff of wrong types": (DIFF, answer_with(files=[[1, "x"]])),
    "a diff that is longer than its contents": (DIFF, answer_with(files=[["a", 100]])),
    "a diff that is shorter than its contents": (DIFF, answer_with(b"abc", files=[["a", 1]])),
    "a diff with a negative size": (DIFF, answer_with(b"a", files=[["a", 2], ["b", -1]])),
    "a diff with one path twice": (DIFF, answer_with(b"ab", files=[["a", 1], ["a", 1]])),
    "a diff with a path that climbs": (DIFF, answer_with(b"a", files=[["../a", 1]])),
    "a diff with a path from the root": (DIFF, answer_with(b"a", files=[["/workspace/a", 1]])),
    "a diff with a path of NUL": (DIFF, answer_with(b"a", files=[["a\0", 1]])),
    "a diff with the workspace itself": (DIFF, answer_with(b"", files=[[".", None]])),
    "a command without a result": (RUN, answer_with()),
    "a command with a payload that does not fit": (RUN, result_with(b"abcd")),
    "a command with a negative size": (RUN, result_with(sizes=[4, -1])),
    "a command with one size": (RUN, result_with(sizes=[3])),
    "a command with sizes that are no numbers": (RUN, result_with(sizes=["a", None])),
    "a command with a size of true": (RUN, result_with(sizes=[True, 2])),
    "a command that took no number": (RUN, result_with(duration_s=math.nan)),
    "a command that took for ever": (RUN, result_with(duration_s=math.inf)),
    "a command that took less than nothing": (RUN, result_with(duration_s=-0.5)),
    "a command that took 400 digits": (RUN, result_with(duration_s=10**400)),
    "a command that took true": (RUN, result_with(duration_s=True)),
    "a command with a text for an exit code": (RUN, result_with(exit_code="0")),
    "a command with false for an exit code": (RUN, result_with(exit_code=False)),
    "a command with an exit code of 256": (RUN, result_with(exit_code=256)),
    "a command with an exit code of 60 digits": (RUN, result_with(exit_code=10**60)),
    "a command with a signal of 60 digits": (RUN, result_with(exit_code=-(10**60))),
    "a command that timed out by 1": (RUN, result_with(timed_out=1)),
    "a command that is cut by null": (RUN, result_with(truncated=None)),
    "a test run without a duration": (TESTS, answer_with()),
    "a test run that ended nowhere": (TESTS, answer_with(duration_s=0.1, timed_out=False)),
    "a probe run that timed out by a text": (PROBES, answer_with(duration_s=0.1, timed_out="no")),
    "a background command without a pid": (START, answer_with()),
    "a background command of process 0": (START, answer_with(pid=0)),
    "a background command of process true": (START, answer_with(pid=True)),
    "a background command of process 10^30": (START, answer_with(pid=10**30)),
    "a workspace without a path": (KINDS, answer_with()),
    "a workspace with a number for a path": (KINDS, answer_with(workspace=1)),
    "processes of wrong types": (PROCESSES, answer_with(processes=[[1]])),
    "processes that run by 1": (PROCESSES, answer_with(processes=[[1, "x", 1, None]])),
    "a kill without a word": (KILL, answer_with()),
}
"""Frames that are none of an honest server's."""


@pytest.mark.parametrize("name", [*FRAMES, *ANSWERS])
def test_an_answer_that_makes_no_sense_is_the_agents_doing(name: str) -> None:
    call, answer = {**FRAMES, **ANSWERS}[name]
    ended, unhandled = ask(call, answer)
    assert isinstance(ended, SandboxKilledByAgentError), ended
    assert not unhandled
    assert "hostile" in str(ended)
    assert len(str(ended)) < 500


def test_a_field_that_makes_no_sense_is_named() -> None:
    ended, _ = ask(RUN, result_with(exit_code={"number": "0" * 1000}))
    assert isinstance(ended, SandboxKilledByAgentError)
    assert ended.field == "answer.exit_code"
    assert ended.received == "<object of 1 fields>"
    assert ended.fix


def test_a_failure_of_any_length_is_told_in_short() -> None:
    ended, _ = ask(READ, answer_with(failure="x" * 1_000_000))
    assert isinstance(ended, SandboxKilledByAgentError)
    assert 100 < len(str(ended)) < 5000


def test_what_the_agent_can_make_an_honest_server_say_is_no_error() -> None:
    """Names that are no UTF-8."""
    ended, unhandled = ask(LIST, answer_with(entries=[["\udc80", "file", 1]]))
    assert [entry.path for entry in ended] == ["\udc80"]  # type: ignore[attr-defined]
    for answer in (
        answer_with(b"x", files=[["a/\udc80", 1], ["b", None]]),
        answer_with(b"xa/\x80\0b\0", name_bytes=6, sizes=[1, None]),
    ):
        ended, _ = ask(DIFF, answer)
        assert ended == {"a/\udc80": b"x", "b": None}
    assert not unhandled


@pytest.mark.parametrize(
    "said",
    [
        b"[" * 5000,
        b'{"passed": [], "failed": [["a", 5]]}',
        b'{"passed": ["a", 5], "failed": []}',
        b'{"passed": [], "failed": [], "error": ["x"]}',
        b'{"passed": ' + b"[" * 900 + b"]" * 900 + b', "failed": []}',
        b'{"results": [["a", "b", [], 5]]}',
        b'{"results": [[1, "b", [], null]]}',
        b"NaN",
        b"\xff",
    ],
)
@pytest.mark.parametrize("call", [TESTS, PROBES], ids=["tests", "probes"])
def test_what_a_test_process_says_that_is_no_report_is_a_run_that_ended_early(
    call: Call, said: bytes
) -> None:
    """The agent's code ran there, and may say anything."""
    ended, unhandled = ask(call, result_with(said, sizes=[len(said)]))
    assert ended.error == "the test run ended early: exit code 0"  # type: ignore[attr-defined]
    assert not unhandled


OUTPUT = {"event": "output", "fd": 1}


FOR_NOBODY = {
    "an answer to an id never asked": frame({"id": 10**15}, b"never asked"),
    "an answer to a negative id": frame({"id": -7}, b"never asked"),
    "ready once more": frame({"ready": True}),
    "an event of no known name": frame({"event": "something else"}),
    "data of no stream": frame({"event": "net.data", "stream": 9}, b"of no stream"),
    "output of no request": frame({**OUTPUT, "id": 10**15, "pid": 4}, b"of no request"),
    "output of 2000 commands": b"".join(frame({**OUTPUT, "id": 0, "pid": pid}, b"x") for pid in range(2000)),
}


@pytest.mark.parametrize("name", FOR_NOBODY)
def test_answers_and_events_for_nobody_are_passed_over(name: str) -> None:
    ended, unhandled = ask(READ, lambda request: FOR_NOBODY[name] + frame({"id": request}, b"mine"))
    assert (ended, unhandled) == (b"mine", [])


def test_the_first_of_two_answers_counts() -> None:
    ended, unhandled = ask(READ, lambda request: frame({"id": request}, b"1") + frame({"id": request}, b"2"))
    assert (ended, unhandled) == (b"1", [])


def test_output_that_comes_after_the_end_of_a_command_goes_to_nobody() -> None:
    heard: list[bytes] = []

    async def run(s: Sandbox) -> None:
        await s.commands.run("x", on_output=lambda number, data: heard.append(data))
        await asyncio.sleep(0.05)

    def answer(request: int) -> bytes:
        return frame({**OUTPUT, "id": request, "pid": 4}, b"in time") + result_with()(request)

    late = frame({**OUTPUT, "id": 1, "pid": 4}, b"late")
    ended, unhandled = ask(run, answer, after=late)
    assert (ended, unhandled, heard) == (None, [], [b"in time"])


def test_nothing_after_nonsense_is_believed() -> None:
    ended, unhandled = ask(READ, lambda request: frame(5) + frame({"id": request}, b"x"))
    assert isinstance(ended, SandboxKilledByAgentError)
    assert not unhandled


def test_nonsense_ends_every_waiting_call() -> None:
    async def run(s: Sandbox) -> list[object]:
        calls = (READ(s), RUN(s), DIFF(s), s.commands.run("y"))
        return list(await asyncio.gather(*calls, return_exceptions=True))

    ended, unhandled = ask(run, header_of({"id": "x"}))
    assert isinstance(ended, list)
    assert [type(error) for error in ended] == [SandboxKilledByAgentError] * 4
    assert not unhandled


# Any JSON value at all

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**30)])
    | st.floats()
    | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(
    (
        *("id", "event", "fault", "failure", "entries", "matches", "files", "processes", "workspace", "pid"),
        *("fd", "stream", "bytes", "killed", "name_bytes", *RESULT),
    )
)


def check_typed(ended: object, unhandled: list[str]) -> None:
    assert not isinstance(ended, Exception) or isinstance(ended, EtudeError), repr(ended)
    assert not unhandled, unhandled


@given(st.sampled_from(CALLS), VALUES | st.dictionaries(NAMES, VALUES, max_size=5), st.binary(max_size=8))
def test_any_value_as_a_frame_ends_typed(call: Call, header: object, payload: bytes) -> None:
    check_typed(*ask(call, lambda request: frame(header, payload), ends=True))


@given(st.sampled_from(CALLS), st.dictionaries(NAMES, VALUES, max_size=6), st.binary(max_size=8))
def test_any_values_as_an_answer_end_typed_at_once(
    call: Call, fields: dict[str, object], payload: bytes
) -> None:
    fields.pop("event", None)
    check_typed(*ask(call, lambda request: frame({**fields, "id": request}, payload)))


@given(st.sampled_from((RUN, TESTS, PROBES)), NAMES, VALUES, st.binary(max_size=8))
def test_any_value_in_a_result_ends_typed_at_once(
    call: Call, name: str, value: object, payload: bytes
) -> None:
    fields = {**RESULT, "sizes": [len(payload), 0], name: value}
    fields.pop("event", None)
    check_typed(*ask(call, lambda request: frame({**fields, "id": request}, payload)))
