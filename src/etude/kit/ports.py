"""Finds a free port for a server that another process is about to start."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_RANGE = 32768, 60999
_LOWEST, _HIGHEST = 10_000, 65_535
_ATTEMPTS = 100


def free_port() -> int:
    """A port of 127.0.0.1 that is free now.

    It lies outside the kernel's ephemeral range, so that outgoing connections cannot take it before the
    server starts. Raises OSError if there is none.
    """
    outside = _ports_outside_ephemeral()
    for _ in range(_ATTEMPTS if outside else 0):
        port = secrets.choice(outside)
        try:
            return _bound(port)
        except OSError:
            continue
    return _bound(0)


def _ports_outside_ephemeral() -> list[int]:
    """The larger of the two ranges below and above the kernel's ephemeral range."""
    try:
        first, last = (int(word) for word in _RANGE_FILE.read_text().split())
    except (OSError, ValueError):
        first, last = _USUAL_RANGE
    return list(max(range(_LOWEST, first), range(last + 1, _HIGHEST + 1), key=len))


def _bound(port: int) -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", port))
        return int(found.getsockname()[1])
