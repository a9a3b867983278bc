"""Exceptions of sandboxes, by who caused them.

    AgentError                      caused by the agent: an outcome, which stays in the batch
    ├── PathMissingError, PathKindError, PathOutsideError   (ToolArgumentErrors)
    ├── DiskFullError               the sandbox's disk or its inodes are used up
    ├── DiffTooLargeError           more changes than a diff carries
    └── SandboxKilledByAgentError   the agent ended its sandbox's first process
    InfrastructureError
    └── SandboxError                caused by us: never a reward
        ├── SandboxMissingError     no sandbox of that id lives here
        ├── SandboxStateError       paused, or not paused, when the call needs the other
        ├── SandboxLostError        its host or its server died
        ├── SnapshotError           damaged, truncated, not written
        │   ├── SnapshotMissingError    no snapshot of that id is here
        │   └── SnapshotRefusedError    of another kind, version or machine, or an upload that is none
        └── CapacityError           no place became free in time
    UserError
    ├── Unsupported                 this backend cannot do that; names one that can
    │   └── LiveProcessesError      a fork of files alone while the agent's processes run
    └── TemplateError               a template or image that does not exist or does not parse

Each names the sandbox (or snapshot, or template), the value received and the fix.
"""

from __future__ import annotations

from etude.errors import AgentError, SandboxError, ToolArgumentError, UserError


class PathMissingError(ToolArgumentError):
    """The path names nothing."""


class PathKindError(ToolArgumentError):
    """The path names something of another kind: a directory for a file, or the reverse."""


class PathOutsideError(ToolArgumentError):
    """The path leaves the workspace, or is not a valid path."""


class DiskFullError(AgentError):
    """The sandbox's disk or its supply of inodes is used up."""


class DiffTooLargeError(AgentError):
    """The changes of a sandbox exceed what a diff carries."""


class SandboxKilledByAgentError(AgentError):
    """The agent ended its own sandbox: it killed or starved the sandbox's first process."""


class SandboxMissingError(SandboxError):
    """No live sandbox has that id: it never existed, was killed, or its time to live is over."""


class SandboxStateError(SandboxError):
    """The sandbox is paused where it must run, or runs where it must be paused."""


class SandboxLostError(SandboxError):
    """The sandbox's host, hypervisor or server died, and the sandbox with it."""


class SnapshotError(SandboxError):
    """A snapshot that is damaged, truncated, missing, or made by another version or machine."""


class SnapshotMissingError(SnapshotError):
    """No snapshot has that id: it never existed, or was deleted."""


class SnapshotRefusedError(SnapshotError):
    """A snapshot of another kind, version or machine, or an upload that is no whole snapshot."""


class CapacityError(SandboxError):
    """No place for another sandbox became free within the time that the caller gave."""


class Unsupported(UserError):
    """This backend does not support the operation; the fix names one that does. Never a silent downgrade."""


class LiveProcessesError(Unsupported):
    """A fork would copy only the files while processes of the agent run, and would lose these."""


class TemplateError(UserError):
    """A template or image that does not exist, does not parse or does not build."""


_FAULTS: dict[str, type[AgentError]] = {
    "missing": PathMissingError,
    "kind": PathKindError,
    "outside": PathOutsideError,
    "argument": ToolArgumentError,
    "disk": DiskFullError,
    "diff": DiffTooLargeError,
}


def fault_error(fault: tuple[str, str], field: str | None = None, received: object = None) -> AgentError:
    """The typed error for a fault (kind, message) of `inside.faults`."""
    kind, message = fault
    return _FAULTS.get(kind, ToolArgumentError)(message, field=field, received=received)
