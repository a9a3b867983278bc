"""Attempts to observe or reach a neighbour through shared resources: programs, reused memory."""

from __future__ import annotations

import re

from etude.sandbox.interface import Sandbox
from etude.sandbox.template import Template
from tests.adversary.escape.model import UNDECIDED_S, Attempt
from tests.adversary.escape.prelude import whole_program
from tests.adversary.escape.trial import Field, until

_PROGRAM = "/usr/bin/env"
_NUM_LATE = 4
"""Sandboxes may have been begun ahead: of so many one was not."""
_WATCH = f"""
watcher = check(libc.inotify_init1(0x800))
check(libc.inotify_add_watch(watcher, b"{_PROGRAM}", 0x20))
open("holds", "w").write("x")
end = time.monotonic() + 60
while not os.path.exists("enough") and time.monotonic() < end:
    time.sleep(0.02)
try:
    os.read(watcher, 4096)
except BlockingIOError:
    say("nothing")
else:
    say("seen")
"""
_LOCK = f"""
import fcntl
file = open("{_PROGRAM}")
fcntl.flock(file, fcntl.LOCK_EX)
open("holds", "w").write("x")
end = time.monotonic() + 60
while not os.path.exists("enough") and time.monotonic() < end:
    time.sleep(0.02)
"""
_TRY_LOCK = f"""
import fcntl
fcntl.flock(open("{_PROGRAM}"), fcntl.LOCK_EX | fcntl.LOCK_NB)
say("mine")
"""
_SCAN = """
import ctypes
def test_scan():
    word, found = b"neigh" + b"bour-", []
    for line in open("/proc/self/maps"):
        fields = line.split()
        start, end = (int(number, 16) for number in fields[0].split("-"))
        if fields[1][0] == "r" and not fields[-1].startswith("[v") and end - start < 256 << 20:
            data = ctypes.string_at(start, end - start)
            at = data.find(word)
            while at >= 0:
                found.append(data[at:at + 26])
                at = data.find(word, at + 1)
    open("found", "wb").write(b"\\n".join(found))
"""


async def _meet(field: Field, body: str, neighbours: str) -> tuple[str, str]:
    """(what the attacker says, what the neighbour says): the neighbour acts while the attacker stays."""
    assert field.neighbour is not None
    await field.sandbox.files.write("meet.py", whole_program(body))
    staying = await field.sandbox.commands.start("python3 -S meet.py")

    async def holds() -> bool:
        return any(entry.path == "holds" for entry in await field.sandbox.files.list())

    await until(holds, "the program that stays")
    said = await field.python(neighbours, sandbox=field.neighbour)
    await field.sandbox.files.write("enough", "x")
    return (await staying.wait()).stdout, said


async def watch_neighbours(field: Field) -> str:
    """The kernel tells of every use of a file to whoever may read it: of a program that all share, too."""
    seen, _ = await _meet(field, _WATCH, f"open('{_PROGRAM}').read()")
    return "ESCAPED a neighbour's use of a program was seen" if "seen" in seen else f"refused: {seen}"


async def lock_for_neighbours(field: Field) -> str:
    """A lock needs no right to write, and others wait for it: a line to a neighbour, or a trap for it."""
    _, said = await _meet(field, _LOCK, _TRY_LOCK)
    return f"refused: the neighbour has it too: {said}" if "mine" in said else f"ESCAPED {said}"


async def find_remains(field: Field) -> str:
    """A test run is a fork of a program that has held other templates: their bytes may lie there."""
    secret = field.scene.neighbour_secret
    other = await field.backend.create(Template({f"{n}.txt": f"{secret} {n}" * 20 for n in range(100)}))
    await other.commands.run("cat *.txt", env={"SECRET": secret})
    try:
        for _ in range(_NUM_LATE):
            late = await field.backend.create(Template({"t.py": _SCAN}))
            said = await _scan(late)
            await late.kill()
            if "ESCAPED" in said:
                return said
        return "refused: nothing of another sandbox"
    finally:
        await other.kill()


async def _scan(sandbox: Sandbox) -> str:
    report = await sandbox.run_tests(["t.py"], UNDECIDED_S)
    assert report.passed, report
    found = (await sandbox.files.read("found")).decode(errors="replace")
    # The word that is looked for lies there as well, without a secret behind it.
    secrets = re.findall(r"neighbour-[0-9a-f]{8,}", found)
    return f"ESCAPED {len(secrets)} remains" if secrets else ""


_OWN_VIEW = ("own view of programs",)
SHARING = [
    Attempt(
        "watch which programs a neighbour uses",
        "each sandbox has a view of the programs that is its own to watch",
        _OWN_VIEW,
        scenario=watch_neighbours,
        neighbour=True,
    ),
    Attempt(
        "lock a program that a neighbour uses",
        "each sandbox has a view of the programs that is its own to lock",
        _OWN_VIEW,
        scenario=lock_for_neighbours,
        neighbour=True,
    ),
    Attempt(
        "find what other sandboxes left in memory",
        "no program that a sandbox is a fork of keeps another one's files",
        ("templates stored apart",),
        scenario=find_remains,
    ),
]
