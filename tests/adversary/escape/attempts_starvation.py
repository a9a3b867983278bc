"""Attempts to exhaust resources that neighbours and owner share: the host's per-user limits.

Where a plain user has no ids to give away, all sandboxes of an owner are that user. See also
`tests/adversary/kinds_neighbours.py`.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from etude.errors import EtudeError, SandboxError
from etude.sandbox.inside.namespaces import PENDING_SIGNALS
from etude.sandbox.template import Template
from tests.adversary.escape.model import DEFAULT_RESOURCES, UNDECIDED_S, Attempt
from tests.adversary.escape.prelude import whole_program
from tests.adversary.escape.trial import Field, until

_INOTIFY = """
held = 0
while libc.inotify_init() >= 0:
    held += 1
open("held", "w").write(str(held))
signal.pause()
"""
_IN_FLIGHT = """
import array
one, two = socket.socketpair()
null = os.open("/dev/null", os.O_RDONLY)
held = 0
try:
    while True:
        one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 250))])
        held += 250
except OSError:
    pass
open("held", "w").write(str(held))
signal.pause()
"""
_SIGNALS = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
held = 0
while held < 1_000_000 and libc.sigqueue(os.getpid(), signal.SIGRTMIN, None) == 0:
    held += 1
open("held", "w").write(str(held))
signal.pause()
"""
_SOME_SIGNALS = 64
"""What a sandbox gets at least, unless another one has everything."""
_DEEP = """
for _ in range(1500):
    os.mkdir("d")
    os.chdir("d")
"""


async def _hold(field: Field, body: str) -> str:
    """Starts a program that takes all it can get and sits on it; says how much that is."""
    await field.sandbox.files.write("hold.py", whole_program(body))
    await field.sandbox.commands.start("python3 -S hold.py >log 2>&1")

    async def holds() -> bool:
        return any(entry.path == "held" and entry.size_bytes for entry in await field.sandbox.files.list())

    await until(holds, "the program that takes all it can get")
    return (await field.sandbox.files.read("held")).decode()


async def use_up_inotify(field: Field) -> str:
    """Every inotify instance of the host's user."""
    held = await _hold(field, _INOTIFY)
    said = await field.python(
        "check(libc.inotify_init(), 'inotify_init')\nsay('fine')", sandbox=field.neighbour
    )
    return f"refused: {held} taken, the neighbour has some" if "fine" in said else f"ESCAPED {held}: {said}"


async def use_up_descriptors_in_flight(field: Field) -> str:
    """Every descriptor that the host's user may have in flight: copies of sandboxes need one."""
    held = await _hold(field, _IN_FLIGHT)
    assert field.neighbour is not None
    try:
        (copy,) = await field.neighbour.fork(1)
    except EtudeError as error:
        return f"ESCAPED {held} in flight, a neighbour's copy fails: {error.message[:100]}"
    if isinstance(copy, SandboxError):
        return f"ESCAPED {held} in flight, a neighbour's copy fails: {copy.message[:100]}"
    await copy.kill()
    return f"refused: {held} in flight, the neighbour was copied"


_TIMER = "timer = ctypes.c_void_p()\ncheck(libc.timer_create(1, None, ctypes.byref(timer)))\nsay('fine')"


async def use_up_signals(field: Field) -> str:
    """Every signal that may be pending for the host's user: timers need one each.

    Others of that user may hold some, or all: what counts is how many this sandbox gets, as soon as there are
    any.
    """
    for _ in range(12):
        held = await _hold(field, _SIGNALS)
        if int(held) > PENDING_SIGNALS:
            return f"ESCAPED {held} signals are pending"
        if int(held) >= _SOME_SIGNALS and "fine" in await field.python(_TIMER, sandbox=field.neighbour):
            return f"refused: {held} taken, the neighbour has some"
        await field.sandbox.commands.run("rm held; kill -9 -1")
        await asyncio.sleep(0.5)
    return "IMPOSSIBLE somebody else has taken every signal"


async def end_the_fork_server(field: Field) -> str:
    """Directories so deep that whoever walks them by recursion fails."""
    await field.sandbox.commands.run("head -c 1 /dev/zero")
    await field.python(_DEEP)
    said: list[str] = []
    for attempt in (field.sandbox.create_snapshot("filesystem"), field.sandbox.fork(1)):
        try:
            result = await attempt
            for copy in result if isinstance(result, list) else []:
                if not isinstance(copy, SandboxError):
                    await copy.kill()
            said.append("done")
        except EtudeError as error:
            said.append(type(error).__name__)
    try:
        another = await field.backend.create(Template({"a.txt": "another"}))
        await another.kill()
    except SandboxError as error:
        return f"ESCAPED no sandbox can be made any more: {error.message[:100]}"
    return f"refused: {said}"


