"""What an owner asks of a machine as a whole takes as long as it takes: only file operations have limits."""

from __future__ import annotations

import multiprocessing
import socket
import time
from pathlib import Path

from etude.sandbox.inside import server
from etude.sandbox.inside.filesystem import Workspace
from etude.sandbox.inside.frames import Header, Unpacker, pack
from etude.sandbox.inside.processes import DescendantProcesses
from etude.sandbox.inside.server import Answer, Server
from etude.sandbox.inside.settings import Settings


def install(header: Header, payload: bytes) -> Answer:
    """Takes longer than a file operation may."""
    time.sleep(0.2)
    return {}, b"installed"


def serve(line: socket.socket, owners: socket.socket, root: Path) -> None:
    """Becomes the server of a machine on a host that is busy with other things."""
    owners.close()
    server.FILE_OPERATION_WALL_S = 0.01
    settings = Settings(memory_bytes=1 << 40, cpu_s=10, path="/usr/bin:/bin")
    Server(
        line.fileno(),
        line.fileno(),
        Workspace(str(root), -1),
        DescendantProcesses(),
        settings,
        greet=lambda header: time.sleep(0.2),
        extra={"install": install},
    ).serve()


def test_a_greeting_and_an_installation_that_take_long_are_answered(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    # A process of its own: the server takes signals and limits itself.
    process = multiprocessing.get_context("fork").Process(target=serve, args=(theirs, ours, tmp_path))
    process.start()
    theirs.close()
    ours.settimeout(60)
    try:
        with ours:
            for number, operation in enumerate(("hold", "ping", "hello", "install"), 1):
                ours.send(pack({"op": operation, "id": number}, b""))
            answers: list[tuple[Header, bytes]] = []
            unpacker = Unpacker()
            while len(answers) < 5:
                answers += unpacker.feed(ours.recv(1 << 16))
    finally:
        process.join(60)
        process.kill()
    assert answers[0][0].get("ready")
    # What was asked while the machine was held is answered after the greeting.
    assert [header["id"] for header, _ in answers[1:]] == [1, 3, 2, 4]
    assert answers[4] == ({"id": 4}, b"installed")
