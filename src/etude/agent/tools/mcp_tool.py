"""Tools of MCP servers: the schema that the model is shown, and how a call is sent.

    [agent.mcp.NAME] --describe_servers--> `described` --served_tools--> McpTool --> ToolServers.call

The schemas come from the configuration alone, so that all processes of a run render the same tokens, without
a server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from etude.agent.tools.interface import WRITES_ALL, Access, Arguments, ToolContext, failure, shorten
from etude.agent.tools.mcp_schemas import own_name, parameters_of
from etude.agent.tools.output_files import bounded, readable
from etude.config import McpConfig
from etude.errors import ConfigError, InfrastructureError
from etude.records import ToolErrorClass, ToolResult
from etude.tokens.grammar import ToolSchema, read_value

_DESCRIPTION_CHARACTERS = 1000


class ServedTool(BaseModel):
    """One tool as its server describes it."""

    name: str
    description: str
    input_schema: dict[str, Any]
    only_reads: bool = False
    """Whether the server declares it read-only."""


_SERVED = TypeAdapter(list[ServedTool])


def write_described(tools: Sequence[ServedTool]) -> str:
    """The value of `McpConfig.described`."""
    return _SERVED.dump_json(list(tools)).decode()


def read_described(name: str, config: McpConfig) -> list[ServedTool]:
    """Inverse of `write_described`. Raises ConfigError if it is missing or invalid."""
    if not config.described:
        raise ConfigError(
            "its tools are unknown: the server was not queried",
            field=f"agent.mcp.{name}",
            fix="begin with `etude train`, which queries it",
        )
    try:
        return _SERVED.validate_json(config.described)
    except ValidationError as error:
        raise ConfigError(
            "is not a description of tools",
            field=f"agent.mcp.{name}.described",
            received=str(error)[:200],
            fix="remove it: it is filled in when a run begins",
        ) from None


def served_tools(servers: Mapping[str, McpConfig]) -> list[McpTool]:
    """The tools of all servers. Raises ConfigError as `read_described` and `McpTool`."""
    return [
        McpTool(name, tool, config)
        for name, config in servers.items()
        for tool in read_described(name, config)
    ]


class McpTool:
    """A tool of an MCP server. Implements `Tool`.

    Arguments: as the server describes them. Returns the texts of its answer; for other content its kind.
    Limits: `output_characters`, more is kept in a file; 60 seconds.
    Errors: invalid_arguments for what does not fit the server's schema; unexpected_environment for a result
    that the server marks as an error, and for a server in the sandbox that has ended: the agent may have
    killed it. Failure of any other server is infrastructure.
    """

    def __init__(self, server: str, described: ServedTool, config: McpConfig) -> None:
        """Raises ConfigError for names that cannot be translated (`own_name`)."""
        self._server, self._name = server, described.name
        self._parameters = parameters_of(described.input_schema)
        self.repeatable = config.trusted and described.only_reads
        self.schema = ToolSchema(
            f"{server}_{own_name(described.name)}",
            shorten(" ".join((described.description or described.name).split()), _DESCRIPTION_CHARACTERS),
            tuple(self._parameters.values()),
        )
        writes = replace(WRITES_ALL, outside=not config.is_in_sandbox)
        self._access = Access(reads=frozenset({"."})) if self.repeatable else writes

    def access(self, arguments: Arguments) -> Access:
        """See Tool. What it reads is unknown: it waits for all calls that write to the workspace."""
        return self._access

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        values = self._values(arguments)
        if context.servers is None:
            raise InfrastructureError("no MCP server is open", field="agent.mcp", received=self._server)
        try:
            answer = await context.servers.call(self._server, self._name, values)
        finally:
            context.changed_somewhere()
        if answer.error is ToolErrorClass.INVALID_ARGUMENTS:
            return failure(answer.text, answer.error)
        output = await bounded(readable(answer.text).rstrip("\n"), context)
        if answer.error is not None:
            return failure(output or "the tool failed", answer.error, kind="mcp")
        return ToolResult(output or "ok", facts={"kind": "mcp"})

    def _values(self, arguments: Arguments) -> dict[str, Any]:
        """The arguments under the server's names, as JSON values. Raises ToolArgumentError."""
        return {
            name: read_value(parameter, arguments[parameter.name])
            for name, parameter in self._parameters.items()
            if parameter.name in arguments
        }
