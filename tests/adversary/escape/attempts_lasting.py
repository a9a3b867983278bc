"""Attempts to survive the end of a command, and to race against a copy, a diff or a test run."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from etude.errors import EtudeError, SandboxError
from etude.sandbox.interface import Sandbox
from tests.adversary.escape.model import UNDECIDED_S, Attempt
from tests.adversary.escape.prelude import whole_program
from tests.adversary.escape.trial import Field, until

_BEATING = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
for _ in range(2):
    if os.fork():
        os._exit(0)
    os.setsid()
while True:
    with open("beat", "a") as file:
        file.write("x")
    time.sleep(0.02)
"""
_UNSTOPPABLE = """
# The parent of such a child waits where no signal but SIGKILL is looked at.
if call("clone", 0x4000 | 17, 0, 0, 0, 0) == 0:
    time.sleep(600)
"""
_ORPHANS = """
import os
while True:
    try:
        if os.fork() == 0:
            if os.fork() == 0:
                os._exit(0)
            os._exit(0)
        os.wait()
    except OSError:
        pass
"""
_ALARMS = """
import os, signal
while True:
    for number in (signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1, signal.SIGPIPE, signal.SIGURG):
        os.kill(1, number)
"""
_SHADOWS = """
raise SystemExit("ESCAPED a module of the agent's was imported in the library's place")
"""
_SWAPPED = """
import os
os.mkdir("real")
open("real/passwd", "w").write("mine")
for number in range(400):  # they are gone through between the two looks
    os.mkdir(f"other-{number}")
open("begun", "w").write("x")
while True:
    os.rename("real", "d")
    os.rename("d", "real")
    os.symlink("/etc", "d")
    os.unlink("d")
"""
_ENDLESS = """
import os
os.mkdir("many")
for number in range(500):
    os.symlink("x", f"many/{number}")
while True:
    number += 1
    os.rename(f"many/{number - 500}", f"many/{number}")
"""


async def _beats(sandbox: Sandbox, least: int = 0) -> int:
    """How often the program that beats has done so; at least one more than `least`, if it is alive."""
    for _ in range(50):
        found = [entry.size_bytes for entry in await sandbox.files.list() if entry.path == "beat"]
        if found and found[0] > least:
            return found[0]
        await asyncio.sleep(0.02)
    return least


async def outlive_a_command(field: Field) -> str:
    """A process in a session of its own that ignores signals, left by a command whose time is over."""
    await field.sandbox.files.write("beating.py", _BEATING)
    result = await field.sandbox.commands.run("python3 -S beating.py; sleep 600", timeout_s=4.0)
    assert result.timed_out
    return await _alive_or_not(field.sandbox)


async def outlive_nothing(field: Field) -> str:
    """The same process, left by a command that ended by itself: it may stay."""
    await field.sandbox.files.write("beating.py", _BEATING)
    await field.sandbox.commands.run("python3 -S beating.py")
    return await _alive_or_not(field.sandbox)


async def _alive_or_not(sandbox: Sandbox) -> str:
    so_far = await _beats(sandbox)
    assert so_far, "it never ran"
    once_more = await _beats(sandbox, await _beats(sandbox, so_far))
    return f"ESCAPED {once_more} beats" if once_more > so_far + 1 else f"refused: {so_far} beats"


async def write_after_the_last_diff(field: Field) -> str:
    """What is graded must be what was there at the end: nothing runs any longer once it was taken."""
    await field.sandbox.files.write("beating.py", _BEATING)
    await field.sandbox.commands.run("python3 -S beating.py")
    assert await _beats(field.sandbox), "it never ran"
    await field.sandbox.final_diff()
    return await _alive_or_not(field.sandbox)


async def write_after_a_diff(field: Field) -> str:
    """The same, beside a diff that ends nothing."""
    await field.sandbox.files.write("beating.py", _BEATING)
    await field.sandbox.commands.run("python3 -S beating.py")
    assert await _beats(field.sandbox), "it never ran"
    await field.sandbox.diff()
    return await _alive_or_not(field.sandbox)


async def hold_up_a_copy(field: Field) -> str:
    """A process that does not stop when it is told to: a copy waits for all to stand still."""
    await _leave_unstoppable(field)
    try:
        async with asyncio.timeout(UNDECIDED_S):
            (copy,) = await field.sandbox.fork(1)
    except TimeoutError:
        return "ESCAPED no copy can be made"
    except EtudeError as error:
        return f"refused: {type(error).__name__}"
    if not isinstance(copy, SandboxError):
        await copy.kill()
    return "refused: it was copied"


