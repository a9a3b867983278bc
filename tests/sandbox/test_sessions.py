"""Shell sessions: what a shell keeps between commands, and what ends it."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import time
from pathlib import Path

import pytest

from etude.errors import ToolArgumentError
from etude.sandbox.errors import PathMissingError, PathOutsideError, SessionClosedError
from etude.sandbox.inside.jobs import ChildLimits, program_child
from etude.sandbox.inside.processes import Process
from etude.sandbox.inside.shells import Shell
from etude.sandbox.interface import Sandbox
from etude.sandbox.types import CommandResult
from tests.sandbox.scenes import alive, comes_alive, in_sandbox


async def say(sandbox: Sandbox, session: str, *commands: str) -> list[CommandResult]:
    return [await sandbox.run_in_session(session, command, 60.0) for command in commands]


def test_directory_variables_functions_and_options_last(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        await say(
            s, session, "mkdir -p a/b && cd a/b", "x=1; export Y=2", 'f() { echo "f $1"; }', "set -o noglob"
        )
        (told,) = await say(
            s, session, "pwd; echo $x $Y *; f 3; python3 -c 'import os; print(os.environ[\"Y\"])'"
        )
        assert told.stdout == "/workspace/a/b\n1 2 *\nf 3\n2\n"

    in_sandbox(tmp_path, scenario)


def test_a_session_begins_where_and_with_what_it_was_told(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session("deep/er", {"WORD": "x y"})
        (told,) = await say(s, session, 'pwd; echo "$WORD"')
        assert told.stdout == "/workspace/deep/er\nx y\n"
        with pytest.raises(PathMissingError):
            await s.create_session("none")
        with pytest.raises(PathOutsideError):
            await s.create_session("../..")

    in_sandbox(tmp_path, scenario, {"deep/er/f": ""})


def test_statuses_and_both_streams_are_told(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        results = await say(
            s, session, "true", "false", "(exit 7)", "echo out; echo err >&2", "nonsuch",
            "sh -c 'kill -KILL $$'", "",
        )  # fmt: skip
        codes = [result.exit_code for result in results]
        assert codes == [0, 1, 7, 0, 127, -9, 0]
        assert (results[3].stdout, results[3].stderr) == ("out\n", "err\n")
        assert "nonsuch" in results[4].stderr

    in_sandbox(tmp_path, scenario)


def test_a_signal_that_ended_a_command_is_told_as_everywhere_else(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> list[int]:
        session = await s.create_session()
        cmd = "sh -c 'kill -TERM $$'; (exit $?)"
        ran = await s.commands.run("kill -TERM $$")
        return [ran.exit_code, *(result.exit_code for result in await say(s, session, cmd))]

    assert in_sandbox(tmp_path, scenario) == [-15, -15]


def test_standard_input_is_empty(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        results = await say(
            s, session, "cat; echo end", "read line || echo nothing", "python3 -c 'input()'", "echo on"
        )
        assert [result.stdout for result in results] == ["end\n", "nothing\n", "", "on\n"]
        assert "EOFError" in results[2].stderr

    in_sandbox(tmp_path, scenario)


MISTAKES = ["if", "echo 'x", "for do", "f() {", "echo $(", ")", "cat <<E", "case", "\\"]


def test_syntax_errors_do_not_end_a_session(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        for mistake in MISTAKES:
            _, after = await say(s, session, mistake, "echo on")
            assert (after.stdout, after.exit_code) == ("on\n", 0), mistake

    in_sandbox(tmp_path, scenario)


def test_exit_closes_a_session_with_its_code(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        (last,) = await say(s, session, "echo bye; exit 3")
        assert (last.exit_code, last.stdout, last.timed_out) == (3, "bye\n", False)
        for _ in range(2):
            with pytest.raises(SessionClosedError) as raised:
                await s.run_in_session(session, "true")
            assert (raised.value.field, raised.value.received) == ("session", session)
        await s.close_session(session)

    in_sandbox(tmp_path, scenario)


def test_a_shell_that_is_replaced_or_killed_closes_its_session(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        for command, code in (
            ("exec true", 0),
            ("kill -KILL $$", -9),
            ("set -e; false", 1),
            ("exec sh -c 'exit 4'", 4),
        ):
            session = await s.create_session()
            (last,) = await say(s, session, command)
            assert last.exit_code == code, command
            with pytest.raises(SessionClosedError):
                await s.run_in_session(session, "true")

    in_sandbox(tmp_path, scenario)


def test_unknown_sessions_are_closed_ones_and_leave_no_lock_behind(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        before = _count_locks()
        for number in range(50):
            with pytest.raises(SessionClosedError, match="ended, or never began") as raised:
                await s.run_in_session(f"invented-{number}", "true")
            assert (raised.value.field, raised.value.received) == ("session", f"invented-{number}")
        await s.close_session("session-99")
        assert _count_locks() - before < 10

    in_sandbox(tmp_path, scenario)


def _count_locks() -> int:
    gc.collect()
    return sum(isinstance(found, asyncio.Lock) for found in gc.get_objects())


@pytest.mark.parametrize(
    ("cwd", "env", "field"), [(".", {"A": "x\0y"}, None), (".", {"A=B": "x"}, None), ("nowhere", {}, "path")]
)
def test_a_session_that_cannot_begin_names_what_is_wrong(
    tmp_path: Path, cwd: str | None, env: dict[str, str], field: str | None
) -> None:
    async def scenario(s: Sandbox) -> None:
        with pytest.raises(ToolArgumentError) as raised:
            await s.create_session(cwd, env)
        assert raised.value.field == field

    in_sandbox(tmp_path, scenario)


def test_a_timeout_kills_the_command_and_the_shell_survives(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        await say(s, session, "x=kept; sleep 31415 &")
        hung = await s.run_in_session(session, "echo before; sleep 27182", 0.3)
        assert (hung.timed_out, hung.exit_code, hung.stdout) == (True, -9, "before\n")
        (after,) = await say(s, session, "echo $x")
        assert (after.stdout, after.timed_out) == ("kept\n", False)
        assert await alive(s, "sleep 27182") == 0
        assert await comes_alive(s, "sleep 31415")

    in_sandbox(tmp_path, scenario)


@pytest.mark.slow
def test_a_shell_that_itself_hangs_is_killed(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        hung = await s.run_in_session(session, "while :; do :; done", 0.3)
        assert (hung.timed_out, hung.exit_code) == (True, -9)
        with pytest.raises(SessionClosedError):
            await s.run_in_session(session, "true")

    in_sandbox(tmp_path, scenario)


GO = "until [ -e go ]; do sleep 0.02; done"


async def let_go(sandbox: Sandbox) -> None:
    """Lets go on what waits by `GO`, until it has told."""
    await sandbox.files.write("go", "")
    assert not (await sandbox.commands.run("until [ -e told ]; do sleep 0.02; done", 60.0)).timed_out


def test_what_is_printed_between_commands_counts_to_the_next(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        first, _ = await say(s, session, f"({GO}; echo late; : > told) & echo now", "true")
        assert first.stdout == "now\n"
        await let_go(s)
        (after,) = await say(s, session, "echo own")
        assert after.stdout == "late\nown\n"

    in_sandbox(tmp_path, scenario)


def test_a_flood_between_commands_is_bounded_and_told(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        flood = f"({GO}; head -c 3000000 /dev/zero | tr '\\0' x; : > told) &"
        await s.run_in_session(session, flood, 60.0, 8 << 20)
        await let_go(s)
        after = await s.run_in_session(session, "echo end", 60.0, 8 << 20)
        assert after.truncated
        assert len(after.stdout) < 300_000
        assert after.stdout.endswith("end\n")
        assert not (await s.run_in_session(session, "echo x")).truncated

    in_sandbox(tmp_path, scenario)


def test_megabytes_of_output_keep_head_and_tail(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> CommandResult:
        session = await s.create_session()
        return await s.run_in_session(session, "echo first; seq 400000; echo last", 20.0, 1000)

    flood = in_sandbox(tmp_path, scenario)
    assert (flood.truncated, len(flood.stdout)) == (True, 1000)
    assert flood.stdout.startswith("first\n1\n2\n")
    assert flood.stdout.endswith("400000\nlast\n")


def test_binary_output_does_not_disturb(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        binary, after = await say(
            s, session, "head -c 5000 /dev/urandom; printf '\\0\\377\\n0 1\\n'", "echo on"
        )
        assert binary.stdout.endswith("\0\ufffd\n0 1\n")
        assert after.stdout == "on\n"

    in_sandbox(tmp_path, scenario)


STATUS_PIPE = "/proc/$$/fd/11"
"""Where the shell keeps its status descriptor while a command runs."""


def test_a_forged_status_is_no_status(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        forged, after, last = await say(
            s,
            session,
            f"echo 5 >&3; echo 5 > {STATUS_PIPE} && echo forged; printf 6 > {STATUS_PIPE};"
            "sleep 0.1; echo done",
            "echo on",
            "false",
        )
        assert forged.stdout == "forged\ndone\n"
        assert (after.stdout, after.exit_code) == ("on\n", 0)
        assert last.exit_code == 1

    in_sandbox(tmp_path, scenario)


@pytest.mark.slow
def test_a_flood_of_forged_statuses_ends_at_the_deadline(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        flooded = await s.run_in_session(session, f"cat /dev/zero > {STATUS_PIPE}", 1.0)
        assert flooded.timed_out
        (after,) = await say(s, session, "echo on")
        assert after.stdout == "on\n"

    in_sandbox(tmp_path, scenario)


def test_shell_functions_do_not_stand_in_for_the_status(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        results = await say(
            s, session, "printf() { echo mine; }; eval() { echo other; }", "echo on", "set -x", "false"
        )
        assert (results[1].stdout, results[1].exit_code) == ("on\n", 0)
        assert results[3].exit_code == 1

    in_sandbox(tmp_path, scenario)


def test_commands_of_any_length_and_any_bytes_get_through(tmp_path: Path) -> None:
    text = "".join(f"line {i} 'quoted' \"twice\" $x \\ ü\n" for i in range(12_000))

    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        long, after = await say(s, session, f"cat > big <<'END'\n{text}END\n", "wc -l < big")
        assert (long.exit_code, long.stderr) == (0, "")
        assert after.stdout.split() == ["12000"]
        assert (await s.files.read("big", 1 << 22)).decode() == text

    in_sandbox(tmp_path, scenario)


def test_sessions_run_side_by_side_and_share_nothing(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        one, two = await s.create_session(), await s.create_session()
        assert one != two
        meet = ": > {}; until [ -e {} ]; do sleep 0.02; done"
        here, there = meet.format("a", "b"), meet.format("b", "a")
        results = await asyncio.gather(say(s, one, f"x=1; {here}; cd /tmp"), say(s, two, f"x=2; {there}"))
        assert not any(row.timed_out for (row,) in results), "each waits for the other"
        first, second = await asyncio.gather(say(s, one, "echo $x; pwd"), say(s, two, "echo $x; pwd"))
        assert (first[0].stdout, second[0].stdout) == ("1\n/tmp\n", "2\n/workspace\n")

    in_sandbox(tmp_path, scenario)


def test_a_timeout_in_one_session_spares_the_others_and_the_commands(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        one, two = await s.create_session(), await s.create_session()
        other = asyncio.create_task(s.run_in_session(two, f"{GO}; echo two", 60.0))
        command = asyncio.create_task(s.commands.run(f"{GO}; echo command", 60.0))
        await asyncio.sleep(0.1)
        assert (await s.run_in_session(one, "sleep 27182", 0.3)).timed_out
        await s.files.write("go", "")
        assert [(await task).stdout for task in (other, command)] == ["two\n", "command\n"]

    in_sandbox(tmp_path, scenario)


def test_commands_of_one_session_queue(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        await asyncio.gather(*(say(s, session, f"sleep 0.05; echo {i} >> log") for i in range(5)))
        assert (await s.files.read("log")).decode().split() == ["0", "1", "2", "3", "4"]

    in_sandbox(tmp_path, scenario)


def test_a_cancelled_command_ends_and_the_next_one_runs(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        await say(s, session, "x=kept")
        task = asyncio.create_task(s.run_in_session(session, "sleep 27182", 60.0))
        assert await comes_alive(s, "sleep 27182")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        results = await asyncio.gather(say(s, session, "echo $x"), say(s, session, "echo again"))
        assert [rows[0].stdout for rows in results] == ["kept\n", "again\n"]
        assert await alive(s, "sleep 27182") == 0

    in_sandbox(tmp_path, scenario)


def test_a_command_that_comes_after_a_cancelled_one_has_ended_runs(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        for _ in range(2):
            task = asyncio.create_task(s.run_in_session(session, "sleep 27182", 20.0))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0.3)  # time enough for it to end
            assert await comes_alive(s, "sleep 27182", 0)
            async with asyncio.timeout(60.0):
                (after,) = await say(s, session, "echo on")
            assert after.stdout == "on\n"

    in_sandbox(tmp_path, scenario)


@pytest.mark.slow
def test_what_queued_behind_a_cancelled_command_that_hangs_hears_of_the_end(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        task = asyncio.create_task(s.run_in_session(session, "while :; do :; done", 20.0))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(SessionClosedError):
            await s.run_in_session(session, "echo never", 20.0)

    in_sandbox(tmp_path, scenario)


def test_close_kills_the_shell_and_its_jobs(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        await say(s, session, "sleep 27182 & (sleep 27182 &) ; sh -c 'sleep 27182 & sleep 27182 &'; true")
        assert await comes_alive(s, "sleep 27182", 4)
        running = asyncio.create_task(s.run_in_session(session, "sleep 31415", 60.0))
        await asyncio.sleep(0.1)
        await s.close_session(session)
        assert (await running).exit_code == -9
        assert await alive(s, "sleep 27182") == 0
        with pytest.raises(SessionClosedError):
            await s.run_in_session(session, "true")

    in_sandbox(tmp_path, scenario)


@pytest.mark.slow
def test_many_sessions_leave_no_descriptor(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        for _ in range(80):
            session = await s.create_session()
            await s.run_in_session(session, "true")
            await s.close_session(session)
        many = [await s.create_session() for _ in range(30)]
        results = await asyncio.gather(*(s.run_in_session(session, "echo on") for session in many))
        assert {result.stdout for result in results} == {"on\n"}

    in_sandbox(tmp_path, scenario)


def with_plain_shell(*commands: str) -> list[tuple[int, str, bool]]:
    """(exit code, output, whether the shell has ended) of commands in a session of /bin/sh."""
    poll = select.poll()
    child = program_child(["/bin/sh"], {"PATH": "/usr/bin:/bin"}, "/", ChildLimits(1 << 30, 10))
    shell = Shell("s", child, poll)
    poll.register(shell.job.watch, select.POLLIN)
    told: list[tuple[int, str, bool]] = []
    try:
        for number, command in enumerate(commands, 1):
            shell.run(number, command, 60.0, 1000, {})
            answer = None
            while answer is None:
                ready = [descriptor for descriptor, _ in poll.poll(60_000)]
                assert ready, "the shell does not answer"
                for descriptor in ready:
                    shell.on_ready(descriptor)
                ended = os.waitpid(shell.job.pid, os.WNOHANG)[1] if shell.job.watch in ready else None
                answer = shell.settle(None if ended is None else os.waitstatus_to_exitcode(ended))
            told.append((answer[0]["exit_code"], answer[1].decode(), answer[0]["closed"]))
    finally:
        if not told or not told[-1][2]:
            os.kill(shell.job.pid, signal.SIGKILL)
            os.waitpid(shell.job.pid, 0)
        shell.close()
    return told


@pytest.mark.parametrize(
    ("state", "processor_s", "due"),
    [("R", 0.5, ""), ("D", 0.5, ""), ("S", 0.5, "shell"), ("R", 5.0, "shell")],
)
def test_a_shell_that_waits_for_a_processor_is_not_killed_for_its_silence(
    state: str, processor_s: float, due: str
) -> None:
    child = program_child(["/bin/sh"], {"PATH": "/usr/bin:/bin"}, "/", ChildLimits(1 << 30, 10))
    shell = Shell("s", child, select.poll())
    pid, now_s = shell.job.pid, time.monotonic()
    try:
        shell.run(1, "kill -STOP $$", 1.0, 1000, {})
        assert shell.expire({pid: Process(1, pid, "S", 0.1)}, now_s + 100.0) == "command"
        assert shell.expire({pid: Process(1, pid, state, processor_s)}, now_s + 110.0) == due
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        shell.close()


def test_without_bash_a_plain_shell_serves() -> None:
    told = with_plain_shell("x=1; cd /usr", "f() { echo $x; pwd; }", "f", "cat; false", "exit 3")
    assert told == [(0, "", False), (0, "", False), (0, "1\n/usr\n", False), (1, "", False), (3, "", True)]


def test_a_plain_shell_ends_at_a_syntax_error_and_says_so() -> None:
    ((code, _, _),) = with_plain_shell("if")
    assert code == 2


def test_two_commands_at_once_in_one_session_are_refused_by_the_server(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        task = asyncio.create_task(s.run_in_session(session, f"{GO}; echo one", 60.0))
        await asyncio.sleep(0.1)
        header = {"op": "shell.run", "session": session, "cmd": "true", "timeout_s": 1.0, "limit_bytes": 10}
        with pytest.raises(ToolArgumentError, match="another command"):
            await s.job(header)  # pyright: ignore[reportAttributeAccessIssue]
        await s.files.write("go", "")
        assert (await task).stdout == "one\n"

    in_sandbox(tmp_path, scenario)


@pytest.mark.parametrize("cmd", ["echo \ud800", "echo a\0b"])
def test_a_command_that_is_no_text_is_refused_and_the_session_goes_on(tmp_path: Path, cmd: str) -> None:
    async def scenario(s: Sandbox) -> None:
        session = await s.create_session()
        with pytest.raises(ToolArgumentError):
            await s.run_in_session(session, cmd, 60.0)
        (result,) = await say(s, session, "echo on")
        assert result.stdout == "on\n"

    in_sandbox(tmp_path, scenario)
