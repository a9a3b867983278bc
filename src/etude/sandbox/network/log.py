"""The request log of the egress proxy: one JSON line for each request.

Never logged: headers, bodies, credentials, paths and query strings of URLs.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from etude.errors import SandboxError
from etude.kit.durable import move

Decision = Literal["allowed", "refused"]
MAX_LOG_BYTES = 64 * 2**20
"""Size at which a log file is renamed to FILE.1: sandboxes may send any number of requests."""
_MAX_TEXT_CHARS = 255
_MAX_REFUSED = 8


@dataclass(slots=True)
class RequestRecord:
    """The record of one request: filled in while it is served, logged once at its end."""

    sandbox: str
    time_s: float = field(default_factory=time.time)
    """Seconds since 1970 at which the first byte of the request arrived."""
    method: str = ""
    host: str = ""
    """Canonical host; the received text, without credentials, if it is not valid; empty if there was none."""
    port: int = 0
    decision: Decision = "refused"
    """Whether the rules and the address checks allow it; later failures are in `reason`."""
    reason: str = ""
    """Code for why it was refused, failed or was cut short; empty on success."""
    address: str = ""
    """IP address of the connection, or the address that was refused."""
    status: int = 0
    """HTTP status sent to the client; 0: none."""
    bytes_up: int = 0
    """Bytes sent to the server, including the rewritten head of a plain request."""
    bytes_down: int = 0
    """Bytes received from the server."""
    duration_s: float = 0.0

    def to_line(self) -> str:
        """The record as one line of ASCII JSON with a line end; long texts are cut."""
        values = dataclasses.asdict(self)
        for key, value in values.items():
            if isinstance(value, str):
                values[key] = value[:_MAX_TEXT_CHARS]
        values["time_s"] = round(self.time_s, 6)
        values["duration_s"] = round(self.duration_s, 6)
        return json.dumps(values) + "\n"


class RequestLog:
    """Writes records as lines. Several proxies may share a log, several processes a file."""

    def __init__(self, sink: Callable[[str], None]) -> None:
        """`sink` is called with each line and must not block."""
        self._sink = sink
        self._fd: int | None = None
        self.refused: dict[str, str] = {}
        """`host:port` -> reason, and address if any, of the first few refused requests."""

    @classmethod
    def to_file(cls, path: str | Path, max_bytes: int = MAX_LOG_BYTES) -> RequestLog:
        """A log that appends to a file; a new file is readable by its owner only. Raises SandboxError."""
        try:
            fd = _open(path)
        except OSError as error:
            raise _log_error(error, str(path)) from error

        def write(line: str) -> None:
            if os.fstat(fd).st_size + len(line) > max_bytes:
                _rotate(fd, Path(path))
            _write_line(fd, line)

        log = cls(write)
        log._fd = fd
        return log

    def write(self, record: RequestRecord) -> None:
        """Appends a record. Raises SandboxError if it cannot be written."""
        if record.decision == "refused" and len(self.refused) < _MAX_REFUSED:
            self.refused[f"{record.host}:{record.port}"[:_MAX_TEXT_CHARS]] = (
                f"{record.reason} {record.address}".rstrip()
            )
        try:
            self._sink(record.to_line())
        except OSError as error:
            raise _log_error(error, record.sandbox) from error

    def close(self) -> None:
        """Closes the file if there is one. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            self._sink = _refuse_line
            os.close(fd)


def _refuse_line(line: str) -> None:
    raise OSError("the log is closed")


def _open(path: str | Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _rotate(fd: int, path: Path) -> None:
    """Points `fd` at an empty file at `path`; the first of the writers renames the full one."""
    fcntl.flock(fd, fcntl.LOCK_EX)
    if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
        move(path, path.with_name(f"{path.name}.1"))
    fresh = _open(path)
    os.dup2(fresh, fd, inheritable=False)  # the full file's lock goes with its last descriptor
    os.close(fresh)


def _write_line(fd: int, line: str) -> None:
    """Writes a line in one call, so that lines of several writers never mix."""
    data = line.encode("ascii")
    written = os.write(fd, data)
    if written != len(data):
        raise OSError(f"only {written} of {len(data)} bytes were written")


def _log_error(error: OSError, received: str) -> SandboxError:
    return SandboxError(
        f"the request log cannot be written: {error}",
        field="network.log",
        received=received,
        fix="free disk space, or name a writable path",
    )
