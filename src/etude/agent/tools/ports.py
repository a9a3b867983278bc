"""Interfaces of what tools may reach besides the sandbox: an index, a user, MCP servers. Each may be absent.

Failing infrastructure behind a port raises InfrastructureError; the agent reads that the provider failed, and
the session gets no reward. A wrong request of the agent's is ToolArgumentError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from etude.records import ToolErrorClass
from etude.sandbox.types import GrepMatch


@dataclass(frozen=True, slots=True)
class GrepRequest:
    """One search by regular expression, in the language common to ripgrep and Python."""

    pattern: str
    path: str = "."
    """File or directory below which to search."""
    globs: tuple[str, ...] = ()
    """Files to search, as `compile_globs` reads them: `*.py`, `!tests/**`."""
    ignore_case: bool = False
    limit: int = 50
    """Most matches."""


@dataclass(frozen=True, slots=True)
class CodeHit:
    """A piece of code found by meaning."""

    path: str
    first_line: int
    last_line: int
    """Both included, from 1."""
    symbol: str
    """Function or class, dotted; empty for lines between definitions."""
    score: float
    """Comparable within one result only."""
    text: str


@dataclass(frozen=True, slots=True)
class CodeHits:
    """The hits of a semantic search."""

    hits: tuple[CodeHit, ...]
    complete: bool = True
    """False while the index is still being built: hits may be missing."""


class CodeSearch(Protocol):
    """Search over the workspace's files as they are now, edits included.

    The harness reports changes: `changed` for files that a tool wrote or removed, `changed_somewhere` after a
    command, which may have changed any file.
    """

    async def grep(self, request: GrepRequest) -> Sequence[GrepMatch] | None:
        """Matches sorted by path and line; None if the sandbox itself has to search. Raises ToolArgumentError
        for an invalid pattern."""
        ...

    async def semantic(self, query: str, limit: int, path: str = ".") -> CodeHits:
        """The `limit` pieces of code nearest in meaning. Raises InfrastructureError if no model answers."""
        ...

    def changed(self, path: str) -> None: ...

    def changed_somewhere(self) -> None: ...


class User(Protocol):
    """The giver of the task: a person, an editor, or in rollouts a simulated user who knows what the task
    withholds."""

    async def answer(self, question: str, options: Sequence[str] = ()) -> str:
        """Raises UserAbortedError if the user gives no answer."""
        ...


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """The answer of an MCP server to a call."""

    text: str
    error: ToolErrorClass | None = None


class ToolServers(Protocol):
    """The MCP servers of one session."""

    async def call(self, server: str, tool: str, values: Mapping[str, Any]) -> ServerAnswer:
        """Calls a tool of the server of this name. Raises InfrastructureError if the server has ended or does
        not answer, through no fault of the agent."""
        ...
