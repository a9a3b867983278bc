"""MCP servers that provide tools to the agent."""

from __future__ import annotations

import re
import shlex
from typing import Literal

from pydantic import Field, model_validator

from etude.config.base import Section

SERVER_NAME = re.compile(r"[a-z][a-z0-9_]*")


class McpConfig(Section):
    """One MCP server. Its tools are called NAME_tool, where NAME is that of this section."""

    command: str = ""
    """Program with its arguments, which speaks MCP over standard input and output. It is started for each
    session, before the agent's first calls run, and ended with it."""
    url: str = ""
    """Address of a running server that speaks MCP over streamable HTTP, instead of `command`. The processes
    that run sessions connect to it; all sessions share it."""
    where: Literal["sandbox", "host"] = "sandbox"
    """Where `command` is started. `sandbox`: with the agent's files and the sandbox's programs and network,
    accessible to the agent. `host`: outside of the sandbox, with your rights, without the agent's files."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of `command`, in addition to harmless ones. The value `env:NAME` is replaced by
    the variable NAME of the process that starts it. The agent can read those of a server in the sandbox."""
    tools: tuple[str, ...] = ()
    """Tools that the agent is offered, by the server's names; empty: all."""
    trusted: bool = False
    """Whether to trust the server's annotation that a tool only reads: its calls may then run in parallel,
    and again after a failure."""
    described: str = ""
    """The server's description of its tools when the run started, as JSON. A run fills it in: the model is
    shown these tools, and a session whose server offers others fails."""

    @model_validator(mode="after")
    def _names_one_server(self) -> McpConfig:
        if bool(self.command.strip()) == bool(self.url):
            raise ValueError("needs either command or url")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: must begin with http:// or https://, received {self.url!r}")
        if self.url and (self.env or self.where == "host"):
            raise ValueError("env, where: apply only to a server that is started, received some with url")
        if self.where == "host":
            try:
                shlex.split(self.command)
            except ValueError as error:
                raise ValueError(f"command: {error}, received {self.command!r}") from None
        return self

    @property
    def is_in_sandbox(self) -> bool:
        """Whether it runs in the sandbox, with the agent's files."""
        return self.where == "sandbox" and not self.url
