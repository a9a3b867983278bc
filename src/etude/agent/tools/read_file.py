"""The tool `read_file`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from etude.agent.tools.interface import (
    Access,
    Arguments,
    Outcome,
    RunTogether,
    ToolContext,
    ToolLimits,
    integer,
    reads_path,
    shorten,
    shown,
)
from etude.agent.tools.text_file import path_of, read_text, text_of
from etude.errors import AgentError, ToolArgumentError
from etude.records import ToolResult
from etude.tokens.grammar import Parameter, ToolSchema

_LARGE_BYTES = 64 << 10


class ReadFile:
    """Shows lines of a file, each as its number, a tab and its text.

    Arguments: `path`; `offset` (first line, from 1; -20 begins 20 lines before the end); `limit` (number of
    lines). Returns `empty` for an empty file; bytes that are not UTF-8 are shown as U+FFFD.
    Limits: `read_lines` lines, each cut to `line_characters`; files up to `file_bytes`, no binary ones.
    Errors: UNEXPECTED_ENVIRONMENT for a missing path or a directory; INVALID_ARGUMENTS for a path outside, an
    offset past the end, a file that is binary or too large.
    """

    repeatable = True
    schema = ToolSchema(
        "read_file",
        "Read a file with line numbers.",
        (
            Parameter("path", "file to read"),
            Parameter("offset", "first line, from 1", required=False, kind="integer"),
            Parameter("limit", "number of lines", required=False, kind="integer"),
        ),
    )

    def access(self, arguments: Arguments) -> Access:
        return reads_path(arguments)

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        window = _window(arguments, context)
        return _shown(await read_text(window.path, context), window, context.limits)

    def together(self, context: ToolContext) -> RunTogether:
        """See `how_together`: the files are read in one round trip, where the sandbox can do that."""
        return partial(_read_together, context)


@dataclass(slots=True)
class _Window:
    """The file and the lines of it to show."""

    path: str
    first: int
    """From 1; negative: from the end."""
    count: int


def _window(arguments: Arguments, context: ToolContext) -> _Window:
    """Parses the arguments. Raises ToolArgumentError for invalid ones."""
    limits = context.limits
    path = path_of(arguments, context)
    first = integer(arguments, "offset", 1)
    count = min(integer(arguments, "limit", limits.read_lines), limits.read_lines)
    if first == 0 or count < 1:
        name = "offset" if first == 0 else "limit"
        raise ToolArgumentError(f"{name} starts at 1", field=name, received=arguments[name])
    return _Window(path, first, count)


def _shown(text: str, window: _Window, limits: ToolLimits) -> ToolResult:
    """The result for a file that holds `text`. Raises ToolArgumentError if it ends before the window."""
    first, count = window.first, window.count
    facts = {"kind": "read", "path": window.path}
    lines = text.removesuffix("\n").split("\n") if text else []
    if first < 0:
        first = max(len(lines) + first + 1, 1)
    if not lines and first == 1:
        return ToolResult("empty", facts=facts)
    if first > len(lines):
        raise ToolArgumentError(f"only {len(lines)} lines", field="offset", received=first)
    kept = lines[first - 1 : first - 1 + count]
    numbered = [
        f"{number}\t{shorten(line, limits.line_characters)}" for number, line in enumerate(kept, first)
    ]
    if (rest := len(lines) - (first - 1 + len(kept))) > 0:
        numbered.append(f"... {rest} more lines")
    return ToolResult(shown("\n".join(numbered)), facts=facts)


async def _read_together(context: ToolContext, calls: Sequence[Arguments]) -> list[Outcome]:
    """Runs the calls as a batch; the outcome of each is that of `run`."""
    windows = [_window_or_error(arguments, context) for arguments in calls]
    paths = [window.path for window in windows if isinstance(window, _Window)]
    found = iter(await context.sandbox.files.read_many(paths, context.limits.file_bytes + 1))
    outcomes: list[Outcome] = []
    for window in windows:
        if isinstance(window, AgentError):
            outcomes.append(window)
            continue
        data = next(found)
        outcomes.append(_outcome(data, window, context))
        if isinstance(data, bytes) and len(data) > _LARGE_BYTES:
            await asyncio.sleep(0)  # lets other sessions run
    return outcomes


def _window_or_error(arguments: Arguments, context: ToolContext) -> _Window | AgentError:
    try:
        return _window(arguments, context)
    except AgentError as error:
        return error


def _outcome(data: bytes | AgentError, window: _Window, context: ToolContext) -> Outcome:
    if isinstance(data, AgentError):
        return data
    try:
        return _shown(text_of(data, window.path, context), window, context.limits)
    except AgentError as error:
        return error
