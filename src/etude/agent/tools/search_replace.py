"""The tool `search_replace`."""

from __future__ import annotations

from etude.agent.tools.interface import Arguments, ToolContext, failure
from etude.agent.tools.text_file import path_of, read_text, write_text
from etude.errors import ToolArgumentError
from etude.records import ToolErrorClass, ToolResult
from etude.sandbox.paths import normal_path
from etude.tokens.grammar import Parameter, ToolSchema


class SearchReplace:
    """Replaces the one place in a file where `old` stands, exactly as given.

    Arguments: `path`; `old` (must stand in the file exactly once); `new` (empty deletes).
    Returns `ok`, or `no change`.
    Errors: a missing path, an empty `old`, no match, more than one match: nothing is changed then.
    """

    only_reads = False
    schema = ToolSchema(
        "search_replace",
        "Replace text that stands in a file exactly once.",
        (
            Parameter("path", "file to edit"),
            Parameter("old", "text to replace, exactly as it stands"),
            Parameter("new", "the new text"),
        ),
    )

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        path, old, new = path_of(arguments), arguments["old"], arguments["new"]
        if not old:
            raise ToolArgumentError("old is empty", field="old")
        before = await read_text(path, context)
        at = before.find(old)
        if at < 0:
            return failure("old not found", ToolErrorClass.UNEXPECTED_ENVIRONMENT)
        if before.find(old, at + 1) >= 0:
            return failure("old found more than once", ToolErrorClass.UNEXPECTED_ENVIRONMENT)
        line = before.count("\n", 0, at) + 1
        facts = {"kind": "edit", "path": normal_path(path), "line": line, "changed": old != new}
        if old == new:
            return ToolResult("no change", facts=facts)
        await write_text(path, before[:at] + new + before[at + len(old) :], context)
        return ToolResult("ok", facts=facts)
