"""The owner's end of the channel to a sandbox: request ids, its end, and the limit of early output."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from etude.errors import SandboxError
from etude.sandbox.channel import Channel
from etude.sandbox.errors import SandboxKilledByAgentError
from etude.sandbox.inside.frames import Header, Unpacker, pack
from etude.sandbox.machine import MachineSandbox, Outputs
from etude.sandbox.machine_backend import MachineBackend
from etude.sandbox.snapshots import Spec
from etude.sandbox.template import Template


def on_line(scenario: Callable[[Channel, socket.socket], Awaitable[None]], first_id: int = 1) -> None:
    """Runs a scenario on a channel and the other end of its line."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        channel = Channel(ours, "one", first_id)
        try:
            await scenario(channel, theirs)
        finally:
            channel.close("done")
            theirs.close()

    asyncio.run(run())


def test_requests_begin_with_the_first_id() -> None:
    async def scenario(channel: Channel, theirs: socket.socket) -> None:
        asked = asyncio.ensure_future(channel.request({"op": "ping"}, b"", 60.0))
        await asyncio.sleep(0)
        ((header, _),) = Unpacker().feed(theirs.recv(1 << 16))
        assert header["id"] == 1000
        # An answer to what the machine was asked before it was copied.
        theirs.send(pack({"id": 999}, b"before") + pack({"id": 1000}, b"now"))
        assert (await asked)[1] == b"now"
        assert channel.next_id() == 1001

    on_line(scenario, 1000)


@pytest.mark.parametrize("first_id", [0, -1, True, 1.0, "7", None, 1 << 63])
def test_an_id_that_cannot_be_a_first_one_is_refused_and_the_line_closed(first_id: Any) -> None:
    """It may come out of the manifest of a snapshot that somebody else made."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            with pytest.raises(SandboxError) as caught:
                Channel(ours, "one", first_id)
            assert caught.value.field == "next_id"
            assert theirs.recv(1) == b""

    asyncio.run(run())


def test_after_nonsense_the_line_is_closed_and_nothing_more_is_asked() -> None:
    async def scenario(channel: Channel, theirs: socket.socket) -> None:
        reasons: list[str] = []
        channel.on_close = reasons.append
        events: list[object] = []
        channel.on_event = lambda header, payload: events.append(header)
        head = json.dumps([1]).encode()
        theirs.send(
            struct.pack("<II", len(head), 0) + head + pack({"event": "output", "id": 0, "pid": 1, "fd": 1})
        )
        await asyncio.sleep(0.01)
        assert channel.closed
        assert not events
        assert len(reasons) == 1
        assert "does not speak the protocol" in reasons[0]
        with pytest.raises(SandboxError, match="does not speak the protocol"):
            await channel.request({"op": "ping"}, b"", 60.0)

    on_line(scenario)


def output(pid: int) -> dict[str, Any]:
    """The header of output of a background command."""
    return {"event": "output", "id": 0, "pid": pid, "fd": 1}


def test_a_request_has_the_time_of_those_before_it_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen searches at once, each of which takes as long as one may, make no sandbox a lost one."""

    async def scenario(channel: Channel, theirs: socket.socket) -> None:
        loop, passed_s = asyncio.get_running_loop(), 0.0
        clock = loop.time
        monkeypatch.setattr(loop, "time", lambda: clock() + passed_s)
        asked = [asyncio.ensure_future(channel.request({"op": "grep"}, b"", 600.0)) for _ in range(3)]
        for number, answer in enumerate(asked, 1):
            await asyncio.sleep(0.01)
            passed_s += 400.0
            await asyncio.sleep(0.01)
            assert not channel.closed
            theirs.send(pack({"id": number}, b"found"))
            assert (await answer)[1] == b"found"
        # One that is asked alone has its own time only.
        late = asyncio.ensure_future(channel.request({"op": "grep"}, b"", 600.0))
        await asyncio.sleep(0.01)
        passed_s += 601.0
        with pytest.raises(SandboxError, match="no answer within 600 s"):
            await late

    on_line(scenario)


def test_a_listener_that_raises_loses_nobody_an_answer() -> None:
    async def scenario(channel: Channel, theirs: socket.socket) -> None:
        raised: list[str] = []
        heard: list[bytes] = []

        def listen(header: Header, payload: bytes) -> None:
            heard.append(payload)
            raise ValueError("made to fail")

        asyncio.get_running_loop().set_exception_handler(
            lambda _, said: raised.append(str(said["exception"]))
        )
        channel.on_event = listen
        asked = asyncio.ensure_future(channel.request({"op": "ping"}, b"", 60.0))
        await asyncio.sleep(0)
        output = {"event": "output", "id": 1, "pid": 5, "fd": 1}
        theirs.send(pack(output, b"one") + pack(output, b"two") + pack({"id": 1}, b"here"))
        assert (await asked)[1] == b"here"
        # What came before the answer was heard before it.
        assert (heard, raised) == ([b"one", b"two"], ["made to fail"] * 2)

    on_line(scenario)


def test_output_is_heard_until_its_request_is_answered_or_its_background_command_has_ended() -> None:
    outputs, heard = Outputs(), list[tuple[int, bytes]]()
    for request_id in (4, 5):
        outputs.add_listener(request_id, lambda number, data: heard.append((number, data)))
    outputs.on_event({**output(7), "id": 5}, b"before its process id is known")
    outputs.on_started(7, 5)
    for request_id in (4, 5):
        outputs.on_answered(request_id)
        outputs.on_event({**output(7), "id": request_id}, b"later")
    outputs.on_ended(7)
    outputs.on_event({**output(7), "id": 5}, b"too late")
    assert heard == [(1, b"before its process id is known"), (1, b"later")]


def test_the_time_for_which_a_sandbox_is_copied_does_not_count_for_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy may take longer than the command may: its sandbox was taken for lost."""
    monkeypatch.setattr("etude.sandbox.machine.OPERATION_S", 0.05)
    monkeypatch.setattr("etude.sandbox.machine.MOST_WAITING_S", 0.05)

    async def scenario(channel: Channel, theirs: socket.socket) -> None:
        sandbox = MachineSandbox(MachineBackend(tmp_path), "one", Spec(Template()))
        sandbox.attach(channel)
        job = asyncio.ensure_future(sandbox.job({"op": "command", "timeout_s": 0.0}))
        await asyncio.sleep(0)
        with sandbox.calls_blocked():
            await asyncio.sleep(0.5)
            assert not channel.closed
            theirs.send(pack({"id": 1}, b"late"))
            assert (await job)[1] == b"late"
        with pytest.raises(SandboxKilledByAgentError, match="no answer within"):
            await sandbox.job({"op": "command", "timeout_s": 0.0})

    on_line(scenario)
