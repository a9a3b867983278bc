"""Control groups of sandboxes, where this process may create them: memory and process limits, CPU weight.

A sandbox under gVisor has no limit of processes: those of its kernel are not the agent's.

Version 1 (one tree for each controller, as root) and version 2 (a delegated subtree) are supported. Where
neither is writable there are no groups, and the watchdog inside each sandbox bounds its memory instead.

    <controller>/etude-<owner's key>-<number>/<sandbox>      version 1: the fork server in the directory above
    etude-<owner's key>-<number>/server, .../<sandbox>       version 2: the fork server in a group of its own

A sandbox's control group namespace begins at its own group: it does not see the groups above.

Groups outlive the process that created them; the next start removes those of dead owners.
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
"""Memory of the server inside, and of the kernel for the sandbox."""
_SHARES, _WEIGHT = 1024, 100
"""One core's worth, in version 1 and in version 2."""
_TCP_BYTES = 32 << 20
"""Version 1 limits the buffers of connections separately."""
_OPTIONAL = (
    "cpu.weight",
    "memory.kmem.tcp.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.swap.max",
)
"""Files that are not delegated everywhere, or not in every kernel."""
_SERVER = "server"
REMOVE_S = 10.0
"""How long to wait until the kernel has ended all processes of a group."""
_REMOVE_POLL_S = 0.005


class ControlGroups:
    """The groups of one backend's sandboxes."""

    def __init__(self, parents: dict[str, Path], kernel_bytes: int = 0) -> None:
        """`parents`: controller -> this owner's directory; all the same one in version 2. `kernel_bytes`: of
        a kernel that runs in each group as a program, such as gVisor's; 0: there is none."""
        self._parents = parents
        self._kernel_bytes = kernel_bytes

    @classmethod
    def open(cls, root: Path = _ROOT, kernel_bytes: int = 0) -> ControlGroups | None:
        """Creates this backend's groups and removes those of dead owners. None where that is not allowed.

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
        """Creates the groups of one sandbox, without limits. Raises OSError.

        Blocks while any process enters a group, as all methods but `limit` do: call them in a thread.
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

    def procs_files(self, name: str) -> list[Path]:
        """`cgroup.procs` files: a process enters the sandbox's groups by writing its id into all of them."""
        return [parent / name / "cgroup.procs" for parent in self._parents.values()]

    def admit_fork_server(self, pid: int) -> None:
        """Moves a fork server and its parent `pid`, before there are sandboxes. Raises OSError."""
        name = ""
        if "unified" in self._parents:
            # A group of version 2 that delegates controllers cannot contain processes itself.
            name = _SERVER
            (self._parents["unified"] / name).mkdir(exist_ok=True)
        # In a pid namespace orphans stay below its first process.
        for member in (pid, *descendants(read_table(), [pid])):
            self.enter(name, member)

    def enter(self, name: str, pid: int) -> None:
        """Moves one process, and those that it will start, into a sandbox's groups. Raises OSError.

        Blocks for 0.1 to 20 ms: the kernel waits until no process of the machine is being forked.
        """
        for procs_file in self.procs_files(name):
            write_file(procs_file, str(pid))

    def remove(self, name: str, within_s: float = 0.0) -> bool:
        """Removes a sandbox's groups. False if the kernel still holds one after `within_s`, because not all
        of its processes have ended."""
        return _remove([parent / name for parent in self._parents.values()], within_s)

    def num_killed_for_memory(self, name: str) -> int:
        """Number of processes of a sandbox that the kernel killed because the group was out of memory."""
        parent = self._parents.get("memory") or self._parents.get("unified")
        if parent is None:
            return 0
        return num_oom_kills(parent / name)

    def was_killed_below_limit(self, name: str) -> bool:
        """Whether the kernel killed processes of a sandbox that was below its own memory limit."""
        parent = self._parents.get("memory") or self._parents.get("unified")
        return parent is not None and num_oom_kills(parent / name) > 0 and not reached_limit(parent / name)

    def close(self) -> None:
        """Removes all groups. Those that the kernel still holds after `REMOVE_S` are left to the sweep of the
        next owner."""
        parents = [parent for parent in self._parents.values() if parent.is_dir()]
        _remove([entry for parent in parents for entry in parent.iterdir() if entry.is_dir()], REMOVE_S)
        _remove(parents)


_numbers = itertools.count()
"""Numbers of the backends of this process; each has groups of its own."""
_SHARE = "cpu"
"""The only optional controller: the others bound memory that belongs to no process, which is allowed only
with groups."""


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
                # All sandboxes together weigh as much as four busy threads on each core.
                write_file(parent / "cpu.shares", str(_SHARES * 4 * (os.cpu_count() or 1)))
            parents[controller] = parent
        except OSError:
            _remove([parent])
    if not {*wanted} - {_SHARE} <= parents.keys():
        _remove(list(parents.values()))
        return {}
    return parents


def _version_2(root: Path, name: str, wanted: Sequence[str]) -> dict[str, Path]:
    """Creates this owner's group below its own one, if that is delegated with the needed controllers."""
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
        # A group whose controllers are delegated may contain no processes itself.
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
            with contextlib.suppress(FileNotFoundError):  # removed by the sweep of another process
                _remove([*(inner for inner in entry.iterdir() if inner.is_dir()), entry])


def _remove(groups: Sequence[Path], within_s: float = 0.0) -> bool:
    """Removes groups. False if the kernel still holds some after `within_s`."""
    end_s = time.monotonic() + within_s
    while groups := [group for group in groups if not _is_removed(group)]:
        if time.monotonic() >= end_s:
            return False
        time.sleep(_REMOVE_POLL_S)
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
    """Number of processes of a group that the kernel killed for lack of memory; 0 without such a group.

    Version 2 counts in `memory.events`, version 1 in `memory.oom_control`.
    """
    return _count(group / "memory.events", "oom_kill") or _count(group / "memory.oom_control", "oom_kill")


def reached_limit(group: Path) -> bool:
    """Whether the group itself reached its memory limit, as opposed to the whole machine lacking memory.

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
