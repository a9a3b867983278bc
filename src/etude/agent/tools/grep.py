"""The tool `grep`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from etude.agent.globs import compile_globs
from etude.agent.tools.interface import (
    Access,
    Arguments,
    ToolContext,
    ToolLimits,
    integer,
    reads_path,
    shorten,
    shown,
)
from etude.agent.tools.patterns import common_pattern
from etude.agent.tools.ports import GrepRequest
from etude.agent.tools.text_file import directory_of, read_text
from etude.agent.tools.values import flag
from etude.errors import ToolArgumentError
from etude.records import ToolResult
from etude.sandbox.types import GrepMatch
from etude.tokens.grammar import Parameter, ToolSchema

_MAX_CONTEXT = 5
_MOST_MATCHES = 20_000
"""Most matches requested of a sandbox before filtering."""


class Grep:
    """Finds lines that match a regular expression: `path:line: text`, sorted by path and line.

    Arguments: `pattern`, in the language common to ripgrep and Python (see `patterns`); `path` (file or
    directory, default: the whole workspace); `include` (files to search, `*.py`, `lib/**/*.{c,h}`);
    `ignore_case`; `context` (lines to show around each match, at most 5, written `path-line- text`).
    Limits: `grep_matches` lines, each cut to `line_characters`. Hidden files and directories are passed over
    unless `path` names them, as by ripgrep; so are `__pycache__` and binary files.
    Errors: INVALID_ARGUMENTS for a pattern that is broken, takes too long, or means different things to
    ripgrep and Python; UNEXPECTED_ENVIRONMENT for a missing path. No match is no error.

    The session's index answers if there is one, else the sandbox searches. An index leaves out files that
    `.gitignore` names; the sandbox searches those as well.
    """

    repeatable = True
    schema = ToolSchema(
        "grep",
        "Find lines that match a regular expression.",
        (
            Parameter("pattern", "Python regular expression"),
            Parameter("path", "file or directory, default the whole workspace", required=False),
            Parameter("include", "files to search, such as *.py", required=False),
            Parameter("ignore_case", "true: upper and lower case are one", required=False, kind="boolean"),
            Parameter("context", "lines to show around each match", required=False, kind="integer"),
        ),
    )

    def access(self, arguments: Arguments) -> Access:
        return reads_path(arguments)

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        limits = context.limits
        pattern = common_pattern(arguments["pattern"])
        around = integer(arguments, "context", 0)
        if not 0 <= around <= _MAX_CONTEXT:
            raise ToolArgumentError(f"context is 0 to {_MAX_CONTEXT}", field="context", received=around)
        include = arguments.get("include", "").strip()
        request = GrepRequest(
            pattern,
            directory_of(arguments, context),
            (include,) if include else (),
            flag(arguments, "ignore_case"),
            limits.grep_matches + 1,
        )
        matches = await _find_as_written(request, arguments["pattern"], context)
        if not matches:
            return ToolResult("no match", facts={"num_matches": 0})
        kept = matches[: limits.grep_matches]
        lines = await _with_context(kept, around, context) if around else _plain(kept, limits)
        if len(kept) < len(matches):
            lines.append("... more")
        return ToolResult(shown("\n".join(lines)), facts={"num_matches": len(kept)})


async def _find_as_written(request: GrepRequest, written: str, context: ToolContext) -> list[GrepMatch]:
    """As `find`; an error quotes the pattern that the agent wrote, not our translation of it."""
    try:
        return await find(request, context)
    except ToolArgumentError as error:
        if error.field != "pattern":
            raise
        # ripgrep quotes the pattern in its frame, over several lines, and ends with the reason.
        lines = error.message.split("\n")
        reason = lines[-1].removeprefix("error: ")
        message = f"bad regular expression: {reason}" if len(lines) > 1 else reason
        raise ToolArgumentError(message, field="pattern", received=shorten(written, 200)) from error


async def find(request: GrepRequest, context: ToolContext) -> list[GrepMatch]:
    """Matches of a pattern in common form, sorted, at most `limit`: the same from the index and the sandbox.

    Raises ToolArgumentError.
    """
    is_included = _filter(request)
    if context.search is not None and not _is_hidden(request.path):
        served = await context.search.grep(request)
        if served is not None:
            return [match for match in served if is_included(match.path)][: request.limit]
    pattern = f"(?i){request.pattern}" if request.ignore_case else request.pattern
    limit = request.limit
    while True:
        found = await context.sandbox.files.grep(pattern, request.path, limit)
        kept = [match for match in found if is_included(match.path)]
        if len(kept) >= request.limit or len(found) < limit or limit >= _MOST_MATCHES:
            return kept[: request.limit]
        limit = min(limit * 8, _MOST_MATCHES)


def _filter(request: GrepRequest) -> Callable[[str], bool]:
    """A predicate on paths whose matches are shown. The file that the request names always is."""
    fits = compile_globs(request.globs)
    start = 0 if request.path == "." else len(request.path)

    def is_included(path: str) -> bool:
        if path == request.path:
            return True
        parts = path[start:].split("/")
        if any(part.startswith(".") or part == "__pycache__" for part in parts):
            return False
        return fits(path)

    return is_included


def _is_hidden(path: str) -> bool:
    """Whether a path has a hidden part, as the harness's files do: an index may not hold such files."""
    return any(part.startswith(".") for part in path.split("/") if part != ".")


def _plain(matches: Sequence[GrepMatch], limits: ToolLimits) -> list[str]:
    return [f"{m.path}:{m.line_number}: {shorten(m.line.strip(), limits.line_characters)}" for m in matches]


async def _with_context(matches: Sequence[GrepMatch], around: int, context: ToolContext) -> list[str]:
    """The matches between the lines around them, `--` where lines were left out."""
    by_path: dict[str, dict[int, str]] = {}
    for match in matches:
        by_path.setdefault(match.path, {})[match.line_number] = match.line
    texts = await asyncio.gather(*(_lines_of(path, context) for path in by_path))
    written: list[str] = []
    for (path, found), text in zip(by_path.items(), texts, strict=True):
        written += ["--", *_block(path, found, text, around, context.limits.line_characters)]
    return written[1:]


def _block(path: str, found: dict[int, str], text: list[str], around: int, characters: int) -> list[str]:
    near = {m for n in found for m in range(max(n - around, 1), min(n + around, len(text)) + 1)}
    wanted = sorted(near | found.keys())
    written: list[str] = []
    for place, number in enumerate(wanted):
        if place and wanted[place - 1] != number - 1:
            written.append("--")
        # Matches are shown as found: the file may have changed since.
        line = found[number] if number in found else text[number - 1]
        mark = ":" if number in found else "-"
        written.append(f"{path}{mark}{number}{mark} {shorten(line.rstrip(), characters)}")
    return written


async def _lines_of(path: str, context: ToolContext) -> list[str]:
    """The file's lines; none if it is missing or too large: then matches are shown without context."""
    try:
        return (await read_text(path, context)).split("\n")
    except ToolArgumentError:
        return []
