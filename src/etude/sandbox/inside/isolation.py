"""The fork server's kinds of isolation: namespaces, or plain folders (no isolation)."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from etude.sandbox.inside import ids, kernel, layers, namespaces
from etude.sandbox.inside.filesystem import Workspace
from etude.sandbox.inside.gathering import ChangeCollector
from etude.sandbox.inside.processes import DescendantProcesses, NamespaceProcesses, Processes, reap
from etude.sandbox.inside.socket_memory import SocketMemory, limit_buffers

_CLOSE_S = 5.0
"""How long sandboxes without namespaces may take to end their processes and remove their folders."""


Entered = tuple[Workspace, Processes, int, SocketMemory | None, ChangeCollector | None]
"""The parts of an entered sandbox: workspace, processes, and a descriptor of the directory with its changes
(`root` and `tmp`). Then the counter of socket memory (which control groups do not count, or not for
connections), and the collector of changes, if the root is an image's."""


class Isolation:
    """A kind of isolation. Runs in the fork server, and in the first process of each sandbox."""

    files = namespaces.FILES
    """Directory of `templates` and `layers`."""

    def clone(self) -> int:
        """Starts a sandbox's first process: 0 in the child, its pid in the parent."""
        return os.fork()

    def assign_ids(self, pid: int) -> list[int]:
        """In the parent: assigns a user; returns the descriptors for `enter`. Raises OSError."""
        return []

    def enter(self, plan: namespaces.Plan, request: dict[str, Any], descriptors: list[int]) -> Entered:
        """In the child: sets up the sandbox. Raises OSError."""
        raise NotImplementedError

    def on_ended(self, pid: int) -> None:
        """In the parent: called when the first process, and so its sandbox, has ended."""

    def clean_up(self) -> None:
        """In the child: called when it stops serving."""

    def close(self) -> None:
        """In the fork server: called when it stops serving."""


class Namespaces(Isolation):
    """Sandboxes in namespaces of their own; the kernel removes these and kills the remaining processes."""

    def __init__(self, users: ids.Users) -> None:
        self._users = users

    def clone(self) -> int:
        pid = namespaces.clone_sandbox()
        if pid == 0:
            self._users.close()
        return pid

    def assign_ids(self, pid: int) -> list[int]:
        return self._users.assign_ids(pid, namespaces.FILES_RO)

    def on_ended(self, pid: int) -> None:
        self._users.release(pid)

    def enter(self, plan: namespaces.Plan, request: dict[str, Any], descriptors: list[int]) -> Entered:
        limits = request["limits"]
        uid, base, disk, before = namespaces.enter_sandbox(plan, descriptors)
        if plan.has_image:
            sys.path[:] = [entry.replace(sys.base_prefix, namespaces.PYTHON, 1) for entry in sys.path]
        workspace = Workspace(plan.workspace, None if plan.in_place else base, plan.passed_over)
        limit_buffers()
        sockets = SocketMemory()
        bounds = (limits["num_processes"], limits["file_bytes"])
        namespaces.lock_down(uid, *bounds, request["emulate_root"], request["has_groups"])
        collector = ChangeCollector(plan.workspace, before)
        return workspace, NamespaceProcesses(), disk, sockets, collector


class Folders(Isolation):
    """Sandboxes that are folders below `base`, all of one user. No isolation."""

    def __init__(self, base: str) -> None:
        self.files = os.path.join(base, "files")
        for name in ("templates", "layers"):
            os.makedirs(os.path.join(self.files, name))
        self._base = base
        self._disk = ""
        self._processes = DescendantProcesses()

    def enter(self, plan: namespaces.Plan, request: dict[str, Any], descriptors: list[int]) -> Entered:
        os.setsid()
        kernel.adopt_orphans()
        self._disk = os.path.join(self._base, f"sandbox-{os.getpid()}")
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        if plan.in_place:
            os.mkdir(self._disk)
            os.chdir(plan.workspace)
            workspace = Workspace(plan.workspace, None, plan.passed_over)
            return workspace, self._processes, os.open(self._disk, flags), None, None
        workspace = os.path.join(self._disk, layers.ROOT)
        template = os.path.join(self.files, "templates", plan.digest)
        # Here a saved layer contains the whole workspace, not only the changes.
        saved = [os.path.join(self.files, "layers", layer, layers.ROOT) for layer in plan.layers[:1]]
        os.makedirs(workspace)
        os.mkdir(os.path.join(self._disk, layers.TEMPORARY))
        os.chdir(workspace)
        layers.copy_tree(os.open((saved or [template])[0], flags), os.open(workspace, flags))
        disk = os.open(self._disk, flags)
        return Workspace(workspace, os.open(template, flags)), self._processes, disk, None, None

    def clean_up(self) -> None:
        self._processes.kill_all()
        if self._disk:
            discard(self._disk)

    def close(self) -> None:
        end_s = time.monotonic() + _CLOSE_S
        while reap()[1] and time.monotonic() < end_s:
            time.sleep(0.01)
        self._processes.kill_all()
        discard(self._base)


def discard(directory: str) -> None:
    """Removes a directory; a failure is logged and leaves it until the fork server ends."""
    try:
        layers.remove_tree(directory)
    except OSError as error:
        print(f"{directory} cannot be removed: {error}", file=sys.stderr, flush=True)
