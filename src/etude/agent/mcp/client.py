"""Tools of other MCP servers in our registry: the agent calls them like any tool."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import mcp_types as types
from mcp import Client, StdioServerParameters
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError

from etude.agent.mcp.schemas import own_name, parameters_of
from etude.agent.tools.interface import WRITES_ALL, Access, Arguments, ToolContext, failure, shorten
from etude.agent.tools.output_files import bounded, readable
from etude.errors import ConfigError, InfrastructureError
from etude.records import ToolErrorClass, ToolResult
from etude.tokens.grammar import Parameter, ToolSchema, read_value

CALL_S = 60.0
"""For one call."""
START_S = 30.0
"""For a server to start and to say which tools it has."""
NUM_TOOLS = 256
_DESCRIPTION_CHARACTERS = 1000
_ERROR_CHARACTERS = 400
_THE_CALLERS_FAULT = frozenset({types.INVALID_PARAMS, types.METHOD_NOT_FOUND, types.INVALID_REQUEST})
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


@dataclass(frozen=True, slots=True)
class McpServer:
    """A server to be started as a child process, talking over its standard input and output."""

    command: str
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Beside a few harmless variables of ours, all that it gets."""
    prefix: str = ""
    """Put before the name of each tool, with an underscore."""
    tools: tuple[str, ...] | None = None
    """Names, as the server gives them, of the tools to be offered; None: all."""
    trusted: bool = False
    """Whether its word is taken for which tools only read: these may run beside others, and again."""

    def __post_init__(self) -> None:
        if self.prefix and not _NAME.match(self.prefix):
            raise ConfigError(
                "must be lower_snake_case",
                field="agent.mcp: prefix",
                received=self.prefix,
                fix="such as github",
            )


class McpTool:
    """A tool of an MCP server.

    Arguments: as the server says. Returns the texts of its answer; of other content its kind.
    Limits: `output_characters`, more is kept in a file; 60 seconds.
    Errors: invalid_arguments for what does not fit the server's schema; unexpected_environment for a result
    that the server marks as an error. A server that is gone or does not answer is infrastructure.
    """

    def __init__(
        self, client: Client, described: types.Tool, server: McpServer, call_s: float = CALL_S
    ) -> None:
        """Raises ConfigError for names that cannot be ours."""
        self._client = client
        self._name = described.name
        self._parameters = parameters_of(described.input_schema)
        self._call_s = call_s
        hints = described.annotations
        self._only_reads = server.trusted and hints is not None and bool(hints.read_only_hint)
        name = own_name(described.name)
        self.schema = ToolSchema(
            f"{server.prefix}_{name}" if server.prefix else name,
            shorten(" ".join((described.description or described.name).split()), _DESCRIPTION_CHARACTERS),
            tuple(self._parameters.values()),
        )

    @property
    def repeatable(self) -> bool:
        """See Tool."""
        return self._only_reads

    def access(self, arguments: Arguments) -> Access:
        """See Tool. What it reads is not known to be of the workspace: it waits for all that writes there."""
        return Access(reads=frozenset({"."})) if self._only_reads else replace(WRITES_ALL, outside=True)

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        """See Tool."""
        values = self._values(arguments)
        try:
            async with asyncio.timeout(self._call_s):
                answer = await self._client.call_tool(self._name, values)
        except MCPError as error:
            if error.code in _THE_CALLERS_FAULT:
                message = shorten(readable(error.message), _ERROR_CHARACTERS)
                return failure(message, ToolErrorClass.INVALID_ARGUMENTS)
            raise self._dead(error.message) from error
        except TimeoutError as error:
            raise self._dead(f"no answer within {self._call_s:g} s") from error
        except (ValidationError, RuntimeError, OSError) as error:
            raise self._dead(f"{type(error).__name__}: {error}"[:200]) from error
        finally:
            context.changed_somewhere()
        text = readable("\n".join(_text(block) for block in answer.content)).rstrip("\n")
        output = await bounded(text, context)
        if answer.is_error:
            return failure(output or "the tool failed", ToolErrorClass.UNEXPECTED_ENVIRONMENT, kind="mcp")
        return ToolResult(output or "ok", facts={"kind": "mcp"})

    def _values(self, arguments: Arguments) -> dict[str, Any]:
        """The arguments under the server's names, as JSON values. Raises ToolArgumentError."""
        given: dict[str, Any] = {}
        for name, parameter in self._parameters.items():
            if parameter.name in arguments:
                given[name] = read_value(parameter, arguments[parameter.name])
        return given

    def _dead(self, message: str) -> InfrastructureError:
        return InfrastructureError(
            f"the MCP server failed: {message}", field="agent.mcp", received=self.schema.name
        )


