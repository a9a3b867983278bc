"""The server as a process: its address, its end.

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
from etude.serving.listening import check_host
from etude.serving.process import Draining, run_server

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
    listeners: Sequence[socket.socket],
    *,
    drain_s: float = 60.0,
    allowed_hosts: Sequence[str] = (),
    certificate: Path | None = None,
    key: Path | None = None,
    note: str = "",
) -> None:
    """Serves until a signal ends it; says on stderr when and where it is ready, and `note`.

    `listeners`: from `open_listeners`, closed at the end; see `check_address`. Raises ConfigError.
    """
    recovered = await asyncio.to_thread(recordings.recover)
    if recovered:
        note = "; ".join(filter(None, (note, f"took up {recovered} live session{'s' * (recovered != 1)}")))
    await run_server(
        build_app(recordings),
        SERVER,
        Draining("sessions", drain_s, recordings, lambda: len(recordings) > 0),
        listeners,
        note=note,
        allowed_hosts=allowed_hosts,
        certificate=certificate,
        key=key,
    )
