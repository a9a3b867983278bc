"""A command's time is its own: what it waits for a processor does not count."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox.inside.processes import MOST_WAITING_S, Process, extension_s
from etude.sandbox.interface import Sandbox
from etude.sandbox.machine import MachineSandbox
from tests.sandbox.scenes import becomes_true, in_sandbox

BUSY = """
import os, time

def test_it_computes():
    os.sched_setaffinity(0, {{{core}}})
    end = time.process_time() + {seconds}
    while time.process_time() < end:
        pass
"""


def row(state: str, processor_s: float) -> Process:
    return Process(1, 2, state, processor_s)


@pytest.mark.parametrize("state", ["R", "D"])
def test_what_wants_to_run_and_did_not_get_its_time_goes_on(state: str) -> None:
    assert 0 < extension_s([row("S", 0.1), row(state, 0.3)], 1.0, 1.2) <= 0.6


@pytest.mark.parametrize("state", ["S", "T", "Z"])
def test_what_sleeps_ends_at_its_deadline(state: str) -> None:
    assert extension_s([row(state, 0.1)], 1.0, 1.0) == 0
    assert extension_s([], 1.0, 1.0) == 0


@given(
    st.lists(st.tuples(st.sampled_from("RDST"), st.floats(0, 100)), max_size=5),
    st.floats(0.1, 100),
    st.floats(0, 200),
)
def test_nothing_gets_more_processor_time_or_much_more_wall_time_than_it_may(
    rows: list[tuple[str, float]], timeout_s: float, lasted_s: float
) -> None:
    more_s = extension_s([row(*one) for one in rows], timeout_s, lasted_s)
    assert more_s <= 0.1
    if sum(used_s for _, used_s in rows) >= timeout_s or lasted_s >= timeout_s + MOST_WAITING_S:
        assert more_s == 0


@contextlib.contextmanager
def others_on(core: int, count: int) -> Iterator[None]:
    """Processes that compute on a core all the time, in sessions of their own: schedulers share by those."""
    code = f"import os; os.sched_setaffinity(0, {{{core}}}); os.close(1)\nwhile True: pass"
    command = [sys.executable, "-S", "-c", code]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) for _ in range(count)]
    try:
        for other in others:
            assert other.stdout is not None
            assert other.stdout.read() == b"", "it closes its output once it computes"
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.slow
def test_tests_and_commands_end_as_they_would_alone_on_a_busy_machine(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    loop = f"taskset -c {core} sh -c 'i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; echo done'"

    async def scenario(s: Sandbox) -> None:
        with others_on(core, 12):
            report = await s.run_tests(["tests/test_busy.py"], 0.3)
            command = await s.commands.run(loop, 0.3)
        assert (report.passed, report.timed_out) == (("test_it_computes",), False)
        assert command.stdout == "done\n"
        assert max(report.duration_s, command.duration_s) > 0.3, "it waited"

    in_sandbox(tmp_path, scenario, {"tests/test_busy.py": BUSY.format(core=core, seconds=0.15)})


@pytest.mark.slow
def test_what_computes_for_ever_ends_soon_after_its_time(tmp_path: Path) -> None:
    spin = "while :; do :; done"

    async def scenario(s: Sandbox) -> None:
        report = await s.run_tests(["tests/test_busy.py"], 0.2)
        command = await s.commands.run(spin, 0.2)
        both = await s.commands.run(f"{spin} & {spin}", 0.2)
        assert report.timed_out
        assert command.timed_out
        assert both.timed_out

    in_sandbox(tmp_path, scenario, {"tests/test_busy.py": BUSY.format(core=0, seconds=1000)})


def test_time_for_which_a_sandbox_stands_still_is_no_time_of_its_commands(tmp_path: Path) -> None:
    """For a copy of its files, which may take long."""

    async def scenario(sandbox: Sandbox) -> None:
        assert isinstance(sandbox, MachineSandbox)
        cmd = "touch begun-$$; sleep 1; echo done"
        behind = await sandbox.commands.start(cmd, timeout_s=5.0)
        running = asyncio.gather(sandbox.commands.run(cmd, timeout_s=5.0), behind.wait())

        async def have_begun() -> bool:
            return len(await sandbox.files.list()) == 2

        assert await becomes_true(have_begun)
        async with sandbox.frozen():
            await asyncio.sleep(5.5)
        for result in await running:
            assert (result.timed_out, result.stdout) == (False, "done\n")
            assert 0.0 <= result.duration_s < 5.5

    in_sandbox(tmp_path, scenario)
