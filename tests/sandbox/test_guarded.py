"""Guarded programs end with their owner, and with all that they started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from etude.errors import SandboxError
from etude.sandbox.guarded import GuardedProcess
from tests.sandbox.scenes import becomes_true, open_descriptors

SOURCE = str(Path(__file__).parents[2] / "src")
DAEMONS = "(setsid sh -c 'sleep {0} & sleep {0}' &) ; (sh -c 'setsid setsid sleep {0} &' &) ; sleep {0}"
OWNER = """
import asyncio, sys
from etude.errors import SandboxError
from etude.sandbox.guarded import GuardedProcess

async def main():
    await GuardedProcess.spawn(["sh", "-c", sys.argv[1]])
    await asyncio.sleep(0.3)
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def running(word: str) -> int:
    """How many processes of this machine are `sleep <word>`."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                count += (entry / "cmdline").read_bytes() == f"sleep\0{word}\0".encode()
            except OSError:
                continue
    return count


def zombies() -> int:
    """How many ended children nobody has waited for."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    count = 0
    for pid in children:
        with contextlib.suppress(OSError):  # somebody has waited for it just now
            count += Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return count


def scene(scenario: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await scenario()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("command", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("kill -KILL $$", 137)]
)
def test_the_programs_exit_code_passes_through(command: str, code: int) -> None:
    async def scenario() -> None:
        process = await GuardedProcess.spawn(["sh", "-c", command])
        assert await process.wait() == code
        await process.kill()
        await process.kill()

    scene(scenario)


def test_what_it_prints_is_kept_for_the_log() -> None:
    async def scenario() -> None:
        process = await GuardedProcess.spawn(["sh", "-c", "seq 100000; echo last >&2"])
        await process.wait()
        assert process.log().endswith("100000\nlast\n")
        assert len(process.log()) == 4000
        await process.kill()
        assert process.log() == ""

    scene(scenario)


def test_a_program_that_is_not_there_says_so() -> None:
    async def scenario() -> None:
        process = await GuardedProcess.spawn(["/nonexistent/program"])
        assert await process.wait() == 127
        await process.kill()

    scene(scenario)


def test_a_command_line_that_the_kernel_refuses_is_a_sandbox_error() -> None:
    async def scenario() -> None:
        before = open_descriptors()
        with pytest.raises(SandboxError, match="cannot start") as raised:
            await GuardedProcess.spawn(["true", "x" * (1 << 18)])
        assert raised.value.received == "true"
        assert open_descriptors() == before

    scene(scenario)


def test_kill_ends_daemons_too() -> None:
    word = f"{os.getpid()}71"

    async def scenario() -> None:
        process = await GuardedProcess.spawn(["sh", "-c", DAEMONS.format(word)])
        assert await becomes_true(lambda: running(word) == 4)
        await process.kill()
        assert await becomes_true(lambda: running(word) == 0)

    scene(scenario)


def test_the_end_of_the_program_ends_its_daemons() -> None:
    word = f"{os.getpid()}72"

    async def scenario() -> None:
        process = await GuardedProcess.spawn(["sh", "-c", f"(setsid sleep {word} &) ; sleep 0.2; exit 5"])
        assert await process.wait() == 5
        assert await becomes_true(lambda: running(word) == 0)
        await process.kill()

    scene(scenario)


def test_an_owner_that_is_killed_takes_everything_along() -> None:
    word = f"{os.getpid()}73"
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, DAEMONS.format(word)], stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": SOURCE},
    ) as owner:  # fmt: skip
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        assert asyncio.run(becomes_true(lambda: running(word) == 4))
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert asyncio.run(becomes_true(lambda: running(word) == 0))


def test_input_and_output_may_be_the_callers() -> None:
    async def scenario() -> None:
        reader, writer = os.pipe()
        inward = os.open("/dev/null", os.O_RDONLY)
        process = await GuardedProcess.spawn(
            ["sh", "-c", "cat; echo x; echo err >&2"], stdin=inward, stdout=writer
        )
        os.close(writer)
        os.close(inward)
        await process.wait()
        assert os.read(reader, 100) == b"x\n"
        assert process.log() == "err\n"
        os.close(reader)
        await process.kill()

    scene(scenario)


def test_a_program_that_has_just_ended_keeps_its_exit_code_when_it_is_killed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        # This watcher collects children in the event loop, which stands still until the kill.
        watcher = asyncio.PidfdChildWatcher()
        watcher.attach_loop(asyncio.get_running_loop())
        asyncio.get_event_loop_policy().set_child_watcher(watcher)
        before = zombies()
        process = await GuardedProcess.spawn(["sh", "-c", "exit 7"])
        end_s = time.monotonic() + 60.0
        while zombies() == before and time.monotonic() < end_s:
            time.sleep(0.01)  # noqa: ASYNC251 -- nothing may be collected meanwhile
        await process.kill()
        assert await process.wait() == 7

    try:
        scene(scenario)
    finally:
        asyncio.set_event_loop_policy(None)
    assert not caplog.records


def test_many_leave_no_descriptor_and_no_zombie() -> None:
    async def scenario() -> None:
        async def one() -> None:
            process = await GuardedProcess.spawn(["sleep", "60"])
            await process.kill()

        await one()
        before = open_descriptors(), zombies()
        await asyncio.gather(*(one() for _ in range(8)))
        assert await becomes_true(lambda: open_descriptors() <= before[0] and zombies() <= before[1])

    scene(scenario)


def test_a_cancelled_start_leaves_nothing() -> None:
    word = f"{os.getpid()}74"

    async def scenario() -> None:
        before = open_descriptors()
        for delay_s in (0.0, 0.001, 0.005):
            task = asyncio.create_task(GuardedProcess.spawn(["sleep", word]))
            await asyncio.sleep(delay_s)
            task.cancel()
            (process,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(process, GuardedProcess):
                await process.kill()
        assert await becomes_true(lambda: running(word) == 0)
        # Two are what the event loop itself keeps for children.
        assert await becomes_true(lambda: open_descriptors() <= before + 2)

    scene(scenario)