async def stop_what_does_not(field: Field) -> str:
    """The process is one: asked to stop, it does not."""
    pid = await _leave_unstoppable(field)
    await field.sandbox.commands.run(f"kill -STOP {pid}; sleep 0.2")
    state = (await field.sandbox.commands.run(f"cat /proc/{pid}/stat")).stdout.rpartition(")")[2].split()[0]
    return f"ESCAPED its state is {state}" if state == "D" else f"stopped: {state}"


async def _leave_unstoppable(field: Field) -> int:
    await field.sandbox.files.write("unstoppable.py", whole_program(_UNSTOPPABLE))
    pid = (await field.sandbox.commands.start("exec python3 -S unstoppable.py")).pid

    async def waits() -> bool:
        row = (await field.sandbox.commands.run(f"cat /proc/{pid}/stat")).stdout
        return row.rpartition(")")[2].split()[:1] == ["D"]

    await until(waits, "the process that does not stop")
    return pid


async def storm_of_orphans(field: Field) -> str:
    """Processes by the thousand whose parents are gone: all of them are the first process's to bury."""
    return await _during(field, _ORPHANS)


async def leave_orphans(field: Field) -> str:
    """The same where nobody buries them: there are soon no processes left."""
    body = """
    check(libc.prctl(36, 1, 0, 0, 0), "PR_SET_CHILD_SUBREAPER")
    try:
        for count in range(1000):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if os.fork() == 0 else 0)
            os.waitpid(pid, 0)
    except OSError as error:
        escaped(f"no process is left after {count}: {error}")
    """
    return await field.python(body)


async def storm_of_alarms(field: Field) -> str:
    """Signals that the server has handlers for: its own alarm says that an operation has taken too long."""
    return await _during(field, _ALARMS)


async def _during(field: Field, program: str) -> str:
    """Whether files are read and found while a program runs."""
    await field.sandbox.files.write_many({"storm.py": program, "word.txt": "word\n" * 50_000})
    await field.sandbox.commands.start("python3 -S storm.py")
    await asyncio.sleep(0.5)
    for _ in range(40):
        async with asyncio.timeout(UNDECIDED_S):
            try:
                await field.sandbox.files.grep("word$", "word.txt")
                await field.sandbox.files.read("word.txt")
            except EtudeError as error:
                return f"ESCAPED {type(error).__name__}: {error.message[:100]}"
    return "refused: all was read"


async def shadow_the_library(field: Field) -> str:
    """Modules in the workspace of the names that the runner of tests, and every test, imports."""
    names = ("json", "os", "ast", "sitecustomize", "usercustomize", "conftest", "encodings", "re")
    files = {f"{name}.py": _SHADOWS for name in names}
    files["t.py"] = "import json, re, ast, os\ndef test_a():\n    assert json.loads('[1]') == [1]\n"
    await field.sandbox.files.write_many(dict(files))
    report = await field.sandbox.run_tests(["t.py"], UNDECIDED_S)
    return "refused: the library's" if report.passed == ("test_a",) else f"ESCAPED {report}"


async def shadow_for_a_program(field: Field) -> str:
    """The same, for an interpreter that looks in its directory first."""
    await field.sandbox.files.write("json.py", _SHADOWS)
    result = await field.sandbox.commands.run("python3 -S -c 'import json'", timeout_s=UNDECIDED_S)
    return result.stderr


async def swap_while_a_diff_is_taken(field: Field) -> str:
    """A directory that is a link out of the workspace whenever the diff looks twice."""
    await field.sandbox.files.write("swapping.py", _SWAPPED)
    await field.sandbox.commands.start("python3 -S swapping.py")

    async def has_begun() -> bool:
        return any(entry.path == "begun" for entry in await field.sandbox.files.list())

    await until(has_begun, "the program that swaps directories")
    num_refused = 0
    for _ in range(200):
        try:
            for path, data in (await field.sandbox.diff()).items():
                if path.endswith("passwd") and data not in (b"mine", b""):
                    return f"ESCAPED {path} of the root: {data!r:.60}"
        except EtudeError:
            num_refused += 1
    return f"refused: {num_refused} of 200 diffs"


async def list_without_end(field: Field) -> str:
    """A directory whose names move on to its end faster than it is listed."""
    await field.sandbox.files.write("endless.py", _ENDLESS)
    await field.sandbox.commands.start("python3 -S endless.py")
    await asyncio.sleep(1.0)
    for _ in range(5):
        try:
            async with asyncio.timeout(UNDECIDED_S):
                await field.sandbox.files.list("many")
        except TimeoutError:
            return "ESCAPED it is listed without end"
        except EtudeError as error:
            return f"refused: {type(error).__name__}"
    return "refused: it was listed"


