"""A supervisor of programs that must not outlive their owner: hypervisors, runtimes and their descendants.

    guard.main([owner's pidfd, plan as JSON])

    {"argv": [...],                  the program
     "user": [uid, gid] or null,     its user, if not that of the guard
     "control": [...],               `cgroup.procs` files of the groups that it enters
     "binds": {path: host path} or null}

With `binds` it gets a user and a mount namespace of its own: it is root inside, and a plain user to the host.
The real root becomes nobody before it creates the user namespace, so that id 0 of the host is never mapped.
(`runsc --rootless` is similar, but has no `restore`.) The files that it needs are bind-mounted below
`BIND_ROOT`, a tmpfs that hides the host's own directory: the paths there are the same in every call, whatever
the host's directories are called and whichever user may enter them.

The guard adopts orphaned descendants. When the owner dies, when the program ends, or on SIGTERM, it kills all
of them and exits with the program's code.
"""

from __future__ import annotations

import json
import os
import select
import signal
import traceback
from pathlib import Path
from typing import Any, NoReturn

from etude.sandbox.inside import kernel
from etude.sandbox.inside.processes import DescendantProcesses, reap
from etude.sandbox.inside.rights import change_user, enter_own_namespaces

BIND_ROOT = "/tmp"


def main(arguments: list[str]) -> NoReturn:
    """Supervises the program until it or the owner ends."""
    owner, plan = int(arguments[0]), json.loads(arguments[1])
    kernel.adopt_orphans()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    pid = os.fork()
    if pid == 0:
        _exec_program(plan, [owner, reader, writer])
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    for descriptor in (owner, pidfd, reader):
        poll.register(descriptor, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll()}
    code = 1
    if pidfd in ready:
        _, status = os.waitpid(pid, 0)
        code = (
            max(0, os.waitstatus_to_exitcode(status)) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        )
    DescendantProcesses().kill_all()
    reap()
    os._exit(code)


def _exec_program(plan: dict[str, Any], descriptors: list[int]) -> NoReturn:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for descriptor in descriptors:
        os.close(descriptor)
    try:
        for path in plan["control"]:
            Path(path).write_text(str(os.getpid()), encoding="ascii")
        if plan["user"] is not None:
            change_user(*plan["user"])
        if plan["binds"] is not None:
            _enter(plan["binds"])
        # After the change of user, which would reset it.
        kernel.die_with_parent()
        os.execvp(plan["argv"][0], plan["argv"])
    finally:
        os._exit(127)


def _enter(binds: dict[str, str]) -> None:
    """Moves this process into namespaces of its own; prints the error if that fails."""
    try:
        enter_own_namespaces(lambda: _mount_binds(binds))
        os.chdir("/")
    except OSError:
        traceback.print_exc()
        raise


def _mount_binds(binds: dict[str, str]) -> None:
    kernel.mount("", "/", flags=kernel.MS_PRIVATE | kernel.MS_REC)
    # Opened first: sources below BIND_ROOT itself will be hidden.
    sources = {Path(target): os.open(source, os.O_PATH) for target, source in binds.items()}
    kernel.mount("hall", BIND_ROOT, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
    for target, descriptor in sources.items():
        source = Path(f"/proc/self/fd/{descriptor}")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            target.mkdir(exist_ok=True)
        else:
            target.touch()
        kernel.mount(str(source), str(target), flags=kernel.MS_BIND | kernel.MS_REC)
        os.close(descriptor)
