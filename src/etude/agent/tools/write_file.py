"""The tool `write_file`."""

from __future__ import annotations

from itertools import takewhile

from etude.agent.tools.interface import Access, Arguments, ToolContext, writes_path
from etude.agent.tools.text_file import encoded, writable_path
from etude.records import ToolResult
from etude.sandbox.errors import PathMissingError
from etude.tokens.grammar import Parameter, ToolSchema


class WriteFile:
    """Writes a whole file, exactly as given, and makes the directories above it.

    Arguments: `path`; `text` (may be empty).
    Returns `created` for a new file, `ok` for one that was replaced, or `no change`.
    Limits: `file_bytes`. Errors: UNEXPECTED_ENVIRONMENT where the path is a directory, lies below a file or
    the disk is full; INVALID_ARGUMENTS for a path outside and for a text that is too large.
    """

    repeatable = True
    schema = ToolSchema(
        "write_file",
        "Write a whole file: a new one, or in place of the old.",
        (Parameter("path", "file to write"), Parameter("text", "the whole text")),
    )

    def access(self, arguments: Arguments) -> Access:
        return writes_path(arguments)

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        path = writable_path(arguments, context)
        data = encoded(arguments["text"], path, context)
        files = context.sandbox.files
        try:
            # One byte more than the new length is enough to compare the two.
            before = await files.read(path, len(data) + 1)
        except PathMissingError:
            before = None
        changed = before != data
        line = _first_line(before or b"", data) if changed else 1
        facts = {"kind": "edit", "path": path, "line": line, "changed": changed}
        if not changed:
            return ToolResult("no change", facts=facts)
        await files.write(path, data)
        context.changed(path)
        return ToolResult("created" if before is None else "ok", facts=facts)


def _first_line(before: bytes, after: bytes) -> int:
    """The first line, from 1, that differs."""
    pairs = zip(before.split(b"\n"), after.split(b"\n"), strict=False)
    return 1 + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