@asynccontextmanager
async def connect_tools(
    server: McpServer | Any, names: McpServer | None = None
) -> AsyncIterator[list[McpTool]]:
    """Starts a server and gives its tools, for as long as the block lasts; then the server is ended.

    `server` may also be anything that `mcp.Client` takes (a URL, a server in this process); `names` then
    tells prefix, choice of tools and trust.

    Raises InfrastructureError if it does not start in time, ConfigError for tools that cannot be offered.
    """
    settings = server if isinstance(server, McpServer) else names or McpServer("")
    async with _connected(_client(server)) as client:
        try:
            async with asyncio.timeout(START_S):
                described = await _list_tools(client, settings.tools)
        except (MCPError, TimeoutError, ValidationError) as error:
            raise InfrastructureError(
                f"the MCP server does not tell its tools: {error}",
                field="agent.mcp",
                received=settings.command,
            ) from error
        yield _checked([McpTool(client, tool, settings) for tool in described])


@asynccontextmanager
async def connect_servers(servers: Sequence[McpServer]) -> AsyncIterator[list[McpTool]]:
    """The tools of several servers, for as long as the block lasts. Raises as `connect_tools`.

    A task of its own connects and disconnects them, as their library demands: the block may be left by
    another task than the one that entered it.
    """
    connected = asyncio.get_running_loop().create_future()
    leave = asyncio.Event()

    async def hold() -> None:
        try:
            async with AsyncExitStack() as stack:
                tools = [
                    tool for one in servers for tool in await stack.enter_async_context(connect_tools(one))
                ]
                connected.set_result(_checked(tools))
                await leave.wait()
        except Exception as error:
            if connected.done():
                raise
            connected.set_exception(error)

    task = asyncio.create_task(hold())
    try:
        yield await connected
    finally:
        leave.set()
        await asyncio.wait([task])


def parse_server(text: str) -> McpServer:
    """A server as a command line names it: `PREFIX=COMMAND ARGUMENT...`. Raises ConfigError."""
    prefix, equals, command = text.partition("=")
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    if not equals or not words or not prefix:
        raise ConfigError(
            "is no MCP server",
            field="--mcp",
            received=text,
            fix='give a prefix for its tools and a command, such as --mcp "github=github-mcp-server stdio"',
        )
    return McpServer(words[0], tuple(words[1:]), prefix=prefix)


def _client(server: Any) -> Client:
    if not isinstance(server, McpServer):
        return Client(server)
    return Client(
        StdioServerParameters(command=server.command, args=list(server.arguments), env=dict(server.env))
    )


@asynccontextmanager
async def _connected(client: Client) -> AsyncIterator[Client]:
    """The client's own context; a failing start is ours to name, what happens in the block is not."""
    try:
        async with asyncio.timeout(START_S):
            await client.__aenter__()
    except (OSError, MCPError, TimeoutError, ValidationError, ExceptionGroup) as error:
        raise InfrastructureError(
            f"the MCP server does not start: {type(error).__name__}: {error}"[:300], field="agent.mcp"
        ) from error
    try:
        yield client
    finally:
        await client.__aexit__(None, None, None)


async def _list_tools(client: Client, wanted: Sequence[str] | None) -> list[types.Tool]:
    """All tools, page by page, or those that are wanted. Raises ConfigError for one that there is not."""
    tools: list[types.Tool] = []
    cursor: str | None = None
    while len(tools) <= NUM_TOOLS:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            break
    if wanted is None:
        return tools[:NUM_TOOLS]
    known = {tool.name: tool for tool in tools}
    for name in wanted:
        if name not in known:
            raise ConfigError(
                "the MCP server has no such tool",
                field="agent.mcp: tools",
                received=name,
                fix=", ".join(known),
            )
    return [known[name] for name in wanted]


def _checked(tools: list[McpTool]) -> list[McpTool]:
    """The tools, if a grammar can tell them apart. Raises ConfigError."""
    names = [tool.schema.name for tool in tools]
    parameters: set[str] = {parameter.name for tool in tools for parameter in _parameters(tool)}
    for name in names:
        if names.count(name) > 1 or name in parameters:
            raise ConfigError(
                "names a parameter or another tool too",
                field="agent.mcp: tool",
                received=name,
                fix="give the server a prefix, or leave the tool out",
            )
    return tools


def _parameters(tool: McpTool) -> Sequence[Parameter]:
    return tool.schema.parameters


def _text(block: types.ContentBlock) -> str:
    """What a block of an answer says to an agent that reads text only."""
    if isinstance(block, types.TextContent):
        return block.text
    if isinstance(block, types.EmbeddedResource) and isinstance(block.resource, types.TextResourceContents):
        return block.resource.text
    if isinstance(block, types.ResourceLink):
        return f"[{block.name}: {block.uri}]"
    return f"[{block.type}]"
