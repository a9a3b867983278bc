"""Connections of `etude sandbox` to a server, or to one of its sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from etude.errors import UserError
from etude.kit.secrets import read_secret_file

if TYPE_CHECKING:
    from etude.sandbox.interface import Sandbox
    from etude.sandbox.remote import RemoteBackend

Result = TypeVar("Result")

NOTE = "server.json"
"""File of a state directory in which a server stores its address."""
ServerOption = Annotated[
    str | None,
    typer.Option("--server", help="Server address (http://HOST:PORT). Default: the one on this machine."),
]
TokenOption = Annotated[Path | None, typer.Option("--token-file", help="File with the token.")]


def on_server(
    work: Callable[[RemoteBackend], Awaitable[Result]],
    server: str | None,
    token_file: Path | None,
    state: Path | None,
    backend: str | None = None,
) -> Result:
    """Calls `work` with a server, whose sandboxes continue afterwards; returns its result."""
    url, token = find_server(server, token_file, state)

    async def connected() -> Result:
        from etude.sandbox.remote import RemoteBackend

        remote = RemoteBackend(url, token, backend)
        try:
            return await work(remote)
        finally:
            await remote.disconnect()

    return asyncio.run(connected())


def in_sandbox(
    work: Callable[[Sandbox], Awaitable[Result]],
    sandbox: str,
    server: str | None,
    token_file: Path | None,
    state: Path | None,
) -> Result:
    """Calls `work` with the sandbox of this id; returns its result."""

    async def connected(remote: RemoteBackend) -> Result:
        return await work(await remote.connect(sandbox))

    return on_server(connected, server, token_file, state)


def find_server(server: str | None, token_file: Path | None, state: Path | None) -> tuple[str, str | None]:
    """(address, token). Raises UserError without a named or a local server, and as `read_secret_file`."""
    from etude.kit.durable import read_record
    from etude.sandbox.machine_backend import default_state_directory

    if server is None:
        row = read_record((state or default_state_directory()) / NOTE)
        if not row:
            raise UserError(
                "no sandbox server runs here",
                field="--server",
                received=server,
                fix="start one with `etude sandbox serve`, or name another with --server",
            )
        server, token_file = row["url"], token_file or Path(row["token_file"])
    return str(server), read_secret_file(token_file, "--token-file")
