"""The interface of tools, and the context they run in: their session's sandbox and a few settings."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from etude.agent.tools.ports import CodeSearch, ToolServers, User
from etude.agent.tools.state import ToolState
from etude.errors import AgentError, ToolArgumentError
from etude.records import ToolCall, ToolErrorClass, ToolResult
from etude.sandbox.interface import Sandbox
from etude.sandbox.paths import WORKSPACE, normal_path
from etude.tokens.grammar import ToolSchema

Arguments = Mapping[str, str]
SURROGATE = re.compile("[\ud800-\udfff]")
"""Lone surrogates: an escaped byte of a file, or half of a pair from a JSON string."""
_PATH_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Bounds of what one call may cost and show. Every tool says in its output when a bound cut it."""

    file_bytes: int = 1 << 20
    """Larger files are neither read nor edited."""
    read_lines: int = 200
    list_entries: int = 200
    list_depth: int = 8
    grep_matches: int = 20
    line_characters: int = 240
    """Longer lines are cut when shown."""
    output_characters: int = 4000
    """Per command; of longer output the head and the tail are shown."""
    test_failures: int = 3
    test_timeout_s: float = 2.0
    command_timeout_s: float = 30.0
    parallel_calls: int = 16
    """Calls of one turn that run at the same time."""
    provider_attempts: int = 3
    """Attempts of a repeatable call if a provider behind a port (an embedding model) fails."""
    provider_backoff_s: float = 0.5
    """Wait before the second attempt; doubled for each one after it."""


@dataclass(frozen=True, slots=True)
class Access:
    """What one call reads and writes: workspace paths (`.` is all of it), or names that end with a colon,
    such as `todo:`.

    Two calls conflict where one writes what the other reads or writes; a directory includes all below it.
    Calls that do not conflict may run at the same time.
    """

    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    outside: bool = False
    """Whether it may act outside of the sandbox."""
    barrier: bool = False
    """Whether the call waits for all before it, and all after it wait for the call."""

    def conflicts(self, other: Access) -> bool:
        """Whether the order of the two matters."""
        if self.barrier or other.barrier:
            return True
        return _overlap(self.writes, other.reads | other.writes) or _overlap(other.writes, self.reads)


READS_ALL = Access(reads=frozenset({"."}))
WRITES_ALL = Access(writes=frozenset({"."}))
BARRIER = Access(barrier=True)

Approve = Callable[[ToolCall], Awaitable[str | None]]
"""Called before a call that writes or runs: None allows it, a text tells the agent why it is refused."""


@dataclass(frozen=True, slots=True, eq=False)
class ToolContext:
    """The environment of one session's tools."""

    sandbox: Sandbox
    tools: Mapping[str, Tool]
    """By name; usually a `Registry`."""
    test_paths: tuple[str, ...] = ()
    """The visible tests, in the order in which `run_tests` runs them."""
    limits: ToolLimits = field(default_factory=ToolLimits)
    state: ToolState = field(default_factory=ToolState)
    search: CodeSearch | None = None
    user: User | None = None
    servers: ToolServers | None = None
    approve: Approve | None = None
    workspace: str = WORKSPACE
    """Path of the workspace inside the sandbox: absolute paths below it are accepted."""

    has_environment: bool = False
    """Whether the sandbox holds the project's own environment: then its pytest runs the visible tests."""
    originals: Mapping[str, bytes | None] | None = None
    """Files as they were when the session began; None: as in the last commit."""

    def changed(self, path: str) -> None:
        """Records that a tool has written or removed the file at this normal path."""
        if path not in self.state.changed:
            self.state.changed.append(path)
        if self.search is not None:
            self.search.changed(path)

    def changed_somewhere(self) -> None:
        """Records that a command ran, which may have changed any file."""
        if self.search is not None:
            self.search.changed_somewhere()


class Tool(Protocol):
    """One tool. Stateless: everything it needs is passed to the call."""

    @property
    def schema(self) -> ToolSchema: ...

    def access(self, arguments: Arguments) -> Access:
        """What the call will read and write. Never raises: for invalid arguments the result is arbitrary."""
        ...

    @property
    def repeatable(self) -> bool:
        """Whether a call is idempotent, so that it may be repeated after an unknown outcome: reads, whole
        writes."""
        ...

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        """Runs the call. Raises AgentError for the agent's mistakes, InfrastructureError for other failures.

        `arguments` were checked against the schema: none is missing, none unknown.
        """
        ...


Outcome = ToolResult | AgentError
"""Of one call in a batch: its result, or what `Tool.run` would have raised."""
RunTogether = Callable[[Sequence[Arguments]], Awaitable[list[Outcome]]]
"""Runs a batch of calls. Raises InfrastructureError for all of them."""


def how_together(tool: Tool, context: ToolContext) -> RunTogether | None:
    """The function that runs calls of `tool` in one turn as a batch, if that costs less: for calls that only
    read and wait for no other. Such a tool has a method `together`; None: its calls run one by one."""
    together: Callable[[ToolContext], RunTogether | None] | None = getattr(tool, "together", None)
    return None if together is None else together(context)


def reads_path(arguments: Arguments) -> Access:
    """The access of a call that only reads what the argument `path` names; without it, the workspace."""
    return Access(reads=frozenset({accessed_path(arguments.get("path", ""))}))


def writes_path(arguments: Arguments) -> Access:
    """The access of a call that reads and writes what the argument `path` names."""
    return Access(writes=frozenset({accessed_path(arguments.get("path", ""))}))


def accessed_path(path: str) -> str:
    """The path in the form that `Access` compares; the whole workspace if the path is invalid or could be
    confused with a name."""
    if len(path) > _PATH_CHARACTERS:
        return "."
    try:
        found = normal_path(path.strip())
    except AgentError:
        return "."
    return found if is_path(found) else "."


def is_path(entry: str) -> bool:
    """Whether an entry of `Access` is a path, not a name such as `todo:`; a path may hold a colon too."""
    return not entry.endswith(":")


def integer(arguments: Arguments, name: str, default: int | None = None) -> int:
    """The argument as an integer. Raises ToolArgumentError for anything else."""
    text = arguments.get(name, "").strip()
    if not text and default is not None:
        return default
    if len(text) > 9 or not text.removeprefix("-").isdecimal():
        raise ToolArgumentError(f"{name} is not a number", field=name, received=text[:40])
    return int(text)


def shown(text: str) -> str:
    """The text with surrogate-escaped bytes replaced by U+FFFD, fit to be shown and stored."""
    return text if text.isascii() else SURROGATE.sub("\ufffd", text)


def shorten(line: str, limit: int) -> str:
    """The line, cut to `limit` characters."""
    return line if len(line) <= limit else line[: limit - 3] + "..."


def failure(message: str, error: ToolErrorClass, **facts: str | int | float | bool) -> ToolResult:
    """The result of a failed call."""
    return ToolResult(f"error: {message}", error, facts=facts)


def _overlap(first: frozenset[str], second: frozenset[str]) -> bool:
    return any(_holds(path, other) or _holds(other, path) for path in first for other in second)


def _holds(directory: str, path: str) -> bool:
    if not (is_path(directory) and is_path(path)):
        return directory == path
    return directory in (".", path) or path.startswith(directory + "/")
