"""Calls of the program inside a sandbox, independent of their transport.

A call is a header (`op` and its fields) with a payload of bytes, and so is its answer. `Sandbox` makes calls;
a machine's channel, HTTP or a wrapping sandbox transports them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.errors import AgentError, ToolArgumentError
from etude.sandbox.errors import fault_error
from etude.sandbox.inside.frames import FrameError, Header
from etude.sandbox.paths import normal_path

Answer = tuple[Header, bytes]


def prepared(header: Header, workspace: str, environment: Mapping[str, str]) -> Header:
    """A call in the form that the program inside expects: paths relative to the workspace, and the sandbox's
    environment overlaid by the caller's. Raises PathOutsideError."""

    def normal(path: str) -> str:
        return normal_path(path, workspace)

    found = dict(header)
    if "path" in found:
        found["path"] = normal(found["path"])
    if "cwd" in found:
        found["cwd"] = normal(found["cwd"] or ".")
    for name in ("more", "paths"):
        if name in found:
            found[name] = list(map(normal, found[name]))
    if "files" in found:
        found["files"] = [[normal(path), size] for path, size in found["files"]]
    if "env" in found:
        found["env"] = {**environment, **found["env"]}
    return found


def agents_fault(fault: Any, header: Header) -> AgentError:
    """The error for a fault (kind, message) that answers a call, naming the call's field that it is about."""
    kind, message = fault
    if kind == "argument" and "pattern" in header:
        field = "pattern"
    elif "pid" in header:
        field = "pid"
    else:
        path = _path_of(header)
        return fault_error((kind, message), None if path is None else "path", path)
    return fault_error((kind, message), field, header.get(field))


def _path_of(header: Header) -> str | None:
    """The path that a call is about; None if there are several."""
    if header["op"] == "write":
        return header["files"][0][0] if len(header["files"]) == 1 else None
    return None if "more" in header else header.get("path")


def too_large_error(error: FrameError) -> AgentError:
    """The error for a call that does not fit into a frame."""
    return ToolArgumentError(
        f"more than a request holds at once: {error}", field="data", fix="write it in pieces"
    )
