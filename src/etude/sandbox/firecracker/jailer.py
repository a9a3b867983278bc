"""Where a Firecracker process lives: its directory, the files in it, and the command line that starts it.

With a jailer the directory becomes the process's root (`<base>/<name of the program>/<id>/root`), entered
as a plain user in a control group; without one it is only the working directory. Either way Firecracker
is given relative names, which a snapshot remembers: every copy finds its own files under them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.errors import ConfigError
from etude.sandbox.firecracker.memory import copy_sparse, link_or_copy
from etude.sandbox.types import Resources

API_SOCKET, VSOCK, PAGE_SOCKET = "api.sock", "v.sock", "uffd.sock"
KERNEL, ROOT_DISK, SCRATCH_DISK = "kernel", "rootfs", "scratch"
STATE, MEMORY = "vmstate", "memory"
_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
_CGROUPS = Path("/sys/fs/cgroup")
_OVERHEAD_BYTES = 64 << 20
"""Of Firecracker itself, beside the guest's memory."""


@dataclass(frozen=True)
class Jail:
    """How the jailer is used."""

    program: Path = Path("/usr/bin/jailer")
    uid: int = 65534
    gid: int = 65534
    cgroup_version: int = 2
    """0: none are made."""
    parent_cgroup: str = "etude"
    arguments: tuple[str, ...] = ()
    """More for the jailer, such as `--new-pid-ns` or `--netns=PATH`."""


class Cell:
    """The directory of one Firecracker process, from `make` to `remove`."""

    def __init__(self, base: Path, name: str, program: Path, jail: Jail | None) -> None:
        """Raises ConfigError for a name or a program that the jailer refuses."""
        if not _ID.fullmatch(name):
            raise ConfigError(
                "no id for a jail", field="sandbox", received=name, fix="letters, digits, hyphens"
            )
        if jail is not None and "firecracker" not in program.name:
            raise ConfigError(
                "the jailer only starts programs with firecracker in their name",
                field="firecracker.program",
                received=program.name,
                fix="rename it",
            )
        self.name = name
        self._base = base
        self._program = program
        self._jail = jail
        self.root = base / program.name / name / "root"

    def make(self) -> None:
        """Makes the directory, where the jailer expects it. Raises OSError."""
        self.root.mkdir(parents=True, mode=0o755)

    def path(self, name: str) -> Path:
        """A file of the process as we see it."""
        return self.root / name

    def place(self, source: Path, name: str) -> None:
        """Puts a file in that nobody changes: as another name of it where possible. Raises OSError."""
        link_or_copy(source, self.path(name))

    def place_copy(self, source: Path, name: str) -> None:
        """Puts a copy in that the process may write. Raises OSError."""
        copy_sparse(source, self.path(name))
        self.own(name)

    def own(self, name: str) -> None:
        """Gives a file to the user as whom Firecracker runs."""
        if self._jail is not None:
            os.chown(self.path(name), self._jail.uid, self._jail.gid)

    def command(self, resources: Resources) -> list[str]:
        """The command line; to be run with `root` as working directory."""
        own = ["--api-sock", API_SOCKET]
        if self._jail is None:
            return [str(self._program), "--id", self.name, *own]
        jail = self._jail
        command = [str(jail.program), "--id", self.name, "--exec-file", str(self._program)]
        command += ["--uid", str(jail.uid), "--gid", str(jail.gid), "--chroot-base-dir", str(self._base)]
        command += _cgroup_arguments(jail, resources)
        return [*command, *jail.arguments, "--", *own]

    def remove(self) -> None:
        """Removes the directory, and the control group that the jailer made. Idempotent."""
        shutil.rmtree(self.root.parent, ignore_errors=True)
        if self._jail is not None and self._jail.cgroup_version == 2:
            # A group that is still emptying is the jailer's mistake to show, not a reason to fail here.
            with contextlib.suppress(OSError):
                (_CGROUPS / self._jail.parent_cgroup / self.name).rmdir()


def _cgroup_arguments(jail: Jail, resources: Resources) -> Sequence[str]:
    if not jail.cgroup_version:
        return []
    arguments = ["--cgroup-version", str(jail.cgroup_version), "--parent-cgroup", jail.parent_cgroup]
    memory_bytes = resources.memory_bytes + _OVERHEAD_BYTES
    period = 100_000
    quota = int(resources.cpus * period)
    values = {"memory.max": str(memory_bytes), "cpu.max": f"{quota} {period}"}
    if jail.cgroup_version == 1:
        values = {
            "memory.limit_in_bytes": str(memory_bytes),
            "cpu.cfs_period_us": str(period),
            "cpu.cfs_quota_us": str(quota),
        }
    for name, value in values.items():
        arguments += ["--cgroup", f"{name}={value}"]
    return arguments
