"""Runs one program as root in new namespaces: user, mount, pid, network, IPC and UTS.

    LINE DIRECTORY FIRST_UID FIRST_GID NUM -- PROGRAM [ARGUMENT...]

Started by root. To the host the program and its descendants are users without rights. They see those of the
host's files that such users may read, `DIRECTORY` in place of `/tmp`, and no network but a loopback of their
own. A socket that listens there is sent through the descriptor `LINE`; with -1 there is none. When the
program ends, or this process is killed, the kernel kills all remaining processes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence

from etude.sandbox.inside import kernel
from etude.sandbox.inside.forward import PORT
from etude.sandbox.inside.ids import SpareIds

FAILED, REASON = 121, "no namespaces: "
"""Exit status if the namespaces could not be created, and the prefix of the output then."""
MOUNT_POINT = "/tmp"
"""Where the directory is mounted for the program."""
_FLAGS = kernel.NEWUSER | kernel.NEWNS | kernel.NEWPID | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS


def main(words: Sequence[str]) -> None:
    """Runs the program until it ends, and exits with its status."""
    split = words.index("--")
    line, directory = int(words[0]), words[1]
    spare, command = SpareIds.from_arguments(words[2:split]), list(words[split + 1 :])
    kernel.die_with_parent()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        with _failing():
            ours.close()
            _enter(directory, theirs)
            _start(command, line)
    theirs.close()
    with _failing():
        if ours.recv(1):
            # Id 0 inside is the first of the range.
            kernel.map_ids(pid, f"0 {spare.first_uid} {spare.num}", f"0 {spare.first_gid} {spare.num}")
            ours.send(b"x")
    ours.close()
    if line >= 0:
        os.close(line)
    os._exit(_wait(pid))


def _enter(directory: str, line: socket.socket) -> None:
    """Moves this process into new namespaces, as their root. Raises OSError."""
    kernel.die_with_parent()
    # Still as the host's root: other users may not traverse some of the parent directories.
    kernel.unshare(kernel.NEWNS)
    kernel.mount("", "/", flags=kernel.MS_PRIVATE | kernel.MS_REC)
    kernel.mount(directory, MOUNT_POINT, flags=kernel.MS_BIND)
    kernel.unshare(_FLAGS)
    line.send(b"x")
    if not line.recv(1):
        os._exit(FAILED)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    kernel.die_with_parent()
    kernel.raise_loopback()


def _start(command: list[str], line: int) -> None:
    """Starts the program as the first process of its namespace. Raises OSError."""
    if line >= 0:
        with socket.create_server(("127.0.0.1", PORT), backlog=64) as listener:
            socket.send_fds(socket.socket(fileno=line), [b"x"], [listener.fileno()])
    os.chdir(MOUNT_POINT)
    pid = os.fork()
    if pid:
        os._exit(_wait(pid))
    kernel.die_with_parent()
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error}", file=sys.stderr, flush=True)
        os._exit(127)


def _wait(pid: int) -> int:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """Exits with `FAILED` if the namespaces cannot be created."""
    try:
        yield
    except OSError as error:
        print(f"{REASON}{error}", file=sys.stderr, flush=True)
        os._exit(FAILED)
