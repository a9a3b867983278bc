"""The sandbox as everything above sees it: what a session may do to its files and processes.

    Sandbox ── files, commands, test runs, diffs ──> call(header, payload, on_output)
       │                                                │
       └── lifecycle: pause, copy, move, end    a machine's channel, HTTP, or another sandbox
           (each kind of sandbox its own)       that it stands around

All backends keep the same contract, which `tests/sandbox/test_contract.py` runs on each; what one cannot do
it says in `capabilities()` and refuses with `Unsupported`.

Paths are relative to the workspace (`/workspace` inside); an absolute path below it is accepted.
What the *agent* did wrong (a missing file, a path that leaves the workspace, a full disk) raises an
`AgentError`; a sandbox that died or does not answer raises `SandboxError`, unless the agent itself
killed it: that is `SandboxKilledByAgentError`, an `AgentError`.
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
    """One sandbox: a workspace, processes around it, and nothing else to be reached from it.

    Any number of calls may be in flight. As a context manager it is killed at the end of the block.
    """

    def __init__(self, sandbox_id: str) -> None:
        self._id = sandbox_id
        self.files = Files(self)
        self.commands = Commands(self)

    @property
    def id(self) -> str:
        """Names it; no other sandbox has the same."""
        return self._id

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.kill()

    @abstractmethod
    async def call(self, header: Header, payload: bytes = b"", on_output: OnOutput | None = None) -> Answer:
        """How everything below that is not lifecycle reaches the program inside: one call; its answer.
        A caller that is cancelled ends the command or test run that it waits for.

        `on_output`: hears what the command prints; that of one in the background also after the answer.
        Raises AgentError for the agent's doing, else SandboxError.
        """

    async def run_tests(self, paths: Sequence[str], timeout_s: float = 2.0) -> TestReport:
        """Runs the `test_*` functions of the named files in a fresh fork of the warm interpreter.

        `timeout_s`: wall time, as for commands: what waits for a processor or a disk at its end, and has had
        less processor time than that, goes on for up to a minute. A guest sees no waits of its host's.
        """
        check_timeout(timeout_s)
        header: Header = {"op": "tests", "paths": list(paths), "timeout_s": timeout_s}
        return tests_report(*await self.call(header), self.id)

    async def run_probes(self, paths: Sequence[str], timeout_s: float = 2.0) -> ProbeReport:
        """Like `run_tests` for probe files: returns what their functions recorded, judges nothing."""
        check_timeout(timeout_s)
        header: Header = {"op": "probes", "paths": list(paths), "timeout_s": timeout_s}
        return probes_report(*await self.call(header), self.id)

    async def diff(self, without: str = "") -> Mapping[str, bytes | None]:
        """Files that differ from the template: new content, or None where a file was deleted. What lies below
        the directory `without` is not looked at.

        Only regular files are carried. Symbolic links, devices, sockets and pipes are excluded: a template
        file replaced by one counts as deleted. Raises DiffTooLargeError.
        """
        header: Header = {"op": "diff", "kill_processes": False, "without": without}
        return changes(*await self.call(header), self.id)

    async def final_diff(self, without: str = "") -> Mapping[str, bytes | None]:
        """Ends every process that the agent started, then as `diff`: nothing can change any more."""
        header: Header = {"op": "diff", "kill_processes": True, "without": without}
        return changes(*await self.call(header), self.id)

    async def changed_root(
        self, skip_tops: Sequence[str] = (), skip_names: Sequence[str] = (), skip_hidden: bool = False
    ) -> dict[str, bool]:
        """Absolute paths outside of the workspace that changed in an image's root: whether each is there.

        Not looked at are entries of the root by `skip_tops`, of any directory by `skip_names`, and with
        `skip_hidden` names that begin with a dot, but `.ssh`.
        Files, directories and links. For a sandbox in which nothing of the agent's runs any more. Without an
        image nothing changes there. Raises DiffTooLargeError.
        """
        header: Header = {"op": "changed", "skip_tops": list(skip_tops), "skip_names": list(skip_names)}
        _, names = await self.call({**header, "skip_hidden": skip_hidden})
        return root_changes(names, self.id)

    async def kinds(self) -> tuple[str, dict[str, str]]:
        """The workspace's real path inside, and the targets of its links by path; files that can be executed
        have none, and stand there with an empty text. Raises DiffTooLargeError."""
        answer, rows = await self.call({"op": "kinds"})
        return text(answer, "workspace", self.id), file_kinds(rows, self.id)

    async def pack(
        self,
        paths: Sequence[str],
        exclude: Sequence[str] = (),
        limit_bytes: int = 32 << 20,
        below: bool = True,
    ) -> bytes:
        """A tar file of absolute paths, as they are; with all that lies `below` directories, but for what
        matches a pattern of `exclude` (as of `tar --exclude`). What is not there is left out.

        The sandbox wrote it: nothing in it is to be trusted. Raises DiffTooLargeError.
        """
        header: Header = {"op": "pack", "below": below, "exclude": list(exclude), "limit_bytes": limit_bytes}
        names = b"".join(os.fsencode(path) + b"\0" for path in paths)
        return (await self.call(header, names))[1]

    # Lifecycle

    @abstractmethod
    async def get_info(self) -> SandboxInfo:
        """What is known of it."""

    @abstractmethod
    async def set_timeout(self, timeout_s: float | None) -> None:
        """The sandbox is killed `timeout_s` seconds from now; None: it is not."""

    @abstractmethod
    async def pause(self, mode: SnapshotKind = "full") -> None:
        """Puts the sandbox to sleep on disk and frees its processor and memory. Idempotent.

        `full` keeps memory and processes, `filesystem` the files alone (processes end). Until `resume`,
        every other call but `kill` and `get_info` raises SandboxStateError. Raises Unsupported.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Wakes a paused sandbox. Idempotent. Raises SnapshotError, and the sandbox stays paused."""

    @abstractmethod
    async def create_snapshot(
        self, kind: SnapshotKind | None = None, name: str | None = None
    ) -> SnapshotInfo:
        """A durable copy of the state; the sandbox goes on. `kind` None: the most that the backend can."""

    @abstractmethod
    async def fork(self, count: int = 1) -> list[Sandbox | SandboxError]:
        """Copies of the present state in `count` new sandboxes; this one goes on.

        What is copied (files alone, or processes too) is `capabilities().fork`. Each place of the result
        holds a sandbox or the error that prevented it.
        """

    @abstractmethod
    async def migrate(self, target: SandboxBackend) -> Sandbox:
        """Moves the sandbox to another backend (another host), and kills it here once it runs there.

        Raises SandboxError if that fails, and then the sandbox still runs here.
        """

    @abstractmethod
    async def kill(self) -> None:
        """Ends every process of the sandbox. Idempotent; returns before the kernel has freed all of it."""


class SandboxBackend(Protocol):
    """Makes sandboxes of one kind."""

    def capabilities(self) -> Capabilities: ...

    async def hello(self) -> Capabilities:
        """The same, asked where it has to be: of a backend behind a connection. Raises SandboxLostError."""
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
        """A sandbox whose workspace holds the template's files, or that continues a snapshot.

        `timeout_s`: time to live; None: until killed. With `snapshot` (its id), template and resources
        are the snapshot's. Raises ResourceError for more than this host has, SnapshotError, Unsupported,
        SandboxError.
        """
        ...

    async def connect(self, sandbox_id: str) -> Sandbox:
        """A living sandbox by its id; a paused one is resumed. Raises SandboxMissingError."""
        ...

    async def list(self) -> list[SandboxInfo]:
        """The living and the paused sandboxes of this backend, oldest first."""
        ...

    async def list_snapshots(self) -> list[SnapshotInfo]:
        """Snapshots of this backend, oldest first; `damaged` says why one cannot be restored."""
        ...

    async def delete_snapshot(self, snapshot: str) -> None:
        """Deletes one. Raises SnapshotError if there is none; sandboxes made from it go on."""
        ...

    async def export_snapshot(self, snapshot: str, target: Path) -> None:
        """Writes a snapshot as one file that `import_snapshot` of another host takes in."""
        ...

    async def import_snapshot(self, source: Path) -> SnapshotInfo:
        """Takes in an exported snapshot, checked. Raises SnapshotError if it is torn or foreign."""
        ...

    async def close(self) -> None:
        """Kills every sandbox and leaves no process, mount or file behind; snapshots stay. Idempotent."""
        ...

    def doctor(self) -> list[str]:
        """What keeps this backend from working here, each with its fix; empty when all is well."""
        ...
