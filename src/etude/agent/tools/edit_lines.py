"""The tool `edit_lines`."""

from __future__ import annotations

from etude.agent.tools.interface import Access, Arguments, ToolContext, integer, writes_path
from etude.agent.tools.matching import with_line_ends
from etude.agent.tools.text_file import line_end, read_text, refuse_large, writable_path, write_edit
from etude.errors import ToolArgumentError
from etude.records import ToolResult
from etude.tokens.grammar import Parameter, ToolSchema


class EditLines:
    """Replaces lines `start` to `end`, both included and counted from 1, by `text`.

    Arguments: `path`; `start`; `end` (default: `start`); `text` (empty deletes the lines).
    `start` may be one past the last line: the text is appended. Line ends stay as the file has them.
    Returns `ok`, or `no change`.
    Errors: UNEXPECTED_ENVIRONMENT for a missing path or a directory; INVALID_ARGUMENTS for lines that the
    file does not have, a path outside, a file that is binary or too large.
    """

    repeatable = False
    schema = ToolSchema(
        "edit_lines",
        "Replace lines of a file.",
        (
            Parameter("path", "file to edit"),
            Parameter("start", "first line to replace, from 1", kind="integer"),
            Parameter("end", "last line to replace, default start", required=False, kind="integer"),
            Parameter("text", "the new lines; empty deletes"),
        ),
    )

    def access(self, arguments: Arguments) -> Access:
        return writes_path(arguments)

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        path = writable_path(arguments, context)
        start = integer(arguments, "start")
        end = integer(arguments, "end", start)
        text = arguments["text"]
        refuse_large(len(text), path, context)
        before = await read_text(path, context)
        after = replace_lines(before, start, end, text)
        return await write_edit(path, before, after, start, "ok", context)


def replace_lines(content: str, start: int, end: int, text: str) -> str:
    """`content` with lines start..end (from 1, inclusive) replaced. Raises ToolArgumentError."""
    end_line = line_end(content)
    lines = content.split(end_line)
    closed = lines[-1] == ""
    if closed:
        lines.pop()
    if not 1 <= start <= len(lines) + 1:
        raise ToolArgumentError(f"start must be 1 to {len(lines) + 1}", field="start", received=start)
    appending = start == len(lines) + 1
    if not appending and not start <= end <= len(lines):
        raise ToolArgumentError(f"end must be {start} to {len(lines)}", field="end", received=end)
    (text,) = with_line_ends(content, text)
    lines[start - 1 : end] = text.split(end_line) if text else []
    return end_line.join(lines) + (end_line if lines and (closed or appending) else "")
