"""`etude sandbox serve` and its client commands: create, list, exec, fork, pause, and so on.

A server stores its address in `server.json` of the state directory, where the client commands find it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from etude.cli.exits import error_console
from etude.cli.output import JsonOption, output_console, print_json, print_table
from etude.cli.sandbox_options import (
    AllowOption,
    AllowPrivateOption,
    CommandArgument,
    CommandTimeOption,
    DirectoryOption,
    DiskOption,
    ImageOption,
    MemoryOption,
    StateOption,
    exit_code,
    forward_output,
    make_network,
    make_resources,
    make_template,
    shell_command,
)
from etude.cli.serving_options import AllowedHostOption, CertificateOption, KeyOption
from etude.errors import SandboxError, UserError
from etude.kit.secrets import read_secret_file

if TYPE_CHECKING:
    from etude.sandbox.interface import Sandbox
    from etude.sandbox.remote import RemoteBackend

Result = TypeVar("Result")

_NOTE = "server.json"
"""File of a state directory in which a server stores its address."""
ServerOption = Annotated[
    str | None,
    typer.Option("--server", help="Server address (http://HOST:PORT). Default: the one on this machine."),
]
TokenOption = Annotated[Path | None, typer.Option("--token-file", help="File with the token.")]
BackendOption = Annotated[
    str | None, typer.Option("--backend", help="Backend to use. Default: the server's first.")
]
IdArgument = Annotated[str, typer.Argument(metavar="SANDBOX", help="Id of the sandbox.")]


def add_server_commands(app: typer.Typer) -> None:
    """Adds the commands of this file to `etude sandbox`."""
    app.command("serve")(serve_command)
    app.command("create")(create_command)
    app.command("list")(list_command)
    app.command("exec", context_settings={"allow_interspersed_args": False})(exec_command)
    app.command("fork")(fork_command)
    app.command("pause")(pause_command)
    app.command("resume")(resume_command)
    app.command("snapshot")(snapshot_command)
    app.command("snapshots")(snapshots_command)
    app.command("migrate")(migrate_command)
    app.command("kill")(kill_command)


def serve_command(
    backends: Annotated[
        list[str] | None,
        typer.Option("--backend", help="Backend to offer. Repeatable; the first is the default."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Use TLS for others than loopback.")
    ] = "127.0.0.1",
    allowed_host: AllowedHostOption = None,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8642,
    allow_private: AllowPrivateOption = None,
    max_live: Annotated[int, typer.Option(min=1, help="Most running sandboxes per backend.")] = 256,
    token_file: TokenOption = None,
    peers: Annotated[
        list[str] | None, typer.Option("--peer", help="Server to which sandboxes may move. Repeatable.")
    ] = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
    state: StateOption = None,
) -> None:
    """Serve sandboxes to other processes and hosts until SIGTERM."""
    from etude.kit.leftovers import owner_tag
    from etude.sandbox.backends import open_backend
    from etude.sandbox.machine_backend import default_state_directory
    from etude.sandbox.migration import clear_litter
    from etude.sandbox.pool import PooledBackend
    from etude.sandbox.remote.connection import check_address
    from etude.sandbox.server import read_token, serve

    for peer in peers or ():
        check_address(peer, "--peer")
    root = state or default_state_directory()
    root.mkdir(parents=True, exist_ok=True)
    token_path = token_file or root / "server-token"
    token = read_token(token_path)
    opened = {
        name: PooledBackend(open_backend(name, state, allow_private or ()), max_live)
        for name in backends or ["local"]
    }
    scheme = "https" if certificate else "http"
    note = root / _NOTE
    _refuse_second(note)
    row = {"url": f"{scheme}://{host}:{port}", "token_file": str(token_path), "owner": owner_tag()}
    clear_litter(root)
    note.write_text(json.dumps(row))
    try:
        serve(
            opened,
            host=host,
            port=port,
            token=token,
            peers=tuple(peers or ()),
            spool=root / "spool",
            allowed_hosts=allowed_host or (),
            certificate=certificate,
            key=key,
        )
    finally:
        note.unlink(missing_ok=True)


def _refuse_second(note: Path) -> None:
    """Raises UserError if another server runs on the same state directory."""
    from etude.kit.durable import read_record
    from etude.kit.leftovers import is_owner_alive

    row = read_record(note)
    if is_owner_alive(str(row.get("owner", ""))):
        raise UserError(
            "a server already runs on this state directory",
            field="--state",
            received=row["url"],
            fix="use that one, or give this one a state directory of its own",
        )


def create_command(
    backend: BackendOption = None,
    directory: DirectoryOption = None,
    image: ImageOption = None,
    snapshot: Annotated[str | None, typer.Option("--snapshot", help="Snapshot to start from.")] = None,
    allow: AllowOption = None,
    memory_mb: MemoryOption = 512,
    disk_mb: DiskOption = 256,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", help="Lifetime of the sandbox in seconds.")
    ] = None,
    server: ServerOption = None,
    token_file: TokenOption = None,
    state: StateOption = None,
) -> None:
    """Create a sandbox on the server and print its id."""

    async def work(remote: RemoteBackend) -> str:
        if snapshot is not None:
            if directory or image or allow or (memory_mb, disk_mb) != (512, 256):
                raise UserError(
                    "a snapshot brings its own files, image, network and resources",
                    field="--snapshot",
                    received=snapshot,
                    fix="leave --dir, --image, --allow, --memory-mb and --disk-mb out",
                )
            return (await remote.create(snapshot=snapshot, timeout_s=timeout_s)).id
        template = make_template(directory, image, state)
        resources = make_resources(memory_mb, disk_mb)
        return (await remote.create(template, resources, make_network(allow), timeout_s)).id

    typer.echo(_on_server(work, server, token_file, state, backend))


def list_command(
    as_json: JsonOption = False,
    backend: BackendOption = None,
    server: ServerOption = None,
    token_file: TokenOption = None,
    state: StateOption = None,
) -> None:
    """List the server's sandboxes."""
    infos = _on_server(lambda remote: remote.list(), server, token_file, state, backend)
    if as_json:
        print_json([asdict(info) for info in infos])
        return
    names = ("id", "backend", "state", "template", "parent")
    print_table(output_console(), names, ([getattr(info, name) for name in names] for info in infos))


