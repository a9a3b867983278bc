"""The server as a process: its address, and its end.

The first SIGTERM (or SIGINT) drains: new requests are refused with 503, `/ready` says so, what is being
answered may finish within `drain_s`. Then, or at a second signal, the process ends.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from etude.inference.server.app import build_app
from etude.inference.server.state import ServerState
from etude.serving.listening import check_host
from etude.serving.process import Draining, run_server

SERVER = "inference server"
"""What it calls itself in what it says."""


def check_address(host: str, has_keys: bool) -> None:
    """Raises ConfigError for an address that others reach while there are no keys."""
    check_host(
        host, has_keys, "other hosts can reach this address, and there are no keys", "give --tokens-file"
    )


async def serve(
    state: ServerState,
    listeners: Sequence[socket.socket],
    *,
    drain_s: float = 60.0,
    allowed_hosts: Sequence[str] = (),
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Serves in the state's event loop until a signal ends it; says on stderr when and where it is ready.

    `listeners`: from `open_listeners`, closed at the end; `certificate` and `key`: PEM files, without which
    keys cross the network in the clear. Raises ConfigError.
    """

    await run_server(
        build_app(state),
        SERVER,
        Draining("requests", drain_s, state, lambda: bool(state.live)),
        listeners,
        note=f"it serves {state.model.name} ({state.sink.current() or 'no weights yet'})",
        allowed_hosts=allowed_hosts,
        certificate=certificate,
        key=key,
    )
