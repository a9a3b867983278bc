"""QEMU's control protocol against a server of a few lines."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from etude.errors import SandboxError
from etude.sandbox.errors import SandboxLostError
from etude.sandbox.vm.qmp import Event, Qmp, QmpError

Reply = Callable[[dict[str, Any], list[int]], list[dict[str, Any]] | None]


class FakeQemu:
    """Greets, then answers each command with what `reply` says; None: dies."""

    def __init__(self, reply: Reply, greeting: bytes = b'{"QMP": {}}\r\n') -> None:
        self.client, self._server = socket.socketpair()
        self._reply = reply
        self._greeting = greeting
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with self._server:
            self._server.sendall(self._greeting)
            buffer = b""
            while True:
                data, descriptors, _, _ = socket.recv_fds(self._server, 1 << 16, 4)
                if not data:
                    return
                buffer += data
                while b"\n" in buffer:
                    line, _, buffer = buffer.partition(b"\n")
                    request = json.loads(line)
                    if request["execute"] == "qmp_capabilities":
                        self._server.sendall(json.dumps({"return": {}, "id": request["id"]}).encode() + b"\n")
                        continue
                    messages = self._reply(request, descriptors)
                    if messages is None:
                        return
                    for message in messages:
                        self._server.sendall(json.dumps(message).encode() + b"\n")


def converse(reply: Reply, scenario: Callable[[Qmp], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        qmp = Qmp(FakeQemu(reply).client, "vm-1")
        try:
            await qmp.negotiate(60)
            return await scenario(qmp)
        finally:
            qmp.close()

    return asyncio.run(run())


def echo(request: dict[str, Any], descriptors: list[int]) -> list[dict[str, Any]]:
    return [{"return": request.get("arguments"), "id": request["id"]}]


def test_commands_in_flight_get_their_own_answers() -> None:
    async def scenario(qmp: Qmp) -> list[Any]:
        return await asyncio.gather(*(qmp.execute("x", {"n": number}) for number in range(20)))

    assert converse(echo, scenario) == [{"n": number} for number in range(20)]


def test_a_refusal_is_typed_and_keeps_the_reason() -> None:
    def reply(request: dict[str, Any], descriptors: list[int]) -> list[dict[str, Any]]:
        return [{"error": {"class": "GenericError", "desc": "no such node"}, "id": request["id"]}]

    with pytest.raises(QmpError, match="QEMU refuses blockdev-del: no such node"):
        converse(reply, lambda qmp: qmp.execute("blockdev-del"))


def test_death_in_the_middle_of_a_command_is_a_lost_sandbox() -> None:
    ended: list[str] = []

    async def scenario(qmp: Qmp) -> None:
        qmp.on_end = lambda: ended.append("ended")
        waiting = asyncio.ensure_future(qmp.event(lambda event: False, 60))
        with pytest.raises(SandboxLostError):
            await qmp.execute("stop")
        with pytest.raises(SandboxLostError):
            await waiting
        with pytest.raises(SandboxLostError):
            await qmp.execute("cont")

    converse(lambda request, descriptors: None, scenario)
    assert ended == ["ended"]


def test_silence_ends_at_the_deadline() -> None:
    with pytest.raises(SandboxError, match=r"no stop within 0\.05 s"):
        converse(lambda request, descriptors: [], lambda qmp: qmp.execute("stop", deadline_s=0.05))


def test_an_event_is_found_whether_it_came_before_or_comes_after_the_question() -> None:
    def reply(request: dict[str, Any], descriptors: list[int]) -> list[dict[str, Any]]:
        stamp = {"seconds": 1, "microseconds": 0}
        return [
            {"event": "JOB", "data": request["arguments"], "timestamp": stamp},
            {"return": {}, "id": request["id"]},
        ]

    def is_job(number: int) -> Callable[[Event], bool]:
        return lambda event: event["event"] == "JOB" and event["data"]["n"] == number

    async def scenario(qmp: Qmp) -> tuple[Any, Any]:
        await qmp.execute("x", {"n": 1})
        later = asyncio.ensure_future(qmp.event(is_job(2), 60))
        before = await qmp.event(is_job(1), 60)
        assert not later.done()
        await qmp.execute("x", {"n": 2})
        with pytest.raises(SandboxError, match="no thing within"):
            await qmp.event(lambda event: False, 0.05, "thing")
        return before["data"]["n"], (await later)["data"]["n"]

    assert converse(reply, scenario) == (1, 2)


def test_a_descriptor_travels_with_its_command() -> None:
    received: list[bytes] = []

    def reply(request: dict[str, Any], descriptors: list[int]) -> list[dict[str, Any]]:
        received.append(os.read(descriptors[0], 10))
        os.close(descriptors[0])
        return echo(request, descriptors)

    async def scenario(qmp: Qmp) -> None:
        reader, writer = os.pipe()
        os.write(writer, b"hello")
        await qmp.execute("getfd", {"fdname": "x"}, descriptor=reader)
        os.close(reader)
        os.close(writer)

    converse(reply, scenario)
    assert received == [b"hello"]


@pytest.mark.parametrize("noise", [b"no json\n", b"[1]\n", b'{"event": 1}x\n', b"\xff\xfe\n"])
def test_what_is_no_qmp_ends_the_conversation(noise: bytes) -> None:
    async def run() -> None:
        qmp = Qmp(FakeQemu(echo, noise).client, "vm-1")
        with pytest.raises(SandboxError):
            await qmp.negotiate(60)
        assert qmp.closed

    asyncio.run(run())
