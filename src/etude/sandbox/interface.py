"""The sandbox as everything above sees it: what a session may do to its files and processes.

Four protocols (`Files`, `Commands`, `Shells`, `Sandbox`) and the backend that makes sandboxes. All backends
keep the same contract, which `tests/sandbox/test_contract.py` runs on each; what one cannot do it
says in `capabilities()` and refuses with `Unsupported`.

Paths are relative to the workspace (`/workspace` inside); an absolute path below it is accepted.
What the *agent* did wrong (a missing file, a path that leaves the workspace, a full disk) raises an
`AgentError`; a sandbox that died or does not answer raises `SandboxError`, unless the agent itself
killed it: that is `SandboxKilledByAgentError`, an `AgentError`.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from etude.errors import AgentError, SandboxError
from etude.sandbox.template import Template
from etude.sandbox.types import (
    Capabilities,
    CommandResult,
    FileInfo,
    GrepMatch,
    Network,
    ProbeReport,
    ProcessInfo,
    Resources,
    SandboxInfo,
    SnapshotInfo,
    SnapshotKind,
    TestReport,
)

OnOutput = Callable[[int, bytes], None]
"""Called with (1 or 2, bytes) as a command prints to stdout or stderr."""


class Files(Protocol):
    """The workspace's files. Symbolic links that lead out of the workspace are refused."""

    async def read(self, path: str, limit_bytes: int = 1 << 20) -> bytes:
        """The first `limit_bytes` of a file. Raises PathMissingError, PathKindError, PathOutsideError."""
        ...

    async def read_many(
        self, paths: Sequence[str], limit_bytes: int = 1 << 20
    ) -> builtins.list[bytes | AgentError]:
        """The first `limit_bytes` of each file, or what `read` would raise for it; in few round trips.

        Raises SandboxError.
        """
        ...

    async def write(self, path: str, data: str | bytes) -> None:
        """Replaces or makes a file and the directories above it. Raises as `read`, and DiskFullError."""
        ...

    async def write_many(self, files: Mapping[str, str | bytes]) -> None:
        """Writes several files in one round trip, in order; what came before a failure stays written."""
        ...

    async def list(self, path: str = ".", depth: int = 1) -> list[FileInfo]:
        """Entries below a directory down to `depth` levels, sorted by path. Links are not followed."""
        ...

    async def remove(self, path: str) -> None:
        """Removes a file, or a directory with all that it holds; the workspace itself is refused."""
        ...

    async def grep(self, pattern: str, path: str = ".", limit: int = 50) -> list[GrepMatch]:
        """Lines that a Python regular expression matches, in the order of sorted paths.

        Files with NUL bytes and `__pycache__` are passed over. Raises ToolArgumentError for a pattern
        that does not compile or takes too long.
        """
        ...

    async def upload(self, source: Path, path: str) -> int:
        """Copies a host file, or a directory with its regular files, to `path`; returns the bytes copied.

        In pieces: of any size. Symbolic links below `source` are left out. Raises as `write`.
        """
        ...

    async def download(self, path: str, target: Path) -> int:
        """Copies a file or directory of the workspace to the host; returns the bytes copied.

        Whatever the sandbox answers, nothing outside `target` is written: names that climb out are
        refused, links are not followed. Raises as `read`.
        """
        ...


class Command(Protocol):
    """A command in the background."""

    @property
    def pid(self) -> int:
        """Its process id inside the sandbox."""
        ...

    async def wait(self, timeout_s: float | None = None) -> CommandResult:
        """The result once it has ended. Raises TimeoutError after `timeout_s`; the command goes on."""
        ...

    async def send_stdin(self, data: str | bytes, close: bool = False) -> None:
        """Writes to its standard input; `close` ends the input after it."""
        ...

    async def kill(self) -> bool:
        """Ends it and what it started; False if it had ended already."""
        ...


