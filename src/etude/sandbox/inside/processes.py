"""Which processes a sandbox has, and how they are ended, stopped and distinguished."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_ROUNDS = 20
_STOP_S = 2.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
POSIX_OBJECTS = "/dev/shm"
_REMOVE = 0
"""IPC_RMID."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_KINDS = {
    "shm": lambda number: _LIBC.shmctl(number, _REMOVE, None),
    "msg": lambda number: _LIBC.msgctl(number, _REMOVE, None),
    "sem": lambda number: _LIBC.semctl(number, 0, _REMOVE),
}


@dataclass(frozen=True)
class Process:
    """One row of the process table."""

    parent: int
    session: int
    state: str
    processor_s: float = 0.0
    """Time that it and its ended children have computed."""


Table = dict[int, Process]
Spare = Callable[[Table], set[int]]
"""Which processes of a table are left alone."""


class Processes:
    """All processes of a sandbox except its server."""

    def table(self) -> Table:
        raise NotImplementedError

    def kill_all(self) -> None:
        kill_all_but(self, lambda table: set())

    def remove_shared_memory(self) -> None:
        """Removes what the processes shared and left, as far as it is nobody else's."""
        remove_shared_memory()


class NamespaceProcesses(Processes):
    """The processes of this pid namespace, of which the server is pid 1."""

    def table(self) -> Table:
        table = read_table()
        table.pop(1, None)
        return table

    def kill_all(self) -> None:
        assert os.getpid() == 1, "kill(-1) outside of a pid namespace would end the host's processes"
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return


class DescendantProcesses(Processes):
    """The descendants of this process, which adopts its orphans. For servers without a pid namespace."""

    def table(self) -> Table:
        table = read_table()
        return {pid: table[pid] for pid in descendants(table, [os.getpid()]) if pid in table}

    def remove_shared_memory(self) -> None:
        """Nothing: it is shared with the host."""


class UserProcesses(Processes):
    """The processes of one user, who is nobody else, without this one, whose effective user may be the same.
    For a server that is root in a guest of its own."""

    def __init__(self, uid: int) -> None:
        self._uid = uid

    def table(self) -> Table:
        table = read_table()
        return {pid: row for pid, row in table.items() if _owner(pid) == self._uid and pid != os.getpid()}


def descendants(table: Table, roots: Iterable[int]) -> set[int]:
    """What the roots have started, however deep; the roots themselves not."""
    children: dict[int, list[int]] = {}
    for pid, row in table.items():
        children.setdefault(row.parent, []).append(pid)
    found: set[int] = set()
    pending = list(roots)
    while pending:
        below = [pid for pid in children.get(pending.pop(), ()) if pid not in found]
        found.update(below)
        pending.extend(below)
    return found


def families(table: Table, leaders: Iterable[int]) -> set[int]:
    """The leaders, all that they started, and whatever still lies in their sessions.

    A process that leaves its parent *and* its session belongs to nobody.
    """
    roots = set(leaders)
    roots |= {pid for pid, row in table.items() if row.session in roots}
    return roots | descendants(table, roots)


def parents_first(table: Table, pids: Iterable[int]) -> list[int]:
    """Each of these processes after its parent, if that is one of them, too."""
    children: dict[int, list[int]] = {}
    wanted = dict.fromkeys(pids)
    for pid in wanted:
        children.setdefault(table[pid].parent, []).append(pid)
    order: dict[int, None] = {}
    pending = [pid for pid in wanted if table[pid].parent not in wanted]
    while pending:
        pid = pending.pop()
        order[pid] = None
        pending.extend(children.get(pid, ()))
    return list(order | wanted)  # a number that was given anew between two rows may close a circle


def kill_all_but(processes: Processes, spare: Spare) -> None:
    """Kills until nothing new is left: a process may have forked while the table was being read.

    Parents go first: a shell whose command is killed before it would go on with the next one.
    """
    for _ in range(_ROUNDS):
        table = processes.table()
        doomed = {pid for pid, row in table.items() if row.state not in "ZX"} - spare(table)
        for pid in parents_first(table, doomed):
            _send(pid, signal.SIGKILL)
        if not doomed:
            return


