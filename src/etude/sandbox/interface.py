"""The sandbox interface: what sessions use to work with a sandbox's files and processes.

    Sandbox ── files, commands, test runs, diffs ──> call(header, payload, on_output)
       │                                                │
       └── lifecycle: pause, copy, move, end    a machine's channel, HTTP, or a wrapped sandbox
           (implemented by each kind)

All backends keep the same contract, which `tests/sandbox/test_contract.py` checks on each; what a backend
does not support is stated in its `capabilities()` and raises `Unsupported`.

Paths are relative to the workspace (`/workspace` inside); an absolute path below it is accepted.
Mistakes of the *agent* (a missing file, a path that leaves the workspace, a full disk) raise `AgentError`; a
sandbox that died or does not answer raises `SandboxError`, or, if the agent killed it,
`SandboxKilledByAgentError` (an `AgentError`).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

from etude.errors import SandboxError
from etude.sandbox.answers import changes, file_kinds, probes_report, root_changes, tests_report, text
from etude.sandbox.calls import Answer
from etude.sandbox.commands import Command, Commands
from etude.sandbox.files import Files
from etude.sandbox.inside.frames import Header
from etude.sandbox.refusals import check_timeout
from etude.sandbox.template import Template
from etude.sandbox.types import (
    Capabilities,
    Network,
    OnOutput,
    ProbeReport,
    Resources,
    SandboxInfo,
    SnapshotInfo,
    SnapshotKind,
    TestReport,
)

__all__ = ["Command", "Commands", "Files", "OnOutput", "Sandbox", "SandboxBackend"]


class Sandbox(ABC):
    """A workspace and its processes, from which nothing else can be reached.

    Any number of calls may be in flight. As a context manager it is killed at the end of the block.
    """

    def __init__(self, sandbox_id: str) -> None:
        self._id = sandbox_id
        self.files = Files(self)
        self.commands = Commands(self)

    @property
    def id(self) -> str:
        """The sandbox's unique id."""
        return self._id

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.kill()

    @abstractmethod
    async def call(self, header: Header, payload: bytes = b"", on_output: OnOutput | None = None) -> Answer:
        """Sends one call to the program inside and returns its answer; every operation below except the
        lifecycle uses it. Cancelling the caller ends the command or test run that it waits for.

        `on_output`: receives the command's output; for one in the background also after the answer. Raises
        AgentError for failures that the agent caused, else SandboxError.
        """

    async def run_tests(self, paths: Sequence[str], timeout_s: float = 2.0) -> TestReport:
        """Runs the `test_*` functions of the named files in a fresh fork of the warm interpreter.

        `timeout_s`: wall time, as for commands: a run that then waits for a processor or a disk, and has used
        less processor time than that, gets up to a minute more. A guest cannot see waits of its host.
        """
        check_timeout(timeout_s)
        header: Header = {"op": "tests", "paths": list(paths), "timeout_s": timeout_s}
        return tests_report(*await self.call(header), self.id)

    async def run_probes(self, paths: Sequence[str], timeout_s: float = 2.0) -> ProbeReport:
        """Like `run_tests` for probe files: returns the values that their functions recorded, ungraded."""
        check_timeout(timeout_s)
        header: Header = {"op": "probes", "paths": list(paths), "timeout_s": timeout_s}
        return probes_report(*await self.call(header), self.id)

    async def diff(self, without: str = "") -> Mapping[str, bytes | None]:
        """Files that differ from the template: new content, or None for a deleted file. Ignores everything
        below the directory `without`.

        Only regular files are included. Symbolic links, devices, sockets and pipes are not: a template file
        replaced by one counts as deleted. Raises DiffTooLargeError.
        """
        header: Header = {"op": "diff", "kill_processes": False, "without": without}
        return changes(*await self.call(header), self.id)

    async def final_diff(self, without: str = "") -> Mapping[str, bytes | None]:
        """Kills every process that the agent started, then returns the `diff`, which can no longer change."""
        header: Header = {"op": "diff", "kill_processes": True, "without": without}
        return changes(*await self.call(header), self.id)

    async def changed_root(
        self, skip_tops: Sequence[str] = (), skip_names: Sequence[str] = (), skip_hidden: bool = False
    ) -> dict[str, bool]:
        """Absolute paths of files, directories and links outside of the workspace that changed in an image's
        root -> whether each exists.

        Skips entries of the root named in `skip_tops`, of any directory named in `skip_names`, and with
        `skip_hidden` names that begin with a dot, except `.ssh`. For a sandbox in which no process of the
        agent runs any more. Without an image nothing changes there. Raises DiffTooLargeError.
        """
        header: Header = {"op": "changed", "skip_tops": list(skip_tops), "skip_names": list(skip_names)}
        _, names = await self.call({**header, "skip_hidden": skip_hidden})
        return root_changes(names, self.id)

    async def kinds(self) -> tuple[str, dict[str, str]]:
        """The workspace's real path inside, and path -> target of its links; executable files are listed with
        an empty target. Raises DiffTooLargeError."""
        answer, rows = await self.call({"op": "kinds"})
        return text(answer, "workspace", self.id), file_kinds(rows, self.id)

    async def pack(
        self,
        paths: Sequence[str],
        exclude: Sequence[str] = (),
        limit_bytes: int = 32 << 20,
        below: bool = True,
    ) -> bytes:
        """A tar file of the given absolute paths; with `below` including the contents of directories, except
        what matches a pattern of `exclude` (as in `tar --exclude`). Missing paths are left out.

        The sandbox wrote it, so its contents are untrusted. Raises DiffTooLargeError.
        """
        header: Header = {"op": "pack", "below": below, "exclude": list(exclude), "limit_bytes": limit_bytes}
        names = b"".join(os.fsencode(path) + b"\0" for path in paths)
        return (await self.call(header, names))[1]

    # Lifecycle

    @abstractmethod
    async def get_info(self) -> SandboxInfo:
        """The sandbox's description and state."""

    @abstractmethod
    async def set_timeout(self, timeout_s: float | None) -> None:
        """Sets the time to live: the sandbox is killed `timeout_s` seconds from now; None: never."""

    @abstractmethod
    async def pause(self, mode: SnapshotKind = "full") -> None:
        """Suspends the sandbox to disk and frees its processor and memory. Idempotent.

        `full` keeps memory and processes, `filesystem` only the files (processes end). Until `resume`, every
        call except `kill` and `get_info` raises SandboxStateError. Raises Unsupported.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Resumes a paused sandbox. Idempotent. Raises SnapshotError; the sandbox then stays paused."""

    @abstractmethod
    async def create_snapshot(
        self, kind: SnapshotKind | None = None, name: str | None = None
    ) -> SnapshotInfo:
        """Saves the state durably; the sandbox keeps running. `kind` None: `full` if supported."""

    @abstractmethod
    async def fork(self, count: int = 1) -> list[Sandbox | SandboxError]:
        """Copies the current state into `count` new sandboxes; this one keeps running.

        What is copied (only files, or processes too) is `capabilities().fork`. Each item of the result is a
        sandbox or the error that prevented it.
        """

    @abstractmethod
    async def migrate(self, target: SandboxBackend) -> Sandbox:
        """Moves the sandbox to another backend (another host), and kills it here once it runs there.

        Raises SandboxError if that fails; the sandbox then still runs here.
        """

    @abstractmethod
    async def kill(self) -> None:
        """Ends every process of the sandbox. Idempotent; returns before the kernel has freed all of it."""


