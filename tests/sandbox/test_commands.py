"""Commands: in the foreground, in the background, many at once; their input, their output and their ends."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import SandboxError, ToolArgumentError
from etude.sandbox.errors import SandboxKilledByAgentError
from etude.sandbox.inside.jobs import Output
from etude.sandbox.interface import Sandbox
from etude.sandbox.local.backend import ForkServerBackend
from etude.sandbox.template import Template
from etude.sandbox.types import Resources
from tests.sandbox.scenes import (
    alive,
    becomes_true,
    comes_alive,
    first_process,
    has_processes,
    in_sandbox,
    on_backend,
    open_descriptors,
    resident_bytes,
)

FLOOD = "head -c {} /dev/zero | tr '\\0' x"


def test_environment_directory_and_exit_codes(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        run = s.commands.run
        told = await run(
            'pwd; echo "$WORD"; echo $HOME; env | grep -c PYTHONHASHSEED', env={"WORD": "x y"}, cwd="d/e"
        )
        assert told.stdout == "/workspace/d/e\nx y\n/workspace\n1\n"
        assert (await run("pwd", cwd="/workspace/d")).stdout == "/workspace/d\n"
        assert (await run("echo $HOME", env={"HOME": "/tmp"})).stdout == "/tmp\n"
        codes = [
            (await run(cmd)).exit_code for cmd in ("exit 7", "kill -TERM $$", "kill -KILL $$", "exit 255")
        ]
        assert codes == [7, -15, -9, 255]
        nowhere = await run("true", cwd="none")
        assert (nowhere.exit_code, "cannot enter" in nowhere.stderr) == (126, True)

    in_sandbox(tmp_path, scenario, {"d/e/f": ""})


def test_a_directory_outside_of_the_workspace_is_refused(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        with pytest.raises(ToolArgumentError):
            await s.commands.run("pwd", cwd="/etc")

    in_sandbox(tmp_path, scenario)


@pytest.mark.parametrize(
    ("cmd", "env"),
    [("echo \ud800", {}), ("echo a\0b", {}), ("true", {"A": "x\0y"}), ("true", {"A=B": "x"})],
)
def test_what_no_program_can_be_given_is_refused(tmp_path: Path, cmd: str, env: dict[str, str]) -> None:
    async def scenario(s: Sandbox) -> None:
        with pytest.raises(ToolArgumentError) as raised:
            await s.commands.run(cmd, env=env)
        assert raised.value.field is None
        assert (await s.commands.run("echo on")).stdout == "on\n"

    in_sandbox(tmp_path, scenario)


def test_input_of_any_size_arrives_and_ends(tmp_path: Path) -> None:
    data = bytes(range(256)) * 20_000

    async def scenario(s: Sandbox) -> None:
        told = await s.commands.run("sha256sum | cut -c 1-64; cat", stdin=data)
        assert told.stdout.strip() == hashlib.sha256(data).hexdigest()
        assert (await s.commands.run("cat; echo end", stdin="ü\n")).stdout == "ü\nend\n"
        assert (await s.commands.run("cat; echo end")).stdout == "end\n"
        # A command that does not read it all, or not at all.
        assert (await s.commands.run("head -c 3", stdin="abcdef" * 50_000)).stdout == "abc"
        assert (await s.commands.run("exec <&-; sleep 0.1; echo x", stdin=data)).stdout == "x\n"
        assert (await s.commands.run("sleep 500", 0.2, stdin=data)).timed_out

    in_sandbox(tmp_path, scenario)


def test_input_beyond_one_frame_is_refused_and_the_sandbox_goes_on(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        with pytest.raises(ToolArgumentError, match="at once"):
            await s.commands.run("cat >/dev/null", stdin=bytes((256 << 20) + 1))
        assert (await s.commands.run("echo on")).stdout == "on\n"

    in_sandbox(tmp_path, scenario)


def test_fifty_commands_at_once_do_not_mix(tmp_path: Path) -> None:
    async def one(s: Sandbox, number: int) -> None:
        told = await s.commands.run(f"echo out{number}; echo err{number} >&2; sleep 0.2; exit {number}", 20.0)
        assert (told.stdout, told.stderr, told.exit_code) == (f"out{number}\n", f"err{number}\n", number)

    async def scenario(s: Sandbox) -> None:
        await asyncio.gather(*(one(s, number) for number in range(50)))

    in_sandbox(tmp_path, scenario, resources=Resources(num_processes=256, open_files=1024))


def test_too_many_at_once_fail_one_by_one_and_leave_nothing(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        starts = [s.commands.run("exec sleep 0.3", 20.0) for _ in range(60)]
        results = await asyncio.gather(*starts, return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        assert len(failed) < 60
        assert all(isinstance(error, ToolArgumentError) for error in failed), failed
        for _ in range(3):
            assert (await s.commands.run("echo on")).stdout == "on\n"

    in_sandbox(tmp_path, scenario, resources=Resources(open_files=64))


def test_output_streams_in_order_and_is_kept(tmp_path: Path) -> None:
    seen: list[tuple[int, bytes]] = []

    async def scenario(s: Sandbox) -> None:
        command = await s.commands.start(
            "for i in 1 2 3; do echo $i; until [ -e heard$i ]; do sleep 0.02; done; echo e$i >&2; done",
            60.0,
            on_output=lambda number, data: seen.append((number, data)),
        )
        for number in (1, 2, 3):
            assert await becomes_true(lambda number=number: (1, b"%d\n" % number) in seen)
            await s.files.write(f"heard{number}", "")
        told = await command.wait()
        assert (told.stdout, told.stderr) == ("1\n2\n3\n", "e1\ne2\ne3\n")

    in_sandbox(tmp_path, scenario)
    assert [data for number, data in seen if number == 1] == [b"1\n", b"2\n", b"3\n"]


def test_all_that_was_printed_is_streamed_even_what_is_not_kept(tmp_path: Path) -> None:
    state, total = hashlib.sha256(), 0

    def take(number: int, data: bytes) -> None:
        nonlocal total
        state.update(data)
        total += len(data)

    async def scenario(s: Sandbox) -> str:
        told = await s.commands.run(
            "head -c 30000000 /dev/urandom > /tmp/f; sha256sum < /tmp/f >&2; cat /tmp/f", 300.0,
            limit_bytes=100, on_output=lambda number, data: take(number, data) if number == 1 else None,
        )  # fmt: skip
        assert told.truncated
        return told.stderr[:64]

    assert in_sandbox(tmp_path, scenario) == state.hexdigest()
    assert total == 30_000_000


@pytest.mark.slow
def test_a_slow_listener_slows_the_command_and_fills_no_memory(tmp_path: Path) -> None:
    total = 0

    def take(number: int, data: bytes) -> None:
        nonlocal total
        total += len(data)
        if total < 30 << 20:
            time.sleep(0.002)

    async def scenario(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template())
        server = first_process(backend, sandbox)
        before, most = resident_bytes(server), 0
        task = asyncio.create_task(
            sandbox.commands.run(FLOOD.format(120 << 20), 300.0, limit_bytes=1000, on_output=take)
        )
        while not task.done():
            await asyncio.sleep(0.05)
            most = max(most, resident_bytes(server))
        assert (await task).exit_code == 0
        assert most - before < 24 << 20

    on_backend(tmp_path, scenario)
    assert total == 120 << 20


def test_a_background_command_can_be_followed_fed_and_waited_for(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        seen: list[bytes] = []
        command = await s.commands.start(
            "cat; echo end >&2; exit 3", on_output=lambda number, data: seen.append(data)
        )
        await command.send_stdin("one\n")
        await s.commands.send_stdin(command.pid, b"two\n")
        (shown,) = await s.commands.list()
        assert (shown.pid, shown.running, shown.exit_code) == (command.pid, True, None)
        again = await s.commands.connect(command.pid)
        with pytest.raises(TimeoutError):
            await again.wait(0.1)
        await command.send_stdin("three", close=True)
        with pytest.raises(ToolArgumentError):
            await command.send_stdin("x")
        first, second = await asyncio.gather(command.wait(60.0), again.wait(60.0))
        assert first == second == await command.wait()
        assert (first.stdout, first.stderr, first.exit_code) == ("one\ntwo\nthree", "end\n", 3)
        assert b"".join(seen) == b"one\ntwo\nthreeend\n"
        assert await command.kill() is False
        assert await s.commands.list() == []

    in_sandbox(tmp_path, scenario)


def test_output_that_comes_before_the_process_id_is_not_lost(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        for _ in range(30):
            seen: list[bytes] = []
            command = await s.commands.start(
                "echo early", on_output=lambda number, data, seen=seen: seen.append(data)
            )
            await command.wait(60.0)
            assert b"".join(seen) == b"early\n"

    in_sandbox(tmp_path, scenario)


async def has_ended(sandbox: Sandbox) -> bool:
    """Whether the sandbox's background commands have, as their list tells it."""
    return not any(row.running for row in await sandbox.commands.list())


