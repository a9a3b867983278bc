"""Control groups for sandboxes, where this process may make them: memory, processes, a share of cores.

A sandbox under gVisor is not bounded in processes: those of its kernel are not the agent's.

Version 1 (one tree for each controller, as root) and version 2 (a delegated subtree) are both used. Where
neither is writable there is none, and the watchdog inside each sandbox bounds its memory instead.

    <controller>/etude-<owner's key>-<number>/<sandbox>      version 1: the fork server in the directory above
    etude-<owner's key>-<number>/server, .../<sandbox>       version 2: the fork server in a group of its own

A sandbox's control group namespace begins in its own group: of the above it sees nothing.

Groups outlive the process that made them; the next start removes those of dead owners.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from etude.kit.leftovers import live_keys, owner_key
from etude.sandbox.inside.kernel import write_file
from etude.sandbox.inside.processes import descendants, read_table
from etude.sandbox.types import Resources

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "etude-"
_OVERHEAD_BYTES = 24 << 20
"""Of the server inside and of the kernel on the sandbox's behalf."""
_SHARES, _WEIGHT = 1024, 100
"""One core's worth, in version 1 and in version 2."""
_TCP_BYTES = 32 << 20
"""Version 1 counts the buffers of connections apart."""
_OPTIONAL = (
    "cpu.weight",
    "memory.kmem.tcp.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.swap.max",
)
"""Not handed down everywhere, or not in every kernel."""
_SERVER = "server"
REMOVE_S = 10.0
"""How long the kernel gets to end what is in a group."""
_PAUSE_S = 0.005


class ControlGroups:
    """The groups of one backend's sandboxes."""

    def __init__(self, parents: dict[str, Path], kernel_bytes: int = 0) -> None:
        """`parents`: controller -> this owner's directory; all the same one in version 2. `kernel_bytes`: of
        a kernel that runs in each group as a program, such as gVisor's; 0: none does."""
        self._parents = parents
        self._kernel_bytes = kernel_bytes

    @classmethod
    def open(cls, root: Path = _ROOT, kernel_bytes: int = 0) -> ControlGroups | None:
        """Makes this backend's groups and removes those of dead owners. None where that is not allowed.

        `kernel_bytes`: see `__init__`.
        """
        name = f"{_PREFIX}{owner_key()}-{next(_numbers)}"
        wanted = ("memory", "cpu") if kernel_bytes else ("memory", "pids", "cpu")
        for find in (_version_2, _version_1):
            parents = find(root, name, wanted)
            if parents:
                return cls(parents, kernel_bytes)
        return None

    def create(self, name: str) -> None:
        """Makes the groups of one sandbox, without limits. Raises OSError.

        Waits while a process enters a group anywhere, as everything here but `limit` does: for a thread.
        """
        for parent in self._parents.values():
            (parent / name).mkdir(exist_ok=True)

    def limit(self, name: str, resources: Resources) -> None:
        """Sets the limits of a sandbox's groups. Raises OSError."""
        for controller, parent in self._parents.items():
            for file, value in self._limits(controller, resources):
                if file in _OPTIONAL and not (parent / name / file).exists():
                    continue
                write_file(parent / name / file, value)

    def _limits(self, controller: str, resources: Resources) -> Iterable[tuple[str, str]]:
        overhead_bytes = self._kernel_bytes or _OVERHEAD_BYTES
        memory = str(resources.memory_bytes + resources.disk_bytes + overhead_bytes)
        processes = str(resources.num_processes + 1)
        if controller == "memory":
            yield "memory.limit_in_bytes", memory
            if self._kernel_bytes:
                yield "memory.memsw.limit_in_bytes", memory
            else:
                yield "memory.kmem.tcp.limit_in_bytes", str(_TCP_BYTES)
        elif controller == "pids":
            yield "pids.max", processes
        elif controller == "cpu":
            yield "cpu.shares", str(max(2, int(_SHARES * resources.cpus)))
        else:
            yield "memory.max", memory
            yield ("memory.swap.max", "0") if self._kernel_bytes else ("pids.max", processes)
            yield "cpu.weight", str(max(1, min(10_000, int(_WEIGHT * resources.cpus))))

    def entrances(self, name: str) -> list[Path]:
        """A process that writes its id into these enters a sandbox's groups, with all that it will start."""
        return [parent / name / "cgroup.procs" for parent in self._parents.values()]

    def admit(self, pid: int) -> None:
        """Moves a fork server and its parent `pid`, before there are sandboxes. Raises OSError."""
        name = ""
        if "unified" in self._parents:
            # A group of version 2 that hands controllers down holds no process itself.
            name = _SERVER
            (self._parents["unified"] / name).mkdir(exist_ok=True)
        # In a pid namespace orphans stay below its first process.
        for member in (pid, *descendants(read_table(), [pid])):
            self.enter(name, member)

    def enter(self, name: str, pid: int) -> None:
        """Moves one process, and whatever it starts from then on, into a sandbox's groups. Raises OSError.

        Blocks for 0.1 to 20 ms: the kernel waits until no process anywhere is being forked.
        """
        for entrance in self.entrances(name):
            write_file(entrance, str(pid))

    def remove(self, name: str, within_s: float = 0.0) -> bool:
        """Removes a sandbox's groups. False: after `within_s` the kernel still holds one, because it has not
        ended all processes there."""
        return _remove([parent / name for parent in self._parents.values()], within_s)

    def num_killed_for_memory(self, name: str) -> int:
        """How many processes of a sandbox the kernel ended because its memory was used up."""
        parent = self._parents.get("memory") or self._parents.get("unified")
        if parent is None:
            return 0
        return num_oom_kills(parent / name)

    def was_killed_for_the_host(self, name: str) -> bool:
        """Whether the kernel ended processes of a sandbox that had not reached its own limit."""
        parent = self._parents.get("memory") or self._parents.get("unified")
        return parent is not None and num_oom_kills(parent / name) > 0 and not reached_limit(parent / name)

    def close(self) -> None:
        """Removes everything, but for what the kernel still holds after a moment: that goes with the sweep of
        the next owner."""
        parents = [parent for parent in self._parents.values() if parent.is_dir()]
        _remove([entry for parent in parents for entry in parent.iterdir() if entry.is_dir()], REMOVE_S)
        _remove(parents)


