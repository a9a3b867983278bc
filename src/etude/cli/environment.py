"""`etude env`: serve environment sessions, list them, and find what tells training from production."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from etude.cli.exits import error_console
from etude.cli.output import JsonOption, output_console, print_json, print_table
from etude.cli.serving_options import AllowedHostOption, CertificateOption, KeyOption, PortOption
from etude.errors import UserError
from etude.kit.secrets import read_secret_file

if TYPE_CHECKING:
    from etude.config import AgentConfig
    from etude.environment.tells import Tell
    from etude.environment.verdicts import SessionServices
    from etude.protocols import Workspace
    from etude.records import Task
    from etude.sandbox.interface import SandboxBackend

env_app = typer.Typer(name="env", help="Serve and examine agent environments.", no_args_is_help=True)

TokenOption = Annotated[
    Path | None, typer.Option("--token-file", help="File with the clients' token. Created if missing.")
]
ReadTokenOption = Annotated[Path | None, typer.Option("--token-file", help="File with the token.")]
SandboxServerOption = Annotated[
    str | None, typer.Option(help="Sandbox server (http://HOST:PORT) to use instead of this machine.")
]
TasksOption = Annotated[
    Path | None, typer.Option(help="Directory of Harbor task directories that clients may open by name.")
]
RootsOption = Annotated[
    list[Path] | None,
    typer.Option("--root", help="Directory below which clients may open directories. Repeatable."),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        help="TOML file: its section agent names tools, index and MCP servers, its sections images and tasks "
        "say how tasks get images, variables and hosts."
    ),
]
TenantsShareOption = Annotated[
    bool, typer.Option("--tenants-share", help="Allow several tenants although one can starve the others.")
]
EXIT_TELLS = 1


@env_app.command("serve")
def serve_command(
    backend: Annotated[
        str, typer.Option(help="Sandbox backend. `etude sandbox doctor` lists them.")
    ] = "local",
    sandbox_server: SandboxServerOption = None,
    sandbox_token_file: Annotated[
        Path | None, typer.Option(help="File with the sandbox server's token.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    allowed_host: AllowedHostOption = None,
    port: PortOption = 8652,
    tasks: TasksOption = None,
    roots: RootsOption = None,
    config: ConfigOption = None,
    tools: Annotated[
        str, typer.Option(help="Tools: core, full, or names separated by commas. Default: core.")
    ] = "",
    snapshot_every: Annotated[
        int, typer.Option(min=0, help="Turns with changes between two snapshots; 0 takes none.")
    ] = 0,
    index: Annotated[str, typer.Option(help="Code index: none, grep, words or meaning. Default: none.")] = "",
    max_sessions: Annotated[int, typer.Option(min=1, help="Most open sessions per tenant.")] = 64,
    idle_s: Annotated[
        float, typer.Option(min=1, help="Seconds after which an idle session closes.")
    ] = 3600.0,
    life_s: Annotated[float, typer.Option(min=1, help="Longest life of a sandbox in seconds.")] = 86400.0,
    token_file: TokenOption = None,
    tenants: Annotated[
        Path | None, typer.Option(help="File with a line TENANT TOKEN for each tenant.")
    ] = None,
    tenants_share: TenantsShareOption = False,
    certificate: CertificateOption = None,
    key: KeyOption = None,
) -> None:
    """Serve environment sessions until SIGTERM. Without tokens only this machine can reach the server."""
    from etude.environment.server import HostLimits, SessionHost, read_tenants, serve
    from etude.environment.server.process import SERVER
    from etude.sandbox.server import read_token

    if tenants is not None and token_file is not None:
        raise UserError("give --tenants or --token-file, not both", field="--tenants", received=str(tenants))
    tokens: dict[str, str] = {}
    if tenants is not None:
        tokens = read_tenants(tenants)
    elif token_file is not None:
        tokens = {read_token(token_file, SERVER): "default"}
    found = read_tasks(tasks, backend, config)
    for name, task in found.items():
        if task.steps:
            error_console().print(f"left out: {name}: has several steps")
    agent = _agent_of(config, tools, index)

    def open_sandboxes() -> SandboxBackend:
        return _backend(backend, sandbox_server, sandbox_token_file)

    if agent.mcp:
        from etude.controller.starting import resolve_servers

        agent = resolve_servers(agent, open_sandboxes, lambda: next(iter(found.values()), None))
    services = new_services(open_sandboxes(), agent, snapshot_every, life_s)
    limits = HostLimits(tenant_sessions=max_sessions, idle_s=idle_s)
    sessions = SessionHost(services, limits, found, roots or ())
    serve(
        sessions,
        host=host,
        port=port,
        tokens=tokens,
        allowed_hosts=allowed_host or (),
        certificate=certificate,
        key=key,
        tenants_share=tenants_share,
    )


@env_app.command("list")
def list_command(
    server: Annotated[str, typer.Option(help="Address of the environment server.")] = "http://127.0.0.1:8652",
    token_file: ReadTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the open sessions of an environment server."""
    from etude.environment.remote import RemoteEnvironment

    token = read_secret_file(token_file, "--token-file")

    async def work() -> list[dict[str, Any]]:
        remote = RemoteEnvironment(server, token)
        try:
            return await remote.list()
        finally:
            await remote.close()

    rows = asyncio.run(work())
    if as_json:
        print_json(rows)
        return
    names = ("id", "state", "task", "turns", "parent")
    print_table(output_console(), names, ([row[name] for name in names] for row in rows))


