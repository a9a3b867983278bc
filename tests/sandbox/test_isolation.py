"""What a hostile process in a local sandbox can and cannot do, in addition to the escape suite."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from etude.errors import ToolArgumentError
from etude.sandbox.errors import DiskFullError, PathKindError, PathOutsideError
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.template import Template
from etude.sandbox.types import CommandResult, Resources, TestReport
from tests.sandbox.backends import with_backend, with_sandbox
from tests.sandbox.scenes import becomes_true, comes_alive

PATIENT_S = 60.0


def output(command: str, timeout_s: float = PATIENT_S) -> CommandResult:
    """Result of one command in a new sandbox."""

    async def scenario(s: Sandbox) -> CommandResult:
        return await s.commands.run(command, timeout_s=timeout_s)

    return with_sandbox("local", {}, scenario)


def python(code: str) -> CommandResult:
    """Result of a Python program in a new sandbox."""

    async def scenario(s: Sandbox) -> CommandResult:
        return await s.commands.run("python3 -S p.py", timeout_s=PATIENT_S)

    return with_sandbox("local", {"p.py": code}, scenario)


def test_programs_trust_whom_the_host_trusts() -> None:
    shown = output("ls /etc/ssl/certs").stdout.split()
    place = Path("/etc/ssl/certs")
    assert shown == (sorted(path.name for path in place.iterdir()) if place.is_dir() else [])


async def has_no_sleeper(sandbox: Sandbox, words: str = "sleep") -> bool:
    """Whether no command line of the sandbox comes to hold the words: what was killed takes time to die."""

    async def holds() -> bool:
        return words not in (await sandbox.commands.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout

    return await becomes_true(holds)


def test_programs_are_read_only() -> None:
    result = output("touch /usr/x /etc/x /dev/x /x; echo x > /etc/passwd; mkdir /root/x")
    assert result.stderr.count("Read-only file system") == 6


def test_a_process_may_lock_files_and_an_open_file_may_not() -> None:
    code = """
import errno, fcntl, struct
file, row = open("file", "w"), struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 1, 0)
fcntl.fcntl(file, fcntl.F_SETLK, row)
for command in (36, 37, 38):
    try:
        fcntl.fcntl(file, command, row)
        print("locked")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
    assert python(code).stdout.split() == ["EINVAL"] * 3


def test_programs_reach_each_other_over_the_loopback() -> None:
    code = """
import socket
server = socket.socket(); server.bind(("127.0.0.1", 0)); server.listen()
client = socket.create_connection(server.getsockname(), 2)
client.sendall(b"hello")
print(server.accept()[0].recv(5))
"""
    assert python(code).stdout == "b'hello'\n"


def test_xdp_sockets_are_refused() -> None:
    code = """
import socket
try:
    socket.socket(44, socket.SOCK_RAW)
    print("open")
except OSError as error:
    print(error.errno)
"""
    assert python(code).stdout == "97\n"


UNKNOWN = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for number in (0x40000000 + 39, 999):
    print(libc.syscall(number), ctypes.get_errno())
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="call numbers of x86_64")
def test_calls_of_other_numbers_and_of_later_kernels_do_not_exist() -> None:
    assert python(UNKNOWN).stdout == "-1 38\n" * 2


def test_no_capability_is_left_and_none_can_be_gained() -> None:
    status = output("cat /proc/self/status").stdout
    for field in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert f"{field}:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status
    assert "Uid:\t1000\t1000\t1000\t1000" in status


def test_a_fork_bomb_is_bounded_and_the_sandbox_goes_on() -> None:
    async def scenario(s: Sandbox) -> tuple[CommandResult, CommandResult, TestReport]:
        # One process, then exec: the shell itself must go on where no further one can be made.
        bomb = await s.commands.run("bomb() { bomb | bomb & }; bomb & exec sleep 300", timeout_s=0.5)
        after = await s.commands.run("echo alive", timeout_s=PATIENT_S)
        return bomb, after, await s.run_tests(["t.py"], PATIENT_S)

    bomb, after, report = with_sandbox("local", {"t.py": "def test_a(): pass\n"}, scenario)
    assert bomb.timed_out
    assert after.stdout == "alive\n"
    assert report.passed == ("test_a",)


