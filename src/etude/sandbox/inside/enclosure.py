"""Runs one program as root of namespaces of its own: users, mounts, processes, network, names.

    LINE DIRECTORY FIRST_UID FIRST_GID NUM [NEWUIDMAP NEWGIDMAP] -- PROGRAM [ARGUMENT...]

To the host the program and all that it starts are users without rights. They see the host's files, where
those users may read them, `DIRECTORY` in place of `/tmp`, and no network but their own loopback. A socket
that listens there is sent through the descriptor `LINE`. When the program ends, or this process is killed,
the kernel kills whatever it left.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence

from etude.sandbox.inside import kernel
from etude.sandbox.inside.forward import PORT
from etude.sandbox.inside.ids import Spare

FAILED, REASON = 121, "no namespaces: "
"""Exit status where the namespaces could not be made, and what the output then begins with."""
PLACE = "/tmp"
"""Where the program sees its directory."""
_FLAGS = kernel.NEWUSER | kernel.NEWNS | kernel.NEWPID | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS


def main(words: Sequence[str]) -> None:
    """Runs the program to its end, and exits as it did."""
    split = words.index("--")
    line, directory = int(words[0]), words[1]
    spare, command = Spare.from_words(words[2:split]), list(words[split + 1 :])
    kernel.die_with_parent()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        with _failing():
            ours.close()
            _enter(directory, theirs, bool(spare.programs))
            _start(command, line)
    theirs.close()
    with _failing():
        if ours.recv(1):
            _map(spare, pid)
            ours.send(b"x")
    ours.close()
    os.close(line)
    os._exit(_wait(pid))


def _enter(directory: str, line: socket.socket, as_user: bool) -> None:
    """Moves this process into its namespaces, as their root. Raises OSError."""
    kernel.die_with_parent()
    if not as_user:
        # With the host's rights: nobody else may enter some of the directories above.
        kernel.unshare(kernel.NEWNS)
        _mount(directory)
    kernel.unshare(_FLAGS)
    line.send(b"x")
    if not line.recv(1):
        os._exit(FAILED)
    if as_user:
        _mount(directory)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    kernel.die_with_parent()
    kernel.raise_loopback()


def _mount(directory: str) -> None:
    kernel.mount("", "/", flags=kernel.MS_PRIVATE | kernel.MS_REC)
    kernel.mount(directory, PLACE, flags=kernel.MS_BIND)


def _start(command: list[str], line: int) -> None:
    """Starts the program as the first process of its namespace. Raises OSError."""
    with socket.create_server(("127.0.0.1", PORT), backlog=64) as listener:
        socket.send_fds(socket.socket(fileno=line), [b"x"], [listener.fileno()])
    os.chdir(PLACE)
    pid = os.fork()
    if pid:
        os._exit(_wait(pid))
    kernel.die_with_parent()
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    os.execvp(command[0], command)


def _map(spare: Spare, pid: int) -> None:
    """Gives the namespace of a process its ids: root there is the first. Raises OSError."""
    for name, first, own, program in zip(
        ("uid_map", "gid_map"),
        (spare.first_uid, spare.first_gid),
        (os.getuid(), os.getgid()),
        spare.programs or ("", ""),
        strict=True,
    ):
        if not program:
            kernel.write_file(f"/proc/{pid}/{name}", f"0 {first} {spare.num}")
            continue
        rows = ["0", str(own), "1", "1", str(first), str(spare.num)]
        if os.spawnv(os.P_WAIT, program, [program, str(pid), *rows]):
            raise OSError(f"{program} maps no ids")


def _wait(pid: int) -> int:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """Ends this process where no namespaces can be made."""
    try:
        yield
    except OSError as error:
        print(f"{REASON}{error}", file=sys.stderr, flush=True)
        os._exit(FAILED)
