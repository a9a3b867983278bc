"""MCP servers whose tools the agent is offered."""

from __future__ import annotations

import re
import shlex
from typing import Literal

from pydantic import Field, model_validator

from etude.config.base import Section

SERVER_NAME = re.compile(r"[a-z][a-z0-9_]*")


class McpConfig(Section):
    """One MCP server. Its tools are called NAME_tool, NAME being that of this section."""

    command: str = ""
    """Program with its arguments, which speaks MCP over standard input and output. It is started for each
    session, before the agent's first calls run, and ended with it."""
    url: str = ""
    """Address of a server that runs already and speaks MCP over streamable HTTP, in place of `command`. It is
    connected to from where sessions are run, and shared by all of them."""
    where: Literal["sandbox", "host"] = "sandbox"
    """Where `command` is started. `sandbox`: among the agent's files, with the sandbox's programs and
    network, and within the agent's reach. `host`: outside of the sandbox, with your rights; it sees none of
    the agent's files."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables that `command` gets beside harmless ones. `env:NAME` as a value stands for the variable NAME
    of the process that starts it. What a server in the sandbox gets, the agent can read."""
    tools: tuple[str, ...] = ()
    """Tools to offer, as the server names them; empty: all."""
    trusted: bool = False
    """Whether the server is believed when it says that a tool only reads: its calls may then run beside
    others, and again after a failure."""
    described: str = ""
    """The tools as the server described them when the run began, as JSON. A run fills it in: the model is
    shown these tools, and a session whose server offers others fails."""

    @model_validator(mode="after")
    def _names_one_server(self) -> McpConfig:
        if bool(self.command.strip()) == bool(self.url):
            raise ValueError("needs either command or url")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: must begin with http:// or https://, received {self.url!r}")
        if self.url and (self.env or self.where == "host"):
            raise ValueError("env, where: are of a server that is started, received some with url")
        if self.where == "host":
            try:
                shlex.split(self.command)
            except ValueError as error:
                raise ValueError(f"command: {error}, received {self.command!r}") from None
        return self

    @property
    def is_in_sandbox(self) -> bool:
        """Whether it runs among the agent's files."""
        return self.where == "sandbox" and not self.url