def test_a_bomb_left_in_the_background_does_not_stop_test_runs() -> None:
    async def scenario(s: Sandbox) -> TestReport:
        await s.commands.run("for i in $(seq 100); do sleep 100 & done >/dev/null 2>&1", timeout_s=1.0)
        await s.commands.run("for i in $(seq 100); do (sleep 100 &) ; done >/dev/null 2>&1", timeout_s=1.0)
        return await s.run_tests(["t.py"], PATIENT_S)

    assert with_sandbox("local", {"t.py": "def test_a(): pass\n"}, scenario).passed == ("test_a",)


def test_what_the_owner_writes_is_bounded_as_well() -> None:
    async def scenario(backend: SandboxBackend) -> None:
        small = await backend.create(Template({}), Resources(disk_bytes=4 << 20, file_bytes=64 << 20))
        await small.commands.run("head -c 20000000 /dev/zero > /dev/shm/big")
        with pytest.raises(DiskFullError):
            await small.files.write("more", b"x" * 1_000_000)
        short = await backend.create(Template({}), Resources(file_bytes=1 << 20))
        with pytest.raises(DiskFullError):
            await short.files.write("big", b"x" * (2 << 20))

    with_backend("local", scenario)


def test_too_much_memory_ends_a_command_with_a_word_and_the_sandbox_goes_on() -> None:
    async def scenario(backend: SandboxBackend) -> list[CommandResult]:
        s = await backend.create(Template({}), Resources(memory_bytes=96 << 20))
        hold = "x = bytearray(60 << 20); import time; time.sleep(300)"
        four = f"for i in 1 2 3 4; do python3 -S -c '{hold}' & done; wait"
        many = await s.commands.run(four, timeout_s=PATIENT_S)
        return [many, await s.commands.run("echo alive")]

    many, after = with_backend("local", scenario)
    assert "memory limit exceeded" in many.stderr
    assert not many.timed_out
    assert after.stdout == "alive\n"


def test_an_output_flood_is_bounded_and_keeps_head_and_tail() -> None:
    async def scenario(s: Sandbox) -> CommandResult:
        return await s.commands.run("echo first; seq 1 400000; echo last", limit_bytes=10_000)

    result = with_sandbox("local", {}, scenario)
    assert result.truncated
    assert len(result.stdout) == 10_000
    assert result.stdout.startswith("first\n")
    assert result.stdout.endswith("last\n")


def test_a_timeout_kills_everything_that_the_command_started() -> None:
    async def scenario(s: Sandbox) -> None:
        hide = "setsid sh -c 'sleep 300 & sleep 301' & (sleep 302 &); sleep 303"
        result = await s.commands.run(hide, timeout_s=0.2)
        assert result.timed_out
        assert await has_no_sleeper(s)

    with_sandbox("local", {}, scenario)


def test_a_background_process_does_not_hold_up_its_command() -> None:
    async def scenario(s: Sandbox) -> None:
        result = await s.commands.run("sleep 300 & echo started")
        assert (result.stdout, result.timed_out) == ("started\n", False)
        assert await comes_alive(s, "sleep 300")

    with_sandbox("local", {}, scenario)


def test_background_processes_survive_the_timeout_of_another_command() -> None:
    async def scenario(s: Sandbox) -> None:
        await s.commands.run("sleep 300 >/dev/null 2>&1 &")
        assert (await s.commands.run("sleep 200", timeout_s=0.1)).timed_out
        assert (await s.run_tests(["t.py"])).passed
        assert await comes_alive(s, "sleep 300")
        assert await has_no_sleeper(s, "sleep 200")

    with_sandbox("local", {"t.py": "def test_a(): pass\n"}, scenario)


def test_signals_for_which_the_server_has_handlers_do_not_end_it() -> None:
    async def scenario(s: Sandbox) -> str:
        for name in ("INT", "ALRM", "USR1", "PIPE", "CHLD", "KILL"):
            await s.commands.run(f"kill -{name} 1; kill -{name} -1")
        return (await s.commands.run("echo alive")).stdout

    assert with_sandbox("local", {}, scenario) == "alive\n"


