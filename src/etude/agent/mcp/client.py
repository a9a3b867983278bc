"""Client of MCP servers: lists the tools that servers offer, and connects the servers of a session."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TextIO, TypeVar

import mcp_types as types
from mcp import Client, StdioServerParameters, stdio_client
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError

from etude.agent.mcp.sandboxed import SandboxTransport
from etude.agent.tools.interface import shorten
from etude.agent.tools.mcp_tool import ServedTool, read_described, write_described
from etude.agent.tools.output_files import readable
from etude.agent.tools.ports import ServerAnswer
from etude.config import McpConfig
from etude.config.agent import SERVER_NAME
from etude.errors import ConfigError, InfrastructureError
from etude.records import ToolErrorClass
from etude.sandbox.interface import Sandbox

CALL_S = 60.0
"""For one call."""
START_S = 30.0
"""For a server to start and to list its tools."""
NUM_TOOLS = 256
_ERROR_CHARACTERS = 400
_SHOWN_CHARACTERS = 300
_CALLER_ERRORS = frozenset({types.INVALID_PARAMS, types.METHOD_NOT_FOUND, types.INVALID_REQUEST})
_BROKEN = (ValidationError, RuntimeError, OSError)
_Answer = TypeVar("_Answer")


async def describe_servers(
    servers: Mapping[str, McpConfig], sandbox: Sandbox | None = None
) -> dict[str, McpConfig]:
    """The same servers, each with the tools that it offers: it is started, queried and stopped.

    Raises InfrastructureError for one that does not start or answer, ConfigError for a program or tool that
    does not exist.
    """
    return {name: await _described(name, config, sandbox) for name, config in servers.items()}


async def _described(name: str, config: McpConfig, sandbox: Sandbox | None) -> McpConfig:
    transport = _transport(name, config, sandbox)
    is_program = isinstance(transport, StdioServerParameters)
    if is_program and shutil.which(transport.command, path=(transport.env or {}).get("PATH")) is None:
        raise ConfigError(
            "there is no such program here", field=f"agent.mcp.{name}.command", received=transport.command,
            fix="install it, or name its path",
        )  # fmt: skip
    async with _connected(name, config, sandbox) as client:
        tools = await _offered(name, config, client)
    return config.model_copy(update={"described": write_described(tools)})


class SessionServers:
    """Implements ToolServers: the servers of one session, each connected from `start` to `close`.

    A server in the sandbox is within the agent's reach. So it is started before the agent's first calls run,
    when a failure cannot be the agent's; a later failure is an error result for the agent, unless the sandbox
    itself has failed. A failure of a server outside is always one of the infrastructure.
    """

    def __init__(
        self, servers: Mapping[str, McpConfig], sandbox: Sandbox | None = None, call_s: float = CALL_S
    ) -> None:
        self._servers, self._sandbox, self._call_s = servers, sandbox, call_s
        self._clients: dict[str, Client] = {}
        self._starting = asyncio.Lock()
        self._closing = asyncio.Event()
        self._connection: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connects every server, unless already connected. Raises InfrastructureError if one does not start,
        or offers other tools than it was described with."""
        async with self._starting:
            if self._connection is None:
                connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._connection = asyncio.create_task(self._hold_connections(connected))
                try:
                    await connected
                except BaseException:
                    self._connection.cancel()
                    await self._disconnect()
                    raise

    async def close(self) -> None:
        """Disconnects the servers; `start` connects them again. Idempotent."""
        async with self._starting:
            await self._disconnect()

    async def call(self, server: str, tool: str, values: Mapping[str, Any]) -> ServerAnswer:
        await self.start()
        try:
            async with asyncio.timeout(self._call_s):
                answer = await self._clients[server].call_tool(tool, dict(values))
        except MCPError as error:
            if error.code in _CALLER_ERRORS:
                message = shorten(readable(error.message), _ERROR_CHARACTERS)
                return ServerAnswer(message, ToolErrorClass.INVALID_ARGUMENTS)
            return await self._failed(server, error.message, ToolErrorClass.UNEXPECTED_ENVIRONMENT, error)
        except TimeoutError as error:
            words = f"no answer within {self._call_s:g} s"
            return await self._failed(server, words, ToolErrorClass.TIMEOUT, error)
        except _BROKEN as error:
            words = f"{type(error).__name__}: {error}"[:200]
            return await self._failed(server, words, ToolErrorClass.UNEXPECTED_ENVIRONMENT, error)
        text = "\n".join(_text(block) for block in answer.content)
        return ServerAnswer(text, ToolErrorClass.UNEXPECTED_ENVIRONMENT if answer.is_error else None)

    async def _failed(self, server: str, words: str, kind: ToolErrorClass, error: Exception) -> ServerAnswer:
        """Attributes a failure: to the agent if the server is in its sandbox and that still answers."""
        if self._servers[server].is_in_sandbox and self._sandbox is not None:
            await self._sandbox.commands.list()
            return ServerAnswer(f"the MCP server {server} failed: {words}", kind)
        raise InfrastructureError(
            f"the MCP server failed: {words}",
            field=f"agent.mcp.{server}",
            fix="check its log; a server with a command is restarted for the next session",
        ) from error

    async def _hold_connections(self, connected: asyncio.Future[None]) -> None:
        """Connects and disconnects in one task, as the library demands."""
        try:
            async with AsyncExitStack() as stack:
                for name, config in self._servers.items():
                    client = await stack.enter_async_context(_connected(name, config, self._sandbox))
                    _check_alike(name, config, await _offered(name, config, client))
                    self._clients[name] = client
                connected.set_result(None)
                await self._closing.wait()
        except Exception as error:
            if connected.done():
                raise
            connected.set_exception(error)

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._closing.set()
        await asyncio.wait([connection])
        if not connection.cancelled():
            connection.exception()  # of a server that had exited already: ignored
        self._clients.clear()
        self._closing.clear()