def test_a_background_command_that_ended_unseen_is_listed_until_it_is_waited_for(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        command = await s.commands.start("echo x; exit 4")
        assert await becomes_true(lambda: has_ended(s))
        assert [(row.pid, row.running, row.exit_code) for row in await s.commands.list()] == [
            (command.pid, False, 4)
        ]
        late = await s.commands.connect(command.pid)
        assert (await late.wait()).stdout == "x\n"
        assert await s.commands.list() == []
        assert (await command.wait()).exit_code == 4
        with pytest.raises(ToolArgumentError):
            await command.send_stdin("x")

    in_sandbox(tmp_path, scenario)


def test_a_wait_that_is_given_up_just_as_the_command_ends_loses_nothing(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        for delay_s in (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05):
            command = await s.commands.start("sleep 0.02; exit 5")
            task = asyncio.create_task(command.wait())
            await asyncio.sleep(delay_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (await command.wait(60.0)).exit_code == 5

    in_sandbox(tmp_path, scenario)


def test_unknown_process_ids_are_refused(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        for operation in (s.commands.connect(4242), s.commands.send_stdin(4242, "x"), s.commands.connect(1)):
            with pytest.raises(ToolArgumentError, match="process id"):
                await operation
        assert await s.commands.kill(4242) is False

    in_sandbox(tmp_path, scenario)


def test_kill_ends_a_background_command_with_all_it_started(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        command = await s.commands.start("sleep 27182 & (sleep 27182 & sleep 27182) & sleep 27182")
        other = await s.commands.start("sleep 31415")
        assert await comes_alive(s, "sleep 27182", 4) and await comes_alive(s, "sleep 31415")
        assert await command.kill() is True
        assert (await command.wait(60.0)).exit_code == -9
        assert [await alive(s, "sleep 27182"), await alive(s, "sleep 31415")] == [0, 1]
        assert await s.commands.kill(other.pid) is True
        assert (await other.wait(60.0)).exit_code == -9

    in_sandbox(tmp_path, scenario)


def test_a_stopped_command_can_be_killed_and_times_out(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        stopped = await s.commands.start("kill -STOP $$; echo never")
        await asyncio.sleep(0.1)
        assert (await s.commands.run("kill -STOP $$", 0.3)).timed_out
        assert await stopped.kill() is True
        assert (await stopped.wait(60.0)).exit_code == -9
        resumed = await s.commands.start("kill -STOP $$; echo on")
        stands = f"grep -q '^State:.T' /proc/{resumed.pid}/status"
        await s.commands.run(f"until {stands}; do sleep 0.02; done; kill -CONT {resumed.pid}")
        assert (await resumed.wait(60.0)).stdout == "on\n"

    in_sandbox(tmp_path, scenario)


def test_a_timeout_of_one_spares_the_families_of_the_others(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        before = await s.commands.start("sleep 31415 & sleep 31415")
        slow = asyncio.create_task(s.commands.run("sleep 27182 & sleep 27182", 0.4))
        await asyncio.sleep(0.1)
        after = await s.commands.start("sleep 14142 & sleep 14142")
        assert (await slow).timed_out
        assert await alive(s, "sleep 27182") == 0
        for word in ("sleep 31415", "sleep 14142"):
            assert await comes_alive(s, word, 2), word
        for command in (before, after):
            await command.kill()

    in_sandbox(tmp_path, scenario)


def test_the_deadline_of_a_background_command_holds_without_a_waiter(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        command = await s.commands.start("echo x; sleep 27182", 0.2)
        assert await becomes_true(lambda: has_ended(s))
        assert await alive(s, "sleep 27182") == 0
        result = await command.wait(60.0)
        assert (result.timed_out, result.stdout, result.exit_code) == (True, "x\n", -9)

    in_sandbox(tmp_path, scenario)


def test_a_daemon_does_not_hold_up_its_command_and_outlives_it(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        daemon = "until [ -e go ]; do sleep 0.02; done; echo late > log"
        told = await s.commands.run(f"(setsid sh -c '{daemon}' &) ; echo x")
        held = await s.commands.run("sleep 31415 & echo y")
        assert (told.stdout, held.stdout) == ("x\n", "y\n")
        assert not told.timed_out and not held.timed_out
        await s.files.write("go", "")
        assert not (await s.commands.run("until grep -s late log; do sleep 0.02; done", 60.0)).timed_out
        assert await comes_alive(s, "sleep 31415")

    in_sandbox(tmp_path, scenario)


def test_a_command_that_closes_its_pipes_is_waited_for_all_the_same(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        told = await s.commands.run("echo x; exec >&- 2>&-; sleep 0.3; exit 6")
        assert (told.stdout, told.exit_code) == ("x\n", 6)
        assert told.duration_s > 0.25
        assert (await s.commands.run("exec >&- 2>&-; sleep 900", 0.2)).timed_out

    in_sandbox(tmp_path, scenario)


def test_cancelled_callers_leave_no_process(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        tasks = [asyncio.create_task(s.commands.run("sleep 27182 & sleep 27182", 60.0)) for _ in range(5)]
        assert await comes_alive(s, "sleep 27182", 10)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await alive(s, "sleep 27182") == 0

    in_sandbox(tmp_path, scenario)


def test_a_fork_bomb_ends_at_its_deadline_and_a_command_beside_it_comes_back(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        beside = asyncio.create_task(s.commands.run("sleep 1.2 & : > begun; wait; echo beside", 60.0))
        await s.commands.run("until [ -e begun ]; do sleep 0.02; done")
        bomb = await s.commands.run("b() { b | b & b; }; b", 0.5)
        assert bomb.timed_out or bomb.exit_code
        await asyncio.sleep(0.1)
        assert (await s.commands.run("echo on", 60.0)).stdout == "on\n"
        result = await beside
        assert result.stdout == "beside\n" or result.exit_code == -9
        await s.final_diff()

        async def are_few() -> bool:
            return int((await s.commands.run("ls -d /proc/[0-9]* | wc -l")).stdout) <= 5

        assert await becomes_true(are_few), "what was killed takes its time to die"

    in_sandbox(tmp_path, scenario)


@pytest.mark.slow
def test_too_much_memory_of_all_commands_together_is_told_to_one_of_them_at_least(tmp_path: Path) -> None:
    hog = "import os, time; x = bytearray(90 << 20)\nwhile not os.path.exists('over'): time.sleep(0.02)"

    async def scenario(s: Sandbox) -> None:
        tasks = [asyncio.create_task(s.commands.run(f'python3 -c "{hog}"', 60.0)) for _ in range(4)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        with contextlib.suppress(SandboxError):  # it may be gone, with all of them
            await s.files.write("over", "")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        ended = [r for r in results if not isinstance(r, BaseException)]
        assert all(
            isinstance(r, SandboxKilledByAgentError) for r in results if isinstance(r, BaseException)
        ), results
        assert not any(result.timed_out for result in ended)
        assert len(ended) < 4 or any(result.exit_code != 0 for result in ended)

    in_sandbox(tmp_path, scenario, resources=Resources(memory_bytes=200 << 20))


def test_a_sandbox_that_dies_is_told_to_everybody_who_waits(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template())
        command = await sandbox.commands.start("sleep 600")
        waits = [
            asyncio.create_task(command.wait()),
            asyncio.create_task(sandbox.commands.run("sleep 600")),
        ]
        await asyncio.sleep(0.2)
        await sandbox.kill()
        results = await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 60.0)
        assert all(isinstance(result, SandboxError) for result in results), results

    on_backend(tmp_path, scenario)


@pytest.mark.slow
def test_hundreds_of_commands_leave_no_descriptor_behind(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template())
        assert await has_processes(backend, 1)

        def count() -> tuple[int, int]:
            return open_descriptors(), open_descriptors(first_process(backend, sandbox))

        async def round_of_commands() -> None:
            await sandbox.commands.run("cat", stdin="x" * 100_000)
            command = await sandbox.commands.start("cat")
            await command.send_stdin("x", close=True)
            await command.wait()
            await (await sandbox.commands.start("sleep 9")).kill()
            await sandbox.commands.run("sleep 9", 0.01)

        await round_of_commands()
        before = count()
        for _ in range(30):
            await round_of_commands()
        # What was killed is closed when it has died.
        assert await becomes_true(lambda: all(now <= then for now, then in zip(count(), before, strict=True)))

    on_backend(tmp_path, scenario)


@given(st.lists(st.binary(min_size=1, max_size=4000), max_size=12), st.integers(0, 3000))
def test_kept_output_is_the_head_and_the_tail(chunks: list[bytes], limit: int) -> None:
    reader, writer = os.pipe()
    output = Output(reader, limit)
    taken = b""
    for chunk in chunks:
        os.write(writer, chunk)
        taken += output.read()
    os.close(writer)
    while not output.ended:
        taken += output.read()
    whole = b"".join(chunks)
    kept = output.pop_data()
    output.close()
    assert taken == whole
    if len(whole) <= limit:
        assert (kept, output.truncated) == (whole, False)
    else:
        tail = limit - limit // 2
        assert (kept, output.truncated) == (whole[: limit // 2] + whole[len(whole) - tail :], True)
