"""A program whose state proves continuity: its memory, an open connection to itself, and a counter."""

from __future__ import annotations

import asyncio
import time

from etude.sandbox.interface import Sandbox

PROGRAM = """
import os, socket, sys, threading, time
state = os.urandom(8 << 20)
token = hash(state)
server = socket.create_server(("127.0.0.1", 7777))
client = socket.create_connection(("127.0.0.1", 7777))
peer, _ = server.accept()
count = 0
while True:
    client.sendall(b"%d\\n" % count)
    assert int(peer.recv(100)) == count
    assert hash(state) == token
    count += 1
    with open("/dev/shm/alive.new", "w") as file:
        file.write(f"{os.getpid()} {token} {count}")
    os.replace("/dev/shm/alive.new", "/dev/shm/alive")
    time.sleep(0.02)
"""
"""Memory, an open connection to itself and a counter that all tell of one life."""


async def start_program(sandbox: Sandbox) -> None:
    await sandbox.files.write("program.py", PROGRAM)
    await sandbox.commands.start("exec python3 program.py > log 2>&1")
    end_s = time.monotonic() + 120
    while (await sandbox.commands.run("test -s /dev/shm/alive", timeout_s=60)).exit_code != 0:
        assert time.monotonic() < end_s, (await sandbox.files.read("log")).decode()
        await asyncio.sleep(0.1)


async def alive(sandbox: Sandbox) -> tuple[str, str, int]:
    """(pid, token, count) of the program; waits until the count has moved on."""
    seen: list[tuple[str, str, int]] = []
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        text = (await sandbox.commands.run("cat /dev/shm/alive", timeout_s=60)).stdout.split()
        seen.append((text[0], text[1], int(text[2])))
        if seen[-1][2] > seen[0][2]:
            return seen[-1]
        await asyncio.sleep(0.1)
    raise AssertionError(f"the program stands still: {seen[-1]} {await sandbox.files.read('log')!r}")