def parse_server(text: str) -> tuple[str, McpConfig]:
    """Parses a host server from a command line's `NAME=COMMAND ARGUMENT...`. Raises ConfigError."""
    name, _, command = text.partition("=")
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    if not words or not SERVER_NAME.fullmatch(name):
        raise ConfigError(
            "is not a valid MCP server",
            field="--mcp",
            received=text,
            fix="write a name in lower_snake_case and a command, such as --mcp "
            '"github=github-mcp-server stdio"',
        )
    return name, McpConfig(command=command, where="host")


def _check_alike(name: str, config: McpConfig, offered: list[ServedTool]) -> None:
    known = read_described(name, config)
    if offered != known:
        shown = ", ".join(tool.name for tool in offered if tool not in known)
        raise InfrastructureError(
            "the MCP server offers other tools than at the start of the run",
            field=f"agent.mcp.{name}",
            received=shown or "fewer",
            fix="restore the version that it had then, or start a new run",
        )


def _transport(name: str, config: McpConfig, sandbox: Sandbox | None) -> Any:
    """The argument of `mcp.Client`."""
    if config.url:
        return config.url
    if not config.is_in_sandbox:
        command, *arguments = shlex.split(config.command)
        return StdioServerParameters(command=command, args=arguments, env=_environment(name, config))
    if sandbox is None:
        raise ConfigError(
            "there is no sandbox to start it in",
            field=f"agent.mcp.{name}.where",
            received=config.where,
            fix='set it to "host"',
        )
    return SandboxTransport(sandbox, config.command, _environment(name, config))


def _environment(name: str, config: McpConfig) -> dict[str, str]:
    """The server's environment variables. Raises ConfigError for an `env:` reference to an unset one."""
    found: dict[str, str] = {}
    for key, value in config.env.items():
        source = value.removeprefix("env:")
        if source == value:
            found[key] = value
        elif source in os.environ:
            found[key] = os.environ[source]
        else:
            raise ConfigError(
                "this environment variable is not set",
                field=f"agent.mcp.{name}.env.{key}",
                received=value,
                fix=f"set {source} where the server is started, or write the value itself",
            )
    return found


@asynccontextmanager
async def _connected(name: str, config: McpConfig, sandbox: Sandbox | None) -> AsyncIterator[Client]:
    """A connected client. Only errors of the start are converted, not those raised in the block."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        transport = _transport(name, config, sandbox)
        is_program = isinstance(transport, StdioServerParameters)
        client = Client(stdio_client(transport, log) if is_program else transport)
        try:
            await _started(name, client.__aenter__())
        except InfrastructureError as error:
            stderr = transport.stderr_tail if isinstance(transport, SandboxTransport) else _end_of(log)
            error.message += f"; its error output: {stderr}" if stderr else ""
            if config.is_in_sandbox:
                error.fix = (
                    "run its command in a sandbox to test it (this machine's programs are missing there); "
                    f'agent.mcp.{name}.where = "host" starts it here'
                )
            raise
        try:
            yield client
        finally:
            await client.__aexit__(None, None, None)


def _end_of(log: TextIO) -> str:
    log.seek(0)
    return log.read()[-_SHOWN_CHARACTERS:].strip()


async def _offered(name: str, config: McpConfig, client: Client) -> list[ServedTool]:
    return await _started(name, _list_tools(name, config, client))


async def _started(name: str, work: Awaitable[_Answer]) -> _Answer:
    """Awaits a step of a server's start, within START_S. Raises InfrastructureError."""
    try:
        async with asyncio.timeout(START_S):
            return await work
    except (OSError, MCPError, TimeoutError, ValidationError, ExceptionGroup) as error:
        raise InfrastructureError(
            f"the MCP server did not start: {_cause(error)}"[:400],
            field=f"agent.mcp.{name}",
            fix="run its command yourself to test it, or open its url",
        ) from error


def _cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


async def _list_tools(name: str, config: McpConfig, client: Client) -> list[ServedTool]:
    """All tools, page by page, or those configured. Raises ConfigError for one that does not exist."""
    tools: list[types.Tool] = []
    cursor: str | None = None
    while len(tools) <= NUM_TOOLS:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            break
    known = {tool.name: _served(tool) for tool in tools[:NUM_TOOLS]}
    for wanted in config.tools:
        if wanted not in known:
            raise ConfigError(
                "the MCP server has no such tool",
                field=f"agent.mcp.{name}.tools",
                received=wanted,
                fix=", ".join(known),
            )
    return [known[wanted] for wanted in config.tools or known]


def _served(tool: types.Tool) -> ServedTool:
    hints = tool.annotations
    return ServedTool(
        name=tool.name,
        description=tool.description or "",
        input_schema=tool.input_schema,
        only_reads=hints is not None and bool(hints.read_only_hint),
    )


def _text(block: types.ContentBlock) -> str:
    """The text of a block of an answer, for an agent that reads text only."""
    if isinstance(block, types.TextContent):
        return block.text
    if isinstance(block, types.EmbeddedResource) and isinstance(block.resource, types.TextResourceContents):
        return block.resource.text
    if isinstance(block, types.ResourceLink):
        return f"[{block.name}: {block.uri}]"
    return f"[{block.type}]"
