"""What an owner asks of a machine as a whole takes as long as it takes: only file operations have limits."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from etude.sandbox.inside import server
from etude.sandbox.inside.filesystem import Workspace
from etude.sandbox.inside.frames import Header
from etude.sandbox.inside.processes import DescendantProcesses
from etude.sandbox.inside.server import Answer, Server
from etude.sandbox.inside.settings import Settings
from tests.sandbox.scenes import answers_of


def install(header: Header, payload: bytes) -> Answer:
    """Takes longer than a file operation may."""
    time.sleep(0.2)
    return {}, b"installed"


def test_a_greeting_and_an_installation_that_take_long_are_answered(tmp_path: Path) -> None:
    def serve(line: socket.socket) -> None:
        """On a host that is busy with other things."""
        server.FILE_OPERATION_WALL_S = 0.01
        settings = Settings(memory_bytes=1 << 40, cpu_s=10, path="/usr/bin:/bin")
        Server(
            line.fileno(),
            line.fileno(),
            Workspace(str(tmp_path), -1),
            DescendantProcesses(),
            settings,
            greet=lambda header: time.sleep(0.2),
            extra={"install": install},
        ).serve()

    asked = [{"op": operation} for operation in ("hold", "ping", "hello", "install")]
    answers = answers_of(serve, asked, 5)
    assert answers[0][0].get("ready")
    # What was asked while the machine was held is answered after the greeting.
    assert [header["id"] for header, _ in answers[1:]] == [1, 3, 2, 4]
    assert answers[4] == ({"id": 4}, b"installed")
