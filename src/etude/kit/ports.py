"""A port for a server that is started in a moment, by somebody else."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_RANGE = 32768, 60999
_LOWEST, _HIGHEST = 10_000, 65_535
_ATTEMPTS = 100


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has now.

    The kernel hands it to no one who asks for just any, so that connections which begin before the server
    does cannot take it. Raises OSError where there is none.
    """
    outside = _ports_by_name_only()
    for _ in range(_ATTEMPTS if outside else 0):
        port = secrets.choice(outside)
        try:
            return _bound(port)
        except OSError:
            continue
    return _bound(0)


def _ports_by_name_only() -> list[int]:
    """The larger of the two ranges beside that from which the kernel chooses."""
    try:
        first, last = (int(word) for word in _RANGE_FILE.read_text().split())
    except (OSError, ValueError):
        first, last = _USUAL_RANGE
    return list(max(range(_LOWEST, first), range(last + 1, _HIGHEST + 1), key=len))


def _bound(port: int) -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", port))
        return int(found.getsockname()[1])
