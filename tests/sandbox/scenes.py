"""Scenarios on a backend of this machine whose state lies in a directory of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import socket
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from etude.errors import ResourceError, SandboxError
from etude.sandbox.inside.frames import Header, Unpacker, pack
from etude.sandbox.interface import Sandbox
from etude.sandbox.local.backend import ForkServerBackend, LocalBackend
from etude.sandbox.local.unisolated import UnisolatedBackend
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.template import Template
from etude.sandbox.types import Resources

Result = TypeVar("Result")
Files = dict[str, "bytes | str"]


def open_local(state: Path, name: str = "local") -> ForkServerBackend:
    """A backend of either kind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return LocalBackend(state) if name == "local" else UnisolatedBackend(state)


def unchecked_template(files: dict[str, bytes]) -> Template:
    """A template of files that no template takes: for what comes behind that check."""
    template = Template()
    template._bytes.update(files)
    return template


def on_backend(
    state: Path, scenario: Callable[[ForkServerBackend], Awaitable[Result]], name: str = "local"
) -> Result:
    """Runs a scenario on a new backend and closes it."""

    async def run() -> Result:
        backend = open_local(state, name)
        try:
            return await scenario(backend)
        except ResourceError as error:
            pytest.skip(f"no namespaces here: {error}")
        finally:
            await backend.close()

    return asyncio.run(run())


def in_sandbox(
    state: Path,
    scenario: Callable[[Sandbox], Awaitable[Result]],
    files: Files | None = None,
    name: str = "local",
    resources: Resources | None = None,
) -> Result:
    """Runs a scenario in one new sandbox."""

    async def run(backend: ForkServerBackend) -> Result:
        return await scenario(await backend.create(Template(files or {}), resources))

    return on_backend(state, run, name)


async def copies(sandbox: Sandbox, count: int = 1) -> list[Sandbox]:
    """Copies of a sandbox, none of which failed."""
    found: list[Sandbox] = []
    for copy in await sandbox.fork(count):
        assert not isinstance(copy, SandboxError), copy
        found.append(copy)
    return found


async def becomes_true(holds: Callable[[], bool | Awaitable[bool]], timeout_s: float = 60.0) -> bool:
    """Whether a condition comes to hold in time."""
    end_s = time.monotonic() + timeout_s
    while True:
        held = holds()
        if held if isinstance(held, bool) else await held:
            return True
        if time.monotonic() > end_s:
            return False
        await asyncio.sleep(0.02)


_COMMAND_LINES = """
for p in /proc/[0-9]*; do
    grep -q 'Pnd:.*[13579bdf]..$' $p/status 2>/dev/null || { tr '\\0' ' ' < $p/cmdline; echo; }
done 2>/dev/null
"""
"""Of all processes but those whose SIGKILL is on its way: on a busy machine they take their time to die."""


async def alive(sandbox: Sandbox, word: str) -> int:
    """How many processes of the sandbox have `word` as their command line."""
    shown = await sandbox.commands.run(_COMMAND_LINES)
    return [line.strip() for line in shown.stdout.splitlines()].count(word)


async def comes_alive(sandbox: Sandbox, word: str, count: int = 1) -> bool:
    """Whether `alive` comes to count so many: what was started may not have become its program yet."""

    async def holds() -> bool:
        return await alive(sandbox, word) == count

    return await becomes_true(holds)


def below(pid: int) -> list[int]:
    """Processes that a process of this machine has started, however deep."""
    found: list[int] = []
    pending = [pid]
    while pending:
        try:
            threads = list(Path(f"/proc/{pending.pop()}/task").iterdir())
            children = [
                int(child) for thread in threads for child in (thread / "children").read_text().split()
            ]
        except OSError:
            continue
        found += children
        pending += children
    return found


def fork_server(backend: ForkServerBackend) -> int:
    """Process id of the fork server itself."""
    assert backend.launcher_pid is not None
    return below(backend.launcher_pid)[0]


def first_process(backend: ForkServerBackend, sandbox: Sandbox) -> int:
    """Process id of the server of a sandbox that is the only one of its backend."""
    assert isinstance(sandbox, MachineSandbox)
    return sandbox.channel.peer_pid or below(fork_server(backend))[0]


def spare_counts(backend: ForkServerBackend) -> tuple[int, int]:
    """First processes that wait for a sandbox, and those that are being made."""
    spares = backend._spares
    return (0, 0) if spares is None else spares.counts


async def has_processes(backend: ForkServerBackend, count: int) -> bool:
    """Whether the fork server comes to have `count` processes below it, beside the spares that are ready."""

    def holds() -> bool:
        num_ready, num_making = spare_counts(backend)
        return num_making == 0 and len(below(fork_server(backend))) == count + num_ready

    return await becomes_true(holds)


def open_descriptors(pid: int | None = None) -> int:
    """How many descriptors a process has."""
    return len(list(Path(f"/proc/{pid or os.getpid()}/fd").iterdir()))


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def answers_of(
    serve: Callable[[socket.socket], None], requests: Sequence[Header], num_answers: int
) -> list[tuple[Header, bytes]]:
    """What the server of a sandbox says first. It is in a process of its own: it takes signals, and limits
    itself."""
    with line_to(serve) as ours:
        ours.settimeout(60)
        for number, request in enumerate(requests, 1):
            ours.send(pack({**request, "id": number}, b""))
        answers: list[tuple[Header, bytes]] = []
        unpacker = Unpacker()
        while len(answers) < num_answers:
            answers += unpacker.feed(ours.recv(1 << 16))
    return answers


@contextlib.contextmanager
def line_to(serve: Callable[[socket.socket], None]) -> Iterator[socket.socket]:
    """The owner's end of a line to a server, which runs in a process of its own until the line ends."""
    ours, theirs = socket.socketpair()

    def become() -> None:
        ours.close()
        serve(theirs)

    process = multiprocessing.get_context("fork").Process(target=become)
    process.start()
    theirs.close()
    try:
        with ours:
            yield ours
    finally:
        process.join(60)
        process.kill()
