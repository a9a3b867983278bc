"""Normalises paths relative to a workspace, and refuses those outside of it."""

from __future__ import annotations

from etude.errors import AgentError
from etude.sandbox.errors import PathOutsideError, fault_error
from etude.sandbox.inside import faults

WORKSPACE = "/workspace"
"""The path of the workspace inside a sandbox, unless its template's image sets another."""


def normal_path(path: str, workspace: str = WORKSPACE) -> str:
    """The normalised workspace-relative form of `path`; `.` is the workspace itself.

    Raises PathOutsideError for a path outside the workspace or an invalid one.
    """
    if "\0" in path:
        raise PathOutsideError("a path has no NUL characters", field="path", received=path)
    if path.startswith("/"):
        if path != workspace and not path.startswith(workspace.rstrip("/") + "/"):
            raise _outside(path)
        path = path[len(workspace) :]
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            if not parts:
                raise _outside(path)
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts) or "."


def _outside(path: str) -> AgentError:
    return fault_error(faults.OUTSIDE, "path", path)