def test_a_test_run_that_kills_or_exits_ends_only_itself() -> None:
    async def scenario(s: Sandbox) -> list[TestReport]:
        reports: list[TestReport] = []
        for body in ("os._exit(0)", "os.kill(os.getpid(), 9)", "os.kill(1, 9); os.kill(-1, 9)", "os.abort()"):
            await s.files.write("t.py", f"import os\ndef test_a():\n    {body}\n")
            reports.append(await s.run_tests(["t.py"]))
        return reports

    errors = [report.error for report in with_sandbox("local", {}, scenario)]
    assert errors[2] is None, "kill(-1) spares its caller"
    assert [errors[0], errors[1], errors[3]] == [
        f"the test run ended early: exit code {code}" for code in (0, -9, -6)
    ]


def test_no_descriptor_of_the_server_leaks() -> None:
    listing = "import os\ndef test_a():\n    names = os.listdir('/proc/self/fd')\n    assert names == 1\n"

    async def scenario(s: Sandbox) -> tuple[str, TestReport]:
        return (await s.commands.run("ls /proc/self/fd")).stdout, await s.run_tests(["t.py"])

    command, report = with_sandbox("local", {"t.py": listing}, scenario)
    # 3 is the directory that is being listed; in a test run 3 is the result's pipe, and 4 the directory.
    assert command.split() == ["0", "1", "2", "3"]
    assert report.failed[0].message == "['0', '1', '2', '3', '4'] != 1"


def test_links_and_special_files_do_not_fool_the_file_operations() -> None:
    async def scenario(s: Sandbox) -> None:
        await s.commands.run(
            "ln -s /etc/passwd out; ln -s /etc outdir; ln -s loop loop; ln -s a.txt in; mkfifo pipe"
        )
        assert await s.files.read("in") == b"a"
        for path in ("out", "outdir/passwd", "loop"):
            with pytest.raises(PathOutsideError):
                await s.files.read(path)
        with pytest.raises(PathOutsideError):
            await s.files.write("outdir/new", "x")
        for attempt in (s.files.read("pipe"), s.files.write("pipe", "x")):
            with pytest.raises(PathKindError):
                await asyncio.wait_for(attempt, PATIENT_S)
        kinds = {entry.path: entry.kind for entry in await s.files.list(".")}
        assert (kinds["out"], kinds["pipe"], kinds["a.txt"]) == ("symlink", "other", "file")
        await s.files.remove("outdir")
        assert (await s.commands.run("cat /etc/passwd")).exit_code == 0

    with_sandbox("local", {"a.txt": "a"}, scenario)


def test_a_diff_carries_regular_files_only() -> None:
    async def scenario(s: Sandbox) -> dict[str, bytes | None]:
        await s.commands.run(
            "rm a.txt; ln -s /etc/passwd a.txt; mkfifo pipe; ln -s b.txt link; echo new > c.txt; touch b.txt"
        )
        return dict(await s.diff())

    assert with_sandbox("local", {"a.txt": "a", "b.txt": "b"}, scenario) == {"a.txt": None, "c.txt": b"new\n"}


@pytest.mark.slow
def test_a_search_that_takes_too_long_is_the_agents_mistake() -> None:
    async def scenario(s: Sandbox) -> None:
        with pytest.raises(ToolArgumentError, match="took too long"):
            await s.files.grep("(a+)+$")
        assert await s.files.read("a.txt", 1) == b"a"

    with_sandbox("local", {"a.txt": "a" * 40 + "b"}, scenario)


def test_two_sandboxes_of_one_template_have_temporary_files_of_their_own() -> None:
    async def scenario(backend: SandboxBackend) -> str:
        template = Template({"a.txt": "a"})
        one, two = await backend.create(template), await backend.create(template)
        await one.commands.run("echo x > /tmp/x; echo x > /dev/shm/x")
        return (await two.commands.run("ls /tmp /dev/shm")).stdout

    assert with_backend("local", scenario).split() == ["/dev/shm:", "/tmp:"]
