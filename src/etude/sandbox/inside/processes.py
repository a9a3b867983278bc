"""The processes of a sandbox: listing, killing, stopping, and measuring their memory and processor time."""

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
    """Processor time of the process and its reaped children."""


Table = dict[int, Process]
Exempt = Callable[[Table], set[int]]
"""Selects the processes of a table that are not killed."""


class Processes:
    """All processes of a sandbox except its server."""

    def table(self) -> Table:
        raise NotImplementedError

    def kill_all(self) -> None:
        kill_all_but(self, lambda table: set())

    def remove_shared_memory(self) -> None:
        """Removes shared memory that ended processes have left, if it is not shared with others."""
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
        """Does nothing: the IPC namespace is the host's."""


class UserProcesses(Processes):
    """The processes of the agent's user, without this one, whose effective user may be the same. For a server
    that is root in a guest."""

    def __init__(self, uid: int) -> None:
        self._uid = uid

    def table(self) -> Table:
        table = read_table()
        return {pid: row for pid, row in table.items() if _owner(pid) == self._uid and pid != os.getpid()}


def descendants(table: Table, roots: Iterable[int]) -> set[int]:
    """All descendants of the roots, without the roots."""
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
    """The leaders, their descendants, and the processes of their sessions.

    A process that leaves its parent *and* its session belongs to no family.
    """
    roots = set(leaders)
    roots |= {pid for pid, row in table.items() if row.session in roots}
    return roots | descendants(table, roots)


def parents_first(table: Table, pids: Iterable[int]) -> list[int]:
    """The processes in an order in which each comes after its parent, if that is among them."""
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
    return list(order | wanted)  # a pid reused while the table was read may form a cycle


def kill_all_but(processes: Processes, exempt: Exempt) -> None:
    """Kills repeatedly until none is left: a process may have forked while the table was being read.

    Parents are killed first: a shell would run its next command once the current one is killed.
    """
    for _ in range(_ROUNDS):
        table = processes.table()
        doomed = {pid for pid, row in table.items() if row.state not in "ZX"} - exempt(table)
        for pid in parents_first(table, doomed):
            _send(pid, signal.SIGKILL)
        if not doomed:
            return


def stop_all(processes: Processes) -> set[int]:
    """Stops all running processes and waits until they have stopped; returns those for `resume_all`."""
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
    """Continues the processes that `stop_all` has stopped."""
    for pid in pids:
        _send(pid, signal.SIGCONT)


def reap() -> tuple[dict[int, int], bool]:
    """Reaps ended children: ({pid: wait status}, whether any child is left)."""
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
    """Anonymous memory of the processes: private pages, and page tables, whatever they map;
    `with_shared`: also shared pages, counted once for each process that has touched them."""
    wanted = (b"RssAnon:", b"VmPTE:", b"RssShmem:")[: 3 if with_shared else 2]
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += _sum_bytes(f"/proc/{pid}/status", wanted)
    return total


def proportional_bytes(pids: Iterable[int], with_shared: bool) -> int:
    """As `own_bytes`, but pages shared by several processes count once. Takes a millisecond per process."""
    wanted = (b"Pss_Anon:", b"Pss_Shmem:") if with_shared else (b"Pss_Anon:",)
    total = 0
    for pid in pids:
        try:
            total += _sum_bytes(f"/proc/{pid}/smaps_rollup", wanted)
            total += _sum_bytes(f"/proc/{pid}/status", (b"VmPTE:",))
        except PermissionError:
            # A fork of the server itself, which is not dumpable.
            total += own_bytes([pid], with_shared)
            continue
        except OSError:
            continue
    return total


def _sum_bytes(path: str, names: tuple[bytes, ...]) -> int:
    """The sum of the rows with these names in a file of KiB values. Raises OSError."""
    with open(path, "rb") as file:
        rows = file.read().split(b"\n")
    return sum(int(row.split()[1]) for row in rows if row.startswith(names)) * 1024


def read_table() -> Table:
    """The table of all processes that are visible to this one."""
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
    """Removes IPC objects that outlive their processes (System V, and POSIX ones in /dev/shm), as far as this
    process may. For servers with an IPC namespace of their own.

    Control groups count this memory, and the kernel would otherwise kill the sandbox's server for it.
    """
    for kind, remove in _KINDS.items():
        for number in _numbers(kind):
            remove(number)
    with contextlib.suppress(OSError), os.scandir(POSIX_OBJECTS) as entries:
        for entry in list(entries):
            # Files in subdirectories are not shared memory objects.
            if not entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)


def _numbers(kind: str) -> list[int]:
    """Ids of all objects of a kind; empty if the kernel does not list them."""
    try:
        with open(f"/proc/sysvipc/{kind}", "rb") as file:
            return [int(row.split()[1]) for row in file.read().splitlines()[1:]]
    except (OSError, ValueError, IndexError):
        return []


MOST_WAITING_S = 60.0
"""How long a command may run after its deadline."""
_SHORTEST_S, _LONGEST_S = 0.02, 0.1
"""Bounds of the time between two checks."""
_WANTS_TO_RUN = "RD"
"""States of processes that run, wait for a processor, or wait for a disk."""


def extension_s(processes: Iterable[Process], timeout_s: float, lasted_s: float) -> float:
    """Seconds until the next check of a command that has reached its deadline; 0: it ends now.

    On an overloaded machine tests would otherwise time out because of other sandboxes. So a command ends at
    its deadline if all its processes sleep, or have used `timeout_s` of processor time; one that is still
    runnable continues, for at most `MOST_WAITING_S`.
    """
    rows = list(processes)
    left_s = timeout_s - sum(row.processor_s for row in rows)
    waits = left_s > 0 and any(row.state in _WANTS_TO_RUN for row in rows)
    if not waits or lasted_s >= timeout_s + MOST_WAITING_S:
        return 0.0
    return min(max(left_s, _SHORTEST_S), _LONGEST_S)