def exec_command(
    sandbox: IdArgument,
    command: CommandArgument,
    timeout_s: CommandTimeOption = 600.0,
    server: ServerOption = None,
    token_file: TokenOption = None,
    state: StateOption = None,
) -> None:
    """Run a command in a sandbox of the server.

    The exit code is that of the command, or 124 if it ran into the timeout.
    """

    async def work(found: Sandbox) -> int:
        result = await found.commands.run(shell_command(command), timeout_s, on_output=forward_output)
        return exit_code(result)

    raise typer.Exit(_in_sandbox(work, sandbox, server, token_file, state))


def fork_command(
    sandbox: IdArgument,
    count: Annotated[int, typer.Option(min=1, max=1000, help="Number of copies.")] = 1,
    server: ServerOption = None,
    token_file: TokenOption = None,
    state: StateOption = None,
) -> None:
    """Copy a running sandbox and print the ids of the copies.

    The exit code is 3 if a copy could not be made.
    """
    copies = _in_sandbox(lambda found: found.fork(count), sandbox, server, token_file, state)
    for copy in copies:
        if not isinstance(copy, SandboxError):
            typer.echo(copy.id)
    for copy in copies:
        if isinstance(copy, SandboxError):
            raise copy


def pause_command(
    sandbox: IdArgument,
    mode: Annotated[
        Literal["full", "filesystem"] | None,
        typer.Option(help="What to keep; full: memory and processes too. Default: all that the backend can."),
    ] = None,
    server: ServerOption = None,
    token_file: TokenOption = None,
    state: StateOption = None,
) -> None:
    """Write a sandbox to disk and stop it; print what was kept."""
    info = _in_sandbox(lambda found: found.get_info(), sandbox, server, token_file, state)
    able = _on_server(lambda remote: remote.hello(), server, token_file, state, info.backend)
    kind = mode or ("full" if "full" in able.pause else "filesystem")
    _in_sandbox(lambda found: found.pause(kind), sandbox, server, token_file, state)
    error_console().print("kept: files" + (", memory and processes" if kind == "full" else " only"))


def resume_command(
    sandbox: IdArgument,
    server: ServerOption = None,
    token_file: TokenOption = None,
    state: StateOption = None,
) -> None:
    """Start a paused sandbox again. Using it starts it, too."""
    _in_sandbox(lambda found: found.resume(), sandbox, server, token_file, state)


