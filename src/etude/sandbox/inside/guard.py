"""A parent for programs that must not outlive their owner: hypervisors, runtimes and all that they start.

    guard.main([owner's pidfd, "-" or "uid:gid", program, arguments ...])

The program runs as the given user, where there is one. The guard adopts whatever its descendants abandon.
When the owner dies, when the program ends, or on SIGTERM, it kills all of them and exits with the program's
code.
"""

from __future__ import annotations

import os
import select
import signal
from typing import NoReturn

from etude.sandbox.inside import kernel
from etude.sandbox.inside.processes import DescendantProcesses, reap
from etude.sandbox.inside.rights import become


def main(arguments: list[str]) -> NoReturn:
    """Runs until the program or the owner has ended."""
    owner, user, argv = int(arguments[0]), arguments[1], arguments[2:]
    kernel.adopt_orphans()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    pid = os.fork()
    if pid == 0:
        _become(argv, user, [owner, reader, writer])
    watch = os.pidfd_open(pid)
    poll = select.poll()
    for descriptor in (owner, watch, reader):
        poll.register(descriptor, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll()}
    code = 1
    if watch in ready:
        _, status = os.waitpid(pid, 0)
        code = (
            max(0, os.waitstatus_to_exitcode(status)) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        )
    DescendantProcesses().kill_all()
    reap()
    os._exit(code)


def _become(argv: list[str], user: str, descriptors: list[int]) -> NoReturn:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for descriptor in descriptors:
        os.close(descriptor)
    try:
        if user != "-":
            uid, _, gid = user.partition(":")
            become(int(uid), int(gid))
        # After the change of user, which would undo it.
        kernel.die_with_parent()
        os.execvp(argv[0], argv)
    finally:
        os._exit(127)
