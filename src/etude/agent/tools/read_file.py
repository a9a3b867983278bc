"""The tool `read_file`."""

from __future__ import annotations

from etude.agent.tools.interface import Access, Arguments, ToolContext, integer, reads_path, shorten, shown
from etude.agent.tools.text_file import path_of, read_text
from etude.errors import ToolArgumentError
from etude.records import ToolResult
from etude.tokens.grammar import Parameter, ToolSchema


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
        limits = context.limits
        path = path_of(arguments, context)
        first = integer(arguments, "offset", 1)
        count = min(integer(arguments, "limit", limits.read_lines), limits.read_lines)
        if first == 0 or count < 1:
            name = "offset" if first == 0 else "limit"
            raise ToolArgumentError(f"{name} starts at 1", field=name, received=arguments[name])
        text = await read_text(path, context)
        facts = {"kind": "read", "path": path}
        lines = text.removesuffix("\n").split("\n") if text else []
        if first < 0:
            first = max(len(lines) + first + 1, 1)
        if not lines and first == 1:
            return ToolResult("empty", facts=facts)
        if first > len(lines):
            raise ToolArgumentError(f"only {len(lines)} lines", field="offset", received=first)
        kept = lines[first - 1 : first - 1 + count]
        if max(map(len, kept)) > limits.line_characters:
            kept = [shorten(line, limits.line_characters) for line in kept]
        numbered = [f"{number}\t{line}" for number, line in enumerate(kept, first)]
        if (rest := len(lines) - (first - 1 + len(kept))) > 0:
            numbered.append(f"... {rest} more lines")
        return ToolResult(shown("\n".join(numbered)), facts=facts)
