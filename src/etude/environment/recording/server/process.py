"""The server as a process: its tokens, its address, its end.

The first SIGTERM (or SIGINT) drains: no new sessions, `/health` says so, what lives may finish within
`drain_s`. Then, or at a second signal, the process ends. A killed server has stored every session whose
finish it has acknowledged; those that were live are live again at the next start, with every answer that was
told as complete.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

from etude.environment.recording.server.app import build_app
from etude.environment.recording.sessions import Recordings
from etude.serving.listening import check_host, open_listeners
from etude.serving.process import Draining, run_server

DEFAULT_PORT = 8650
SERVER = "recording server"
"""What it calls itself in what it says."""


def check_address(host: str, certificate: Path | None) -> None:
    """Raises ConfigError for an address that others reach, without TLS: keys would cross in the clear."""
    check_host(
        host,
        certificate is not None,
        "keys would cross the network in the clear",
        "give --certificate and --key",
    )


async def serve(
    recordings: Recordings,
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    drain_s: float = 60.0,
    allowed_hosts: Sequence[str] = (),
    certificate: Path | None = None,
    key: Path | None = None,
    listeners: Sequence[socket.socket] | None = None,
    note: str = "",
) -> None:
    """Serves until a signal ends it. Raises ConfigError.

    `port` 0: one that is free. `listeners`: from `open_listeners`, in place of host and port, where the
    address was taken before something slow; they are closed at the end. `note`: said behind the address.
    """
    check_address(host, certificate)
    app = build_app(recordings)
    recovered = await asyncio.to_thread(recordings.recover)
    if recovered:
        note = "; ".join(filter(None, (note, f"took up {recovered} live session{'s' * (recovered != 1)}")))
    draining = Draining("sessions", drain_s, recordings, lambda: len(recordings) > 0)
    taken = open_listeners(host, port) if listeners is None else listeners
    await run_server(
        app,
        SERVER,
        draining,
        taken,
        note=note,
        allowed_hosts=(host, *allowed_hosts),
        certificate=certificate,
        key=key,
    )