class SandboxBackend(Protocol):
    """Creates and manages sandboxes of one kind."""

    def capabilities(self) -> Capabilities: ...

    async def hello(self) -> Capabilities:
        """The capabilities, queried from the server by a remote backend. Raises SandboxLostError."""
        return self.capabilities()

    async def create(
        self,
        template: Template | None = None,
        resources: Resources | None = None,
        network: Network | None = None,
        timeout_s: float | None = None,
        snapshot: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Sandbox:
        """Creates a sandbox with the template's files in its workspace, or from a snapshot.

        `timeout_s`: time to live; None: until killed. With `snapshot` (its id), template and resources are
        those of the snapshot. Raises ResourceError for more than this host has, SnapshotError, Unsupported,
        SandboxError.
        """
        ...

    async def connect(self, sandbox_id: str) -> Sandbox:
        """A live sandbox by its id; a paused one is resumed. Raises SandboxMissingError."""
        ...

    async def list(self) -> list[SandboxInfo]:
        """The running and paused sandboxes of this backend, oldest first."""
        ...

    async def list_snapshots(self) -> list[SnapshotInfo]:
        """Snapshots of this backend, oldest first; `damaged` says why one cannot be restored."""
        ...

    async def delete_snapshot(self, snapshot: str) -> None:
        """Deletes a snapshot; sandboxes made from it keep running. Raises SnapshotError if there is none."""
        ...

    async def export_snapshot(self, snapshot: str, target: Path) -> None:
        """Writes a snapshot as one file for `import_snapshot` on another host."""
        ...

    async def import_snapshot(self, source: Path) -> SnapshotInfo:
        """Imports and checks an exported snapshot. Raises SnapshotError if it is torn or foreign."""
        ...

    async def close(self) -> None:
        """Kills every sandbox and leaves no process, mount or file behind; snapshots stay. Idempotent."""
        ...

    def doctor(self) -> list[str]:
        """Problems that keep this backend from working here, each with its fix; empty if there are none."""
        ...