_numbers = itertools.count()
"""A process may have several backends; each has groups of its own."""
_SHARE = "cpu"
"""The one controller that a sandbox can do without: it may have memory that belongs to no process, which the
others bound."""


def _version_1(root: Path, name: str, wanted: Sequence[str]) -> dict[str, Path]:
    parents: dict[str, Path] = {}
    for controller in wanted:
        directory = root / controller
        if not (directory / "cgroup.procs").exists() or not os.access(directory, os.W_OK):
            continue
        _sweep(directory)
        parent = directory / name
        try:
            parent.mkdir()
            if controller == "cpu":
                # All sandboxes together weigh as much as a busy thread on each core, several times over.
                write_file(parent / "cpu.shares", str(_SHARES * 4 * (os.cpu_count() or 1)))
            parents[controller] = parent
        except OSError:
            _remove([parent])
    if not {*wanted} - {_SHARE} <= parents.keys():
        _remove(list(parents.values()))
        return {}
    return parents


def _version_2(root: Path, name: str, wanted: Sequence[str]) -> dict[str, Path]:
    """Below our own group, if it was delegated to us with the controllers that count."""
    try:
        own = [row[3:] for row in Path("/proc/self/cgroup").read_text().splitlines() if row.startswith("0::")]
        directory = root / own[0].lstrip("/")
        able = (directory / "cgroup.controllers").read_text().split()
        if not {*wanted} - {_SHARE} <= {*able}:
            return {}
        _sweep(directory)
        parent = directory / name
        parent.mkdir()
    except (OSError, IndexError):
        return {}
    handed = " ".join(f"+{controller}" for controller in wanted if controller in able)
    try:
        # No internal processes: a group whose controllers are handed down may hold none itself.
        for group in (directory, parent):
            write_file(group / "cgroup.subtree_control", handed)
    except OSError:
        _remove([parent])
        return {}
    return {"unified": parent}


def _sweep(directory: Path) -> None:
    found = list(directory.glob(f"{_PREFIX}*"))
    alive = live_keys() if found else set[str]()
    for entry in found:
        if entry.name.removeprefix(_PREFIX).partition("-")[0] not in alive:
            with contextlib.suppress(FileNotFoundError):  # another process sweeps as well
                _remove([*(inner for inner in entry.iterdir() if inner.is_dir()), entry])


def _remove(groups: Sequence[Path], within_s: float = 0.0) -> bool:
    """Removes what can be removed. False: after `within_s` the kernel still holds some."""
    end_s = time.monotonic() + within_s
    while groups := [group for group in groups if not _is_removed(group)]:
        if time.monotonic() >= end_s:
            return False
        time.sleep(_PAUSE_S)
    return True


def _is_removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def num_oom_kills(group: Path) -> int:
    """Processes of a group that the kernel has ended because the group's memory was used up; 0 if it is gone.

    Version 2 counts in `memory.events`, version 1 in `memory.oom_control`.
    """
    return _count(group / "memory.events", "oom_kill") or _count(group / "memory.oom_control", "oom_kill")


def reached_limit(group: Path) -> bool:
    """Whether the group itself has been at its limit: not, where the whole machine lacked memory.

    Version 2 counts in `memory.events`, version 1 in `memory.failcnt`.
    """
    if _count(group / "memory.events", "oom") > 0:
        return True
    with contextlib.suppress(OSError, ValueError):
        return int((group / "memory.failcnt").read_text()) > 0
    return False


def _count(file: Path, wanted: str) -> int:
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == wanted:
                return int(value)
    return 0
