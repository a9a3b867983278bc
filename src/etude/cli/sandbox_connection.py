"""How `etude sandbox` finds a server, and does something with it or with one of its sandboxes."""

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
"""File of a state directory in which a server notes its address."""
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
    """Does something with a server, and lets what lives there live on."""
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
    """Does something with a sandbox by its id."""

    async def connected(remote: RemoteBackend) -> Result:
        return await work(await remote.connect(sandbox))

    return on_server(connected, server, token_file, state)


def find_server(server: str | None, token_file: Path | None, state: Path | None) -> tuple[str, str | None]:
    """(address, token). Raises UserError if no server is named and none runs here, and as `read_secret`."""
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