@env_app.command("tells")
def tells_command(
    left: Annotated[
        str, typer.Argument(help="First environment: rollout:BACKEND, cloud:BACKEND or a server address.")
    ] = "rollout:local",
    right: Annotated[str, typer.Argument(help="Second environment, named in the same way.")] = "cloud:local",
    tools: Annotated[str, typer.Option(help="Tools that rollout: and cloud: environments offer.")] = "core",
    num_calls: Annotated[
        int, typer.Option("--calls", min=1, help="Number of calls per latency measurement.")
    ] = 9,
    token_file: ReadTokenOption = None,
    show_all: Annotated[bool, typer.Option("--all", help="Also print what is equal in both.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show how an agent could tell two environments apart from inside.

    The exit code is 1 if a difference has no documented reason.
    """
    from etude.environment.tells import compare

    token = read_secret_file(token_file, "--token-file")
    seen_left, seen_right = asyncio.run(_probe((left, right), tools, num_calls, token))
    found = compare(seen_left, seen_right)
    num_seen = len(seen_left | seen_right)
    open_ones = [tell for tell in found if tell.reason is None]
    if as_json:
        rows = [asdict(tell) for tell in found]
        print_json({"left": left, "right": right, "tells": rows, "num_seen": num_seen})
    else:
        _print_tells(found, {**seen_left} if show_all else {})
        error_console().print(
            f"{num_seen} properties compared, {len(found)} differ, "
            f"{len(open_ones)} without a documented reason"
        )
    if open_ones:
        raise typer.Exit(EXIT_TELLS)


def new_services(
    backend: SandboxBackend,
    agent: AgentConfig,
    snapshot_every: int = 0,
    life_s: float | None = None,
) -> SessionServices:
    """The SessionServices of a server or a probe, with the tools, index and MCP servers of `agent`."""
    from etude.agent import agent_registry
    from etude.agent.index.opening import new_indexes
    from etude.environment.verdicts import Grader, SessionServices

    def say(words: str) -> None:
        error_console().print(words, markup=False)

    return SessionServices(
        backend,
        Grader(backend),
        agent_registry(agent, "core"),
        indexes=new_indexes(agent.index, report=say, waits=True),
        servers=agent.mcp,
        snapshot_every=snapshot_every,
        life_s=life_s,
    )


def _backend(backend: str, server: str | None = None, token_file: Path | None = None) -> SandboxBackend:
    """The sandbox backend of this machine, or of a sandbox server."""
    if server is None:
        from etude.sandbox.backends import open_backend

        return open_backend(backend)
    from etude.sandbox.remote import RemoteBackend

    return RemoteBackend(server, read_secret_file(token_file, "--sandbox-token-file"))


def _agent_of(file: Path | None, tools: str, index: str = "") -> AgentConfig:
    """The section `agent` of a file, or the defaults, with these tools and index. Raises ConfigError."""
    from etude.config import load_config

    named = {"tools": tools, "index": index}
    config = load_config(file, [f"agent.{key}={json.dumps(value)}" for key, value in named.items() if value])
    agent = config.agent
    if agent.tools != "auto" or config.initial_checkpoint is None:
        return agent
    from etude.tokens.chat_format import choose_format
    from etude.tokens.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(Path(config.initial_checkpoint))
    is_own = choose_format(tokenizer, agent.template, agent.grammar).is_own
    return agent.model_copy(update={"tools": "core" if is_own else "full"})


def read_tasks(directory: Path | None, backend: str = "local", file: Path | None = None) -> dict[str, Task]:
    """The Harbor tasks in a directory, by the names of their directories, with their images. `file`: a
    configuration file that applies to them.

    Raises TaskError, TemplateError, UserError.
    """
    from etude.config import load_config
    from etude.controller.task_sets import read_with_images
    from etude.environment.names import check_task_name

    if directory is None:
        return {}
    if not directory.is_dir():
        raise UserError("is not a directory", field="--tasks", received=str(directory), fix="name another")
    found = sorted(entry for entry in directory.iterdir() if (entry / "task.toml").is_file())
    names = [check_task_name(entry.name, "--tasks") for entry in found]
    config = load_config(file, [f"sandbox.backend={backend}"])
    return dict(zip(names, read_with_images(found, config), strict=True))


async def _probe(
    places: tuple[str, str], tools: str, num_calls: int, token: str | None
) -> tuple[dict[str, str], dict[str, str]]:
    """The probe's properties of two environments, the digests of their tools, and their latencies."""
    from etude.environment.tells import examine, latencies

    async with _open_place(places[0], tools, token) as one, _open_place(places[1], tools, token) as two:
        seen: list[dict[str, str]] = []
        for workspace, digest in (one, two):
            seen.append({**await examine(workspace), "harness.tools": digest})
        times_ms = await latencies([one[0], two[0]], num_calls)
        for found, time_ms in zip(seen, times_ms, strict=True):
            found["latency.run_command_ms"] = f"{time_ms:.2f}"
        return seen[0], seen[1]


@asynccontextmanager
async def _open_place(place: str, tools: str, token: str | None) -> AsyncIterator[tuple[Workspace, str]]:
    """Opens a workspace in an environment; yields it, and the digest of its tools."""
    from etude.environment.origins import Origin
    from etude.environment.remote import RemoteEnvironment
    from etude.environment.server import SessionHost, build_app
    from etude.environment.sessions import EnvironmentSession
    from etude.sandbox.template import Template
    from etude.serving.process import served

    files = {"main.py": "print('hello')\n"}
    kind, _, backend = place.partition(":")
    async with AsyncExitStack() as stack:
        if kind == "rollout":
            services = new_services(_backend(backend), _agent_of(None, tools))
            stack.push_async_callback(services.backend.close)
            session = await EnvironmentSession.open(services, Origin(Template(files, "files")))
            stack.push_async_callback(session.close)
            yield session, services.tools.digest
            return
        if kind == "cloud":
            place = await stack.enter_async_context(
                served(build_app(SessionHost(new_services(_backend(backend), _agent_of(None, tools)))))
            )
            token = None
        elif kind not in ("http", "https"):
            raise UserError(
                "is not an environment",
                field="place",
                received=place,
                fix="give rollout:local, cloud:local or http://HOST:PORT",
            )
        remote = RemoteEnvironment(place, token)
        stack.push_async_callback(remote.close)
        made = await remote.create(files=files)
        stack.push_async_callback(made.close)
        yield made, (await remote.tools())["digest"]


def _print_tells(found: list[Tell], equal: dict[str, str]) -> None:
    keys, unknown = {tell.key for tell in found}, Text("NO DOCUMENTED REASON", style="bold red")
    rows: list[tuple[object, ...]] = [
        (key, value, "the same", "") for key, value in sorted(equal.items()) if key not in keys
    ]
    rows += [(tell.key, str(tell.left), str(tell.right), tell.reason or unknown) for tell in found]
    print_table(output_console(), ("what", "left", "right", "reason"), rows)