async def inflate_a_copy(field: Field) -> str:
    """Sparse files: nothing on the sandbox's disk, and 160 MiB in a copy that writes their zeros."""
    before = _files_bytes(field)
    await field.sandbox.commands.run("for i in $(seq 20); do truncate -s 8M sparse-$i; done")
    try:
        (copy,) = await field.sandbox.fork(1)
    except EtudeError as error:
        return f"refused: {type(error).__name__}: {error.message[:100]}"
    grown = _files_bytes(field) - before
    if not isinstance(copy, SandboxError):
        await copy.kill()
    if grown > 4 * (8 << 20):
        return f"ESCAPED the fork server holds {grown >> 20} MiB of a sandbox with 8 MiB of disk"
    return f"refused: {grown >> 20} MiB"


def _files_bytes(field: Field) -> int:
    """Bytes in use on the fork server's own disk."""
    launcher = getattr(field.backend, "launcher_pid", None)
    assert launcher is not None, "tried on backends with a fork server"
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    status = os.statvfs(f"/proc/{children[0]}/root/files")
    return (status.f_blocks - status.f_bfree) * status.f_bsize


async def end_the_server_by_its_limits(field: Field) -> str:
    """Processor time, descriptors and memory of pid 1, lowered by a process of the same user."""
    body = """
    import resource
    for kind, limit in ((resource.RLIMIT_NOFILE, 3), (resource.RLIMIT_DATA, 4096), (resource.RLIMIT_CPU, 0)):
        try:
            resource.prlimit(1, kind, (limit, limit))
        except OSError as error:
            refusal = error
        else:
            refusal = None
    if refusal:
        raise refusal
    say("set")
    """
    try:
        said = await field.python(body)
        await field.sandbox.run_tests(["missing.py"])
    except EtudeError as error:
        return f"ESCAPED the server is of no more use: {error.message[:100]}"
    return f"ESCAPED {said}" if "set" in said else said


async def start_before_the_limits(field: Field) -> str:
    """Processes that a command starts so early that its own limits are not set yet."""
    limit = DEFAULT_RESOURCES.open_files
    for _ in range(4):
        await field.sandbox.commands.start("while :; do :; done")
    for _ in range(40):
        result = await field.sandbox.commands.run(
            "(ulimit -n)& (ulimit -n)& ulimit -n; wait", timeout_s=UNDECIDED_S
        )
        wrong = set(result.stdout.split()) - {str(limit)}
        if wrong:
            return f"ESCAPED limits of {sorted(wrong)} descriptors"
    return f"refused: always {limit}"


STARVATION = [
    Attempt(
        "use up every inotify instance",
        "a small count of its own for each user namespace",
        ("counts of watches",),
        scenario=use_up_inotify,
        neighbour=True,
        reach="shared kernel",
    ),
    Attempt(
        "use up every descriptor in flight",
        "a server whose own limit is far above its children's",
        ("user of its own", "descriptors of the server's own"),
        scenario=use_up_descriptors_in_flight,
        neighbour=True,
        reach="shared kernel",
    ),
    Attempt(
        "use up every pending signal",
        "RLIMIT_SIGPENDING",
        ("limit SIGPENDING",),
        scenario=use_up_signals,
        neighbour=True,
        reach="shared kernel",
    ),
    Attempt(
        "end the fork server with deep directories",
        "nothing that walks an agent's files recurses",
        ("removal without recursion",),
        scenario=end_the_fork_server,
        neighbour=True,
        reach="shared kernel",
    ),
    Attempt(
        "inflate a copy with sparse files",
        "copies keep holes",
        ("holes kept",),
        scenario=inflate_a_copy,
        reach="shared kernel",
        users=("root",),
    ),
    Attempt(
        "end the server by its limits",
        "prlimit of another process is refused",
        ("allow prlimit64",),
        scenario=end_the_server_by_its_limits,
        reach="shared kernel",
    ),
    Attempt(
        "start before the limits are set",
        "a command has its limits from its first instruction on",
        ("limit NOFILE",),
        scenario=start_before_the_limits,
    ),
]
