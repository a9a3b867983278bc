"""The tool `search_replace`."""

from __future__ import annotations

from etude.agent.tools.interface import Access, Arguments, ToolContext, failure, shorten, shown, writes_path
from etude.agent.tools.matching import Found, find_places, line_of, nearest, with_line_ends
from etude.agent.tools.text_file import read_text, refuse_large, writable_path, write_edit
from etude.agent.tools.values import flag
from etude.errors import ToolArgumentError
from etude.kit.tasks import off_loop
from etude.records import ToolErrorClass, ToolResult
from etude.tokens.grammar import Parameter, ToolSchema

_NUM_LINES = 8


class SearchReplace:
    """Replaces the only occurrence of `old` in a file.

    Arguments: `path`; `old` (must occur in the file exactly once); `new` (empty deletes); `replace_all`
    (true: every exact occurrence of `old`).
    A text without an exact match is searched for by whole lines in stages (`matching`): ignoring blanks at
    line ends, then indentation, then look-alike characters. `strict` leaves the stages out: for training,
    where an edit should be exact. Lines of a file with CRLF line ends keep them.
    Returns `ok`, with the stage if it was not exact and the number of places with `replace_all`; or `no
    change`.
    Errors: UNEXPECTED_ENVIRONMENT for a missing path, for no match (with the lines most like `old`) and for
    more than one (with their line numbers); INVALID_ARGUMENTS for an empty `old`, a path outside, a file that
    is binary or too large. Nothing is changed then.
    """

    repeatable = False
    schema = ToolSchema(
        "search_replace",
        "Replace text that stands in a file exactly once.",
        (
            Parameter("path", "file to edit"),
            Parameter("old", "text to replace, exactly as it stands"),
            Parameter("new", "the new text"),
            Parameter("replace_all", "true: replace it wherever it stands", required=False, kind="boolean"),
        ),
    )

    def __init__(self, strict: bool = False, hints: bool = True) -> None:
        """`hints`: whether errors say where the text occurs, or which lines are most like it."""
        self._strict = strict
        self._hints = hints

    def access(self, arguments: Arguments) -> Access:
        return writes_path(arguments)

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        path, old, new = writable_path(arguments, context), arguments["old"], arguments["new"]
        replace_all = flag(arguments, "replace_all")
        if not old:
            raise ToolArgumentError("old is empty", field="old")
        refuse_large(len(new), path, context)
        before = await read_text(path, context)
        if replace_all and (count := before.count(with_line_ends(before, old)[0])):
            old, new = with_line_ends(before, old, new)
            refuse_large(len(before) + count * (len(new) - len(old)), path, context)
            after = before.replace(old, new)
            done = "ok" if count == 1 else f"ok, {count} places"
            return await write_edit(path, before, after, line_of(before, before.index(old)), done, context)
        found = await off_loop(len(before), find_places, before, old, new, self._strict)
        if not found.places:
            return await self._missing(before, old, context)
        place, *others = found.places
        if others:
            return self._ambiguous(before, found)
        after = before[: place.start] + place.new + before[place.end :]
        done = "ok" if found.stage == "exact" else f"ok, matched apart from {found.stage}"
        return await write_edit(path, before, after, line_of(before, place.start), done, context)

    async def _missing(self, content: str, old: str, context: ToolContext) -> ToolResult:
        message = "old not found"
        near = await off_loop(len(content), nearest, content, old) if self._hints else None
        if near is not None:
            first, lines = near
            limit = context.limits.line_characters
            numbered = [f"{n}\t{shorten(line.rstrip(), limit)}" for n, line in enumerate(lines, first)]
            message = "\n".join(["old not found; most like it:", *numbered])
        return failure(shown(message), ToolErrorClass.UNEXPECTED_ENVIRONMENT)

    def _ambiguous(self, content: str, found: Found) -> ToolResult:
        message = "old found more than once"
        if self._hints:
            numbers = [*dict.fromkeys(str(line_of(content, place.start)) for place in found.places)]
            more = ", ..." if len(numbers) > _NUM_LINES else ""
            message += f": line{'s' if numbers[1:] else ''} {', '.join(numbers[:_NUM_LINES])}{more}"
        return failure(message, ToolErrorClass.UNEXPECTED_ENVIRONMENT)