async def move_on(field: Field) -> str:
    """The directory is one: none of its names is there the second time."""
    await field.sandbox.files.write("endless.py", _ENDLESS)
    await field.sandbox.commands.start("python3 -S endless.py")
    seen = [(await field.sandbox.commands.run("sleep 0.5; ls -f many")).stdout.split() for _ in range(2)]
    both = {name for name in seen[0] if name in seen[1]} - {".", ".."}
    return "ESCAPED no name stays" if seen[0] and not both else f"{len(both)} names stay"


async def read_a_pipe(field: Field) -> str:
    """A name that has nobody at its other end: whoever opens it waits."""
    await field.sandbox.commands.run("mkfifo a.py; mkdir d; mkfifo d/b.py")
    said = []
    try:
        async with asyncio.timeout(UNDECIDED_S):
            for act in (
                field.sandbox.files.read("a.py"), field.sandbox.files.write("a.py", "x"),
                field.sandbox.files.grep("x"), field.sandbox.diff(), field.sandbox.run_tests(["a.py"], 2.0),
            ):  # fmt: skip
                try:
                    await act
                    said.append("done")
                except EtudeError as error:
                    said.append(type(error).__name__)
    except TimeoutError:
        return f"ESCAPED it waits for ever, after {said}"
    return f"refused: {said}"


async def wait_for_a_pipe(field: Field) -> str:
    """A program that opens it does wait."""
    result = await field.sandbox.commands.run("mkfifo p; cat p", timeout_s=0.5)
    return "ESCAPED it waits" if result.timed_out else "it does not wait"


async def inflate_a_download(field: Field) -> str:
    """Sparse files: nothing on the sandbox's disk, and gigabytes where they are brought to."""
    size = 32 << 20
    made = await field.sandbox.commands.run(
        f"i=0; while [ $i -lt 40 ]; do truncate -s {size} sparse-$i || exit 1; i=$((i+1)); done"
    )
    assert made.exit_code == 0, made
    target = field.directory / "target"
    bringing = asyncio.ensure_future(field.sandbox.files.download(".", target))
    try:
        while not bringing.done():
            if _bytes_below(target) > 3 * size:
                return f"ESCAPED {_bytes_below(target) >> 20} MiB on the host, of a disk of 8 MiB"
            await asyncio.sleep(0.02)
        await bringing
    except EtudeError as error:
        return f"refused: {type(error).__name__}: {error.message[:100]}"
    finally:
        bringing.cancel()
        await asyncio.wait([bringing])
    return f"refused: {_bytes_below(target) >> 20} MiB"


def _bytes_below(directory: Path) -> int:
    return sum(
        os.lstat(Path(folder) / name).st_blocks * 512
        for folder, _, names in os.walk(directory)
        for name in names
        if (Path(folder) / name).exists()
    )


LASTING = [
    Attempt(
        "outlive the time of its command",
        "whatever a command started ends with its time",
        (),
        scenario=outlive_a_command,
        control=outlive_nothing,
    ),
    Attempt(
        "write after the last diff",
        "everything ends before the diff that is graded",
        (),
        scenario=write_after_the_last_diff,
        control=write_after_a_diff,
    ),
    Attempt(
        "hold up a copy",
        "standing still is waited for a while",
        (),
        scenario=hold_up_a_copy,
        control=stop_what_does_not,
        reach="shared kernel",
    ),
    Attempt(
        "bury the server in orphans",
        "orphans are reaped many at a time",
        (),
        scenario=storm_of_orphans,
        control=leave_orphans,
        reach="shared kernel",
    ),
    Attempt(
        "cut operations short by alarms",
        "an alarm counts when time is over, and other signals never",
        ("alarms checked",),
        scenario=storm_of_alarms,
        reach="shared kernel",
    ),
    Attempt(
        "shadow the library of the test runner",
        "modules of the standard library are never looked for in the workspace",
        (),
        scenario=shadow_the_library,
        control=shadow_for_a_program,
    ),
    Attempt(
        "swap a directory while a diff is taken",
        "files are opened beneath the workspace only",
        ("opened beneath the workspace",),
        scenario=swap_while_a_diff_is_taken,
    ),
    Attempt(
        "move names on while they are listed",
        "listings end at a number of entries",
        (),
        scenario=list_without_end,
        control=move_on,
    ),
    Attempt(
        "have the owner wait for a pipe",
        "files are opened without waiting, and only regular ones are read",
        (),
        scenario=read_a_pipe,
        control=wait_for_a_pipe,
    ),
    Attempt(
        "inflate a download",
        "what is brought to the host is bounded as a whole",
        ("size of downloads bounded",),
        scenario=inflate_a_download,
    ),
]