class Commands(Protocol):
    """Shell commands inside the sandbox. Several may run at once."""

    async def run(
        self,
        cmd: str,
        timeout_s: float = 30.0,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limit_bytes: int = 64 << 10,
        stdin: str | bytes | None = None,
        on_output: OnOutput | None = None,
    ) -> CommandResult:
        """Runs `cmd` with `/bin/sh` in the workspace; at the timeout everything it started is killed.

        A process that it leaves in the background lives on. `on_output` sees the output as it comes.
        """
        ...

    async def start(
        self,
        cmd: str,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limit_bytes: int = 64 << 10,
        on_output: OnOutput | None = None,
    ) -> Command:
        """Runs `cmd` in the background, with a standard input that stays open."""
        ...

    async def list(self) -> list[ProcessInfo]:
        """The background commands, those that have ended and were not waited for included."""
        ...

    async def connect(self, pid: int) -> Command:
        """A background command by its process id. Raises ToolArgumentError if there is none."""
        ...

    async def send_stdin(self, pid: int, data: str | bytes) -> None:
        """See Command.send_stdin."""
        ...

    async def kill(self, pid: int) -> bool:
        """See Command.kill. False if there is no such command."""
        ...


class Sandbox(Protocol):
    """One sandbox: a workspace, processes around it, and nothing else to be reached from it."""

    @property
    def id(self) -> str: ...
    @property
    def files(self) -> Files: ...
    @property
    def commands(self) -> Commands: ...

    async def get_info(self) -> SandboxInfo: ...

    async def set_timeout(self, timeout_s: float | None) -> None:
        """The sandbox is killed `timeout_s` seconds from now; None: it is not."""
        ...

    async def create_session(self, cwd: str | None = None, env: Mapping[str, str] | None = None) -> str:
        """Starts a shell that keeps directory, variables, functions and jobs between calls: its id."""
        ...

    async def run_in_session(
        self, session: str, cmd: str, timeout_s: float = 30.0, limit_bytes: int = 64 << 10
    ) -> CommandResult:
        """Runs `cmd` in a session's shell. At the timeout what it started is killed; the shell survives
        unless it is itself what hangs. Raises SessionClosedError if the session has ended.
        """
        ...

    async def close_session(self, session: str) -> None:
        """Ends a session's shell and all that runs in it. Idempotent."""
        ...

    async def run_tests(self, paths: Sequence[str], timeout_s: float = 2.0) -> TestReport:
        """Runs the `test_*` functions of the named files in a fresh fork of the warm interpreter.

        `timeout_s`: wall time, as for commands: what waits for a processor or a disk at its end, and has had
        less processor time than that, goes on for up to a minute. A guest sees no waits of its host's.
        """
        ...

    async def run_probes(self, paths: Sequence[str], timeout_s: float = 2.0) -> ProbeReport:
        """Like `run_tests` for probe files: returns what their functions recorded, judges nothing."""
        ...

    async def diff(self) -> Mapping[str, bytes | None]:
        """Files that differ from the template: new content, or None where a file was deleted.

        Only regular files are carried. Symbolic links, devices, sockets and pipes are excluded: a template
        file replaced by one counts as deleted. Raises DiffTooLargeError.
        """
        ...

    async def final_diff(self) -> Mapping[str, bytes | None]:
        """Ends every process that the agent started, then as `diff`: nothing can change any more."""
        ...

    async def pause(self, mode: SnapshotKind = "full") -> None:
        """Puts the sandbox to sleep on disk and frees its processor and memory. Idempotent.

        `full` keeps memory and processes, `filesystem` the files alone (processes end). Until `resume`,
        every other call but `kill` and `get_info` raises SandboxStateError. Raises Unsupported.
        """
        ...

    async def resume(self) -> None:
        """Wakes a paused sandbox. Idempotent. Raises SnapshotError, and the sandbox stays paused."""
        ...

    async def create_snapshot(
        self, kind: SnapshotKind | None = None, name: str | None = None
    ) -> SnapshotInfo:
        """A durable copy of the state; the sandbox goes on. `kind` None: the most that the backend can."""
        ...

    async def fork(self, count: int = 1) -> list[Sandbox | SandboxError]:
        """Copies of the present state in `count` new sandboxes; this one goes on.

        What is copied (files alone, or processes too) is `capabilities().fork`. Each place of the result
        holds a sandbox or the error that prevented it.
        """
        ...

    async def migrate(self, target: SandboxBackend) -> Sandbox:
        """Moves the sandbox to another backend (another host), and kills it here once it runs there.

        Raises SandboxError if that fails, and then the sandbox still runs here.
        """
        ...

    async def kill(self) -> None:
        """Ends every process of the sandbox. Idempotent; returns before the kernel has freed all of it."""
        ...


class SandboxBackend(Protocol):
    """Makes sandboxes of one kind."""

    def capabilities(self) -> Capabilities: ...

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
