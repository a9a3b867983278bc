"""How much memory a container uses, and the control group that bounds it where one may be made.

What its programs and its files hold lies in one memory file of gVisor's kernel, whose size the host can
read; what they make that kernel hold itself (messages, buffers of sockets, names of files) is its private
memory. `bounding` judges both. In a control group the host's kernel bounds all of it together.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from etude.kit.leftovers import is_owner_alive, owner_tag
from etude.sandbox.oom import num_oom_kills

OVERHEAD_BYTES = 256 << 20
"""What gVisor's kernel, its file server and the program inside may use beside the agent's programs."""
_MEMORY_FILE = "/memfd:runsc-memory"
_PREFIX = "gvisor-etude-"
_REMOVE_S = 5.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SHARES, _WEIGHT = 1024, 100
"""One core's worth, in version 1 and in version 2."""


class MemoryFile:
    """The memory file of one running container."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of(cls, pid: int) -> MemoryFile | None:
        """That of the gVisor kernel with this process id; None if it has ended or cannot be looked into."""
        try:
            for path in Path(f"/proc/{pid}/fd").iterdir():
                if str(path.readlink()).startswith(_MEMORY_FILE):
                    return cls(path)
        except OSError:
            # It has ended, or closed a descriptor meanwhile: whoever asks asks again.
            return None
        return None

    def used_bytes(self) -> int:
        """What programs and files inside hold now; 0 once the container has ended."""
        try:
            return self._path.stat().st_blocks * 512
        except OSError:
            return 0

    def kernel_bytes(self) -> int:
        """What gVisor's kernel holds beside its memory file; 0 once it has ended."""
        try:
            _, resident, shared, *_ = (self._path.parents[1] / "statm").read_text(encoding="ascii").split()
        except (OSError, ValueError):
            return 0
        return (int(resident) - int(shared)) * _PAGE_BYTES


class ControlGroup:
    """A sandbox's memory limit and share of the cores: one directory, or in version 1 one for each of them.

    Removed with the sandbox or, if we die, by the next owner. Unlike the local backend's: gVisor's own
    kernel lives in it too, from its first instruction on.
    """

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    @classmethod
    def make(
        cls, name: str, limit_bytes: int, cpus: float, root: Path = Path("/sys/fs/cgroup")
    ) -> ControlGroup | None:
        """A group with a limit; None where no group may be made: then the watch alone bounds memory."""
        group = cls([])
        memory = {"memory.limit_in_bytes": limit_bytes, "memory.memsw.limit_in_bytes": limit_bytes}
        if group._add(root / "memory", name, memory):
            group._add(root / "cpu", name, {"cpu.shares": max(2, int(_SHARES * cpus))})
            return group
        weight = max(1, min(10_000, int(_WEIGHT * cpus)))
        unified = {"memory.max": limit_bytes, "memory.swap.max": 0, "cpu.weight": weight}
        return group if group._add(root, name, unified) else None

    def _add(self, parent: Path, name: str, values: dict[str, int]) -> bool:
        """Makes a directory below `parent` and writes the values; the first of them must be there."""
        path = parent / f"{_PREFIX}{owner_tag()}-{name}"
        if not (parent / "cgroup.procs").exists() or not os.access(parent, os.W_OK):
            return False
        _sweep(parent)
        try:
            path.mkdir()
            for index, (file, value) in enumerate(values.items()):
                if index == 0 or (path / file).exists():
                    (path / file).write_text(str(value))
        except OSError:
            # Not ours to make, or the controller is not handed down to here.
            _remove(path)
            return False
        self.paths.append(path)
        return True

    @property
    def processes(self) -> list[Path]:
        """Whoever writes its process id into these enters the group, with all that it will start."""
        return [path / "cgroup.procs" for path in self.paths]

    @property
    def num_oom_kills(self) -> int:
        """How many processes the kernel has ended because the group's memory was used up."""
        return num_oom_kills(self.paths[0])

    def remove(self) -> None:
        """Removes the group once its last process has ended. Blocks for a moment; idempotent."""
        for path in self.paths:
            _remove(path)


def _remove(path: Path) -> None:
    end_s = time.monotonic() + _REMOVE_S
    while True:
        try:
            path.rmdir()
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > end_s:
                # Not there, or left to the next owner's sweep.
                return
            time.sleep(0.01)


def _sweep(parent: Path) -> None:
    """Removes the groups of dead owners."""
    for path in parent.glob(f"{_PREFIX}*"):
        if not is_owner_alive(path.name.removeprefix(_PREFIX)):
            _remove(path)
