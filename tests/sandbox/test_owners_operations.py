"""An owner's operations on a whole machine have no time limit; only file operations do."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.sandbox.channel import Channel
from etude.sandbox.inside import server
from etude.sandbox.inside.filesystem import Workspace
from etude.sandbox.inside.frames import Header
from etude.sandbox.inside.processes import DescendantProcesses
from etude.sandbox.inside.server import Answer, Server
from etude.sandbox.inside.settings import Settings
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.snapshots import Spec
from etude.sandbox.template import Template
from tests.sandbox.scenes import answers_of, line_to


def install(header: Header, payload: bytes) -> Answer:
    """Takes longer than a file operation may."""
    time.sleep(0.2)
    return {}, b"installed"


def serving(root: Path, greet: Callable[[Header], None]) -> Callable[[socket.socket], None]:
    def serve(line: socket.socket) -> None:
        """On a host that is busy with other things."""
        server.FILE_OPERATION_WALL_S = 0.01
        settings = Settings(memory_bytes=1 << 40, cpu_s=10, path="/usr/bin:/bin")
        Server(
            line.fileno(),
            line.fileno(),
            Workspace(str(root), -1),
            DescendantProcesses(),
            settings,
            greet=greet,
            extra={"install": install, "echo": lambda header, payload: ({}, payload)},
        ).serve()

    return serve


def test_a_greeting_and_an_installation_that_take_long_are_answered(tmp_path: Path) -> None:
    asked = [{"op": operation} for operation in ("hold", "echo", "hello", "install")]
    answers = answers_of(serving(tmp_path, lambda header: time.sleep(0.2)), asked, 5)
    assert answers[0][0].get("ready")
    # What was asked while the machine was held is answered after the greeting.
    assert [header["id"] for header, _ in answers[1:]] == [1, 3, 2, 4]
    assert answers[4] == ({"id": 4}, b"installed")


def test_a_machine_whose_holding_was_cancelled_answers_again(tmp_path: Path) -> None:
    def greet(header: Header) -> None:
        """As in a guest, which takes on what it is told."""
        assert {"time_s", "entropy", "hostname", "machine_id"} <= set(header)

    async def scenario(ours: socket.socket) -> None:
        owner: Any = None
        sandbox = MachineSandbox(owner, "one", Spec(Template()))
        channel = Channel(ours, "one")
        sandbox.attach(channel)

        async def hold() -> None:
            async with sandbox.held_for_copy():
                raise AssertionError("it was cancelled before the answer came")

        holding = asyncio.ensure_future(hold())
        await asyncio.sleep(0)
        holding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holding
        assert (await sandbox.call({"op": "echo"}, b"still here"))[1] == b"still here"
        channel.close("done")

    with line_to(serving(tmp_path, greet)) as ours:
        asyncio.run(scenario(ours))