def stop_all(processes: Processes) -> set[int]:
    """Stops everything that runs, and waits until it stands still; returns what `resume_all` wakes."""
    stopped: set[int] = set()
    end_s = time.monotonic() + _STOP_S
    while time.monotonic() < end_s:
        running = {pid for pid, row in processes.table().items() if row.state not in "TtZX"}
        if not running:
            break
        for pid in running - stopped:
            _send(pid, signal.SIGSTOP)
        stopped |= running
    return stopped


def resume_all(pids: Iterable[int]) -> None:
    """Lets go on what `stop_all` stopped."""
    for pid in pids:
        _send(pid, signal.SIGCONT)


def reap() -> tuple[dict[int, int], bool]:
    """Collects ended children: ({pid: wait status}, whether any child is left)."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if pid == 0:
            return ended, True
        ended[pid] = status


def own_bytes(pids: Iterable[int], with_shared: bool) -> int:
    """Memory of the processes that no file backs: private pages, and tables that lead to pages, be these
    nobody's; `with_shared`: shared ones, too, once for each process that has touched them."""
    wanted = (b"RssAnon:", b"VmPTE:", b"RssShmem:")[: 3 if with_shared else 2]
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += _sum_bytes(f"/proc/{pid}/status", wanted)
    return total


def proportional_bytes(pids: Iterable[int], with_shared: bool) -> int:
    """As `own_bytes`, but pages that several processes share count once. A millisecond for each."""
    wanted = (b"Pss_Anon:", b"Pss_Shmem:") if with_shared else (b"Pss_Anon:",)
    total = 0
    for pid in pids:
        try:
            total += _sum_bytes(f"/proc/{pid}/smaps_rollup", wanted)
            total += _sum_bytes(f"/proc/{pid}/status", (b"VmPTE:",))
        except PermissionError:
            # A fork of the server itself, which nobody may look into.
            total += own_bytes([pid], with_shared)
            continue
        except OSError:
            continue
    return total


def _sum_bytes(path: str, names: tuple[bytes, ...]) -> int:
    """The sum of some of a file's rows, which are in KiB. Raises OSError."""
    with open(path, "rb") as file:
        rows = file.read().split(b"\n")
    return sum(int(row.split()[1]) for row in rows if row.startswith(names)) * 1024


def read_table() -> Table:
    """All processes that this one sees."""
    table: Table = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            processor_s = sum(map(int, fields[11:15])) / _TICKS_PER_S
            table[int(name)] = Process(int(fields[1]), int(fields[3]), fields[0].decode(), processor_s)
        except (OSError, IndexError):
            continue
    return table


def _owner(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def remove_shared_memory() -> None:
    """Removes what outlives the processes that filled it (System V objects, POSIX ones in /dev/shm), as far
    as this process may. For servers whose IPC namespace is their own.

    A control group counts it, and nobody is left whom the kernel could end for it but the sandbox's server.
    """
    for kind, remove in _KINDS.items():
        for number in _numbers(kind):
            remove(number)
    with contextlib.suppress(OSError), os.scandir(POSIX_OBJECTS) as entries:
        for entry in list(entries):
            # What lies deeper is no shared memory, but files like all others.
            if not entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)


def _numbers(kind: str) -> list[int]:
    """Of all objects of a kind; none where the kernel lists none."""
    try:
        with open(f"/proc/sysvipc/{kind}", "rb") as file:
            return [int(row.split()[1]) for row in file.read().splitlines()[1:]]
    except (OSError, ValueError, IndexError):
        return []


MOST_WAITING_S = 60.0
"""How long a command may go on after its deadline."""
_SHORTEST_S, _LONGEST_S = 0.02, 0.1
"""Bounds of the time between two looks."""
_WANTS_TO_RUN = "RD"
"""States of processes that compute, wait for a processor, or wait for a disk."""


def extension_s(processes: Iterable[Process], timeout_s: float, lasted_s: float) -> float:
    """After how many seconds to look again at a command that has lasted its time; 0: it ends now.

    On a machine that does too much, tests would else run out of time for what other sandboxes compute. So a
    command ends at its deadline if all that it started sleeps, or has had as much processor time as it may
    take; what still wants to run goes on for a while.
    """
    rows = list(processes)
    left_s = timeout_s - sum(row.processor_s for row in rows)
    waits = left_s > 0 and any(row.state in _WANTS_TO_RUN for row in rows)
    if not waits or lasted_s >= timeout_s + MOST_WAITING_S:
        return 0.0
    return min(max(left_s, _SHORTEST_S), _LONGEST_S)