def snapshot_command(
    sandbox: IdArgument,
    name: Annotated[str | None, typer.Option(help="Name under which the snapshot is listed.")] = None,
    server: ServerOption = None,
    token_file: TokenOption = None,
    state: StateOption = None,
) -> None:
    """Store a copy of a sandbox and print its id.

    `etude sandbox create --snapshot ID` starts a new sandbox from it.
    """
    info = _in_sandbox(lambda found: found.create_snapshot(name=name), sandbox, server, token_file, state)
    typer.echo(info.id)


def snapshots_command(
    as_json: JsonOption = False,
    delete: Annotated[str | None, typer.Option("--delete", metavar="ID", help="Snapshot to delete.")] = None,
    server: ServerOption = None,
    token_file: TokenOption = None,
    state: StateOption = None,
) -> None:
    """List the server's snapshots, or delete one."""

    async def work(remote: RemoteBackend) -> list[Any]:
        if delete is not None:
            await remote.delete_snapshot(delete)
            return []
        return await remote.list_snapshots()

    infos = _on_server(work, server, token_file, state)
    if as_json:
        print_json([asdict(info) for info in infos])
        return
    for info in infos:
        kind = info.kind if info.damaged is None else "damaged"
        typer.echo(f"{info.id}  {kind}  {info.size_bytes / 1e6:.1f} MB  {info.name or ''}".rstrip())
    for info in infos:
        if info.damaged is not None:
            error_console().print(f"{info.id}: {info.damaged}; delete it with --delete", markup=False)


def migrate_command(
    sandbox: IdArgument,
    target: Annotated[str, typer.Argument(help="Address of the other server, a peer of this one.")],
    target_token_file: Annotated[
        Path | None, typer.Option("--target-token-file", help="File with the other server's token.")
    ] = None,
    server: ServerOption = None,
    token_file: TokenOption = None,
    state: StateOption = None,
) -> None:
    """Move a sandbox to another server and print its new id."""
    token = read_secret_file(target_token_file, "--target-token-file")

    async def work(found: Sandbox) -> str:
        from etude.sandbox.remote import RemoteBackend

        other = RemoteBackend(target, token)
        try:
            return (await found.migrate(other)).id
        finally:
            await other.disconnect()

    typer.echo(_in_sandbox(work, sandbox, server, token_file, state))


def kill_command(
    sandbox: IdArgument,
    server: ServerOption = None,
    token_file: TokenOption = None,
    state: StateOption = None,
) -> None:
    """Kill a sandbox and delete its files."""
    _in_sandbox(lambda found: found.kill(), sandbox, server, token_file, state)


def _on_server(
    work: Callable[[RemoteBackend], Awaitable[Result]],
    server: str | None,
    token_file: Path | None,
    state: Path | None,
    backend: str | None = None,
) -> Result:
    """Calls `work` with a server, whose sandboxes continue afterwards; returns its result."""
    url, token = _find_server(server, token_file, state)

    async def connected() -> Result:
        from etude.sandbox.remote import RemoteBackend

        remote = RemoteBackend(url, token, backend)
        try:
            return await work(remote)
        finally:
            await remote.disconnect()

    return asyncio.run(connected())


def _in_sandbox(
    work: Callable[[Sandbox], Awaitable[Result]],
    sandbox: str,
    server: str | None,
    token_file: Path | None,
    state: Path | None,
) -> Result:
    """Calls `work` with the sandbox of this id; returns its result."""

    async def connected(remote: RemoteBackend) -> Result:
        return await work(await remote.connect(sandbox))

    return _on_server(connected, server, token_file, state)


def _find_server(server: str | None, token_file: Path | None, state: Path | None) -> tuple[str, str | None]:
    """(address, token). Raises UserError without a named or a local server, and as `read_secret_file`."""
    from etude.kit.durable import read_record
    from etude.sandbox.machine_backend import default_state_directory

    if server is None:
        row = read_record((state or default_state_directory()) / _NOTE)
        if not row:
            raise UserError(
                "no sandbox server runs here",
                field="--server",
                received=server,
                fix="start one with `etude sandbox serve`, or name another with --server",
            )
        server, token_file = row["url"], token_file or Path(row["token_file"])
    return str(server), read_secret_file(token_file, "--token-file")
