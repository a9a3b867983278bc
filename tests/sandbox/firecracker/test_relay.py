"""The relay in the guest: one program, connections that come and go."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from etude.sandbox.firecracker import relay

ECHO = "import sys\nfor line in sys.stdin:\n    print(line.strip()[::-1], flush=True)\n"


@contextmanager
def running(directory: Path, program: str) -> Iterator[subprocess.Popen[bytes]]:
    path = str(Path(relay.__file__))
    command = [sys.executable, "-ISB", path, f"unix:{directory / 's'}", sys.executable, "-ISB", "-c", program]
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def connect(directory: Path) -> socket.socket:
    end_s = time.monotonic() + 60.0
    while True:
        line = socket.socket(socket.AF_UNIX)
        line.settimeout(60.0)
        try:
            line.connect(str(directory / "s"))
            return line
        except OSError:
            line.close()
            if time.monotonic() > end_s:
                raise
            time.sleep(0.01)


def receive(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = line.recv(size - len(data))
        if not piece:
            break
        data += piece
    return data


def test_the_program_s_line_survives_its_connections(tmp_path: Path) -> None:
    with running(tmp_path, ECHO):
        for word in (b"one", b"two", b"three"):
            with connect(tmp_path) as line:
                line.sendall(word + b"\n")
                assert receive(line, len(word) + 1) == word[::-1] + b"\n"


def test_what_the_program_says_waits_for_an_owner(tmp_path: Path) -> None:
    with running(tmp_path, "print('ready', flush=True)\nimport time\ntime.sleep(30)"):
        time.sleep(0.2)
        with connect(tmp_path) as line:
            assert receive(line, 6) == b"ready\n"


def test_a_new_owner_takes_over_from_one_that_hangs(tmp_path: Path) -> None:
    with running(tmp_path, ECHO), connect(tmp_path) as old:
        old.sendall(b"a\n")
        assert receive(old, 2) == b"a\n"
        with connect(tmp_path) as new:
            new.sendall(b"xyz\n")
            assert receive(new, 4) == b"zyx\n"
            assert old.recv(1) == b""


def test_large_streams_pass_both_ways_at_once(tmp_path: Path) -> None:
    program = "import os\nwhile True:\n    os.write(1, os.read(0, 65536))\n"
    data = os.urandom(8 << 20)
    with running(tmp_path, program), connect(tmp_path) as line:
        line.setblocking(False)
        received, sent = bytearray(), 0
        end_s = time.monotonic() + 60.0
        while len(received) < len(data) and time.monotonic() < end_s:
            with suppress(BlockingIOError):
                sent += line.send(data[sent : sent + 65536]) if sent < len(data) else 0
            try:
                received += line.recv(1 << 18)
            except BlockingIOError:
                time.sleep(0.0005)
    assert bytes(received) == data


def test_the_relay_ends_with_its_program(tmp_path: Path) -> None:
    with running(tmp_path, "import sys; sys.stdin.readline()") as process, connect(tmp_path) as line:
        line.sendall(b"\n")
        assert process.wait(timeout=60) == 0
