"""Data types of the sandbox: requests, results and status."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from etude.sandbox.inside.testrunner import Value

OnOutput = Callable[[int, bytes], None]
"""Called with (1 or 2, bytes) as a command prints to stdout or stderr."""
SnapshotKind = Literal["filesystem", "full"]
"""`filesystem`: files only. `full`: files, memory and processes."""
SandboxState = Literal["running", "paused", "killed", "lost"]


@dataclass(frozen=True, slots=True)
class Resources:
    """What one sandbox may use. Sizes in bytes, times in seconds."""

    memory_bytes: int = 512 << 20
    """Of all processes together, enforced by a memory cgroup or a guest, or else by a watchdog."""
    num_processes: int = 64
    disk_bytes: int = 64 << 20
    file_bytes: int = 32 << 20
    """Size of any one file."""
    cpu_s: int = 60
    """CPU time of each process."""
    open_files: int = 256
    cpus: float = 1.0
    """Cores: its share under contention, and the number of virtual processors of a guest (rounded up)."""


@dataclass(frozen=True, slots=True)
class Network:
    """What a sandbox can reach besides its own loopback: nothing, or what the allow-list names.

    Always through the egress proxy, which logs every request; the host's loopback and private networks cannot
    be reached whatever the list says.
    """

    allow: tuple[str, ...] = ()
    """`host:port`, `host` (port 443) or `*.domain:port`. Empty: no network at all."""


NO_NETWORK = Network()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend supports. Everything else raises `Unsupported`."""

    backend: str
    isolation: Literal["none", "namespaces", "gvisor", "container", "vm"]
    commands: bool
    """Commands, in the background too."""
    network: bool
    """Network access by an allow-list."""
    images: bool
    """Templates with a root file system of their own."""
    snapshots: frozenset[SnapshotKind]
    pause: frozenset[SnapshotKind]
    fork: SnapshotKind | None
    """What a fork copies."""
    migrate: SnapshotKind | None
    """What a move preserves."""
    neighbours_share: bool = True
    """Whether sandboxes share the kernel's per-user limits (descriptors in flight, pages of pipes, epoll
    watches), so that one can exhaust them for the others."""


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """Description and state of one sandbox. Times are seconds since 1970."""

    id: str
    backend: str
    template: str
    """Name of the template."""
    template_digest: str
    state: SandboxState
    resources: Resources
    network: Network
    created_s: float
    expires_s: float | None
    """When its time to live is over; None: never."""
    parent: str | None = None
    """The sandbox or snapshot it was copied from."""
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """Description of a durable snapshot."""

    id: str
    kind: SnapshotKind
    backend: str
    """Which backend can restore it."""
    sandbox_id: str
    template: str
    created_s: float
    size_bytes: int
    """Bytes on disk."""
    name: str | None = None
    damaged: str | None = None
    """Why it cannot be restored; its kind and backend may then be unknown. None: it is whole."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended. `exit_code` is minus the signal's number where a signal ended it."""

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool
    duration_s: float
    truncated: bool
    """Whether output was dropped because it exceeded the limit."""


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A background command: running, or ended and not yet waited for."""

    pid: int
    """Process id inside the sandbox."""
    cmd: str
    running: bool
    exit_code: int | None


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One entry of a listing."""

    path: str
    kind: str
    """file, dir, symlink or other."""
    size_bytes: int
    """Size of a regular file; 0 for everything else."""


@dataclass(frozen=True, slots=True)
class GrepMatch:
    """One matching line; `line_number` counts from 1, `line` has no line end."""

    path: str
    line_number: int
    line: str


@dataclass(frozen=True, slots=True)
class TestFailure:
    """One failed test: `name` is `test_tally`; `message` is `12 != 14` or `NameError: name 'x' ...`."""

    __test__ = False

    name: str
    message: str


@dataclass(frozen=True, slots=True)
class TestReport:
    """The result of a test run, in the order of the tests in their files."""

    __test__ = False

    passed: tuple[str, ...]
    failed: tuple[TestFailure, ...]
    error: str | None
    """Why there is no complete result: a file that does not import, `timeout`, a runner that died."""
    timed_out: bool
    duration_s: float


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one test function computed when its assertions only recorded (see `environment.grading`)."""

    path: str
    name: str
    values: tuple[Value, ...]
    """Recorded values in order of execution."""
    error: str | None
    """`ExceptionType: text` where the function did not run to its end."""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """All probe results of one run."""

    results: tuple[ProbeResult, ...]
    error: str | None
    timed_out: bool
    duration_s: float
