"""The tool `todo_write`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etude.agent.tools.interface import Access, Arguments, ToolContext
from etude.agent.tools.state import Todo
from etude.agent.tools.values import flag, json_value
from etude.errors import ToolArgumentError
from etude.records import ToolResult
from etude.tokens.grammar import Parameter, ToolSchema

NUM_TODOS = 50
_TEXT_CHARACTERS = 200
_ID_CHARACTERS = 20
_MARKS = {"pending": "[ ]", "in_progress": "[>]", "done": "[x]", "cancelled": "[-]"}
OPEN_MARKS = (_MARKS["pending"], _MARKS["in_progress"])
"""Prefixes of the lines of open entries."""

_ENTRY = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "text": {"type": "string"},
        "status": {"type": "string", "enum": list(_MARKS)},
    },
}


class TodoWrite:
    """Writes the agent's to-do list, which the session carries into its self-summaries.

    Arguments: `todos`: a JSON list of `{"id", "text", "status"}`, status being pending (the default),
    in_progress, done or cancelled; a missing `id` is the entry's place in the list. `merge` = true: entries
    with a known id change that entry (what they leave out stays), others are added at the end; without it
    the list is replaced.
    Returns the whole list, one entry a line: `[x] 1 read the parser`.
    Limits: 50 entries of 200 characters.
    Errors: invalid_arguments for an invalid list, naming the first wrong entry; nothing is changed then.
    """

    repeatable = False
    schema = ToolSchema(
        "todo_write",
        "Write the list of what is to be done.",
        (
            Parameter("todos", "the entries", kind="array", schema={"items": _ENTRY}),
            Parameter(
                "merge",
                "true: change or add these entries, keep the others",
                required=False,
                kind="boolean",
            ),
        ),
    )

    def access(self, arguments: Arguments) -> Access:
        return Access(writes=frozenset({"todo:"}))

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        merge = flag(arguments, "merge")
        entries = json_value(arguments, "todos")
        if not isinstance(entries, list):
            raise _wrong("todos must be a list")
        if len(entries) > NUM_TODOS:
            raise _wrong(f"more than {NUM_TODOS} entries")
        known = {todo.id: todo for todo in context.state.todos} if merge else {}
        for place, entry in enumerate(entries, 1):
            todo = _todo(entry, place, known)
            if todo.id in known and not merge:
                raise _wrong(f"entry {place}: id {todo.id} stands twice")
            known[todo.id] = todo
        if len(known) > NUM_TODOS:
            raise _wrong(f"more than {NUM_TODOS} entries")
        context.state.todos[:] = known.values()
        rendered = render_todos(context.state.todos)
        return ToolResult(rendered or "empty", facts={"kind": "todo", "todos": rendered})


def render_todos(todos: Sequence[Todo]) -> str:
    """The list, one entry a line."""
    return "\n".join(f"{_MARKS[todo.status]} {todo.id} {todo.text}" for todo in todos)


def _todo(entry: Any, place: int, known: Mapping[str, Todo]) -> Todo:
    """One entry; missing fields come from the known entry of its id."""
    if not isinstance(entry, dict):
        raise _wrong(f'entry {place} must be an object such as {{"id": "1", "text": "..."}}')
    unknown = sorted(str(key) for key in entry.keys() - {"id", "text", "status"})
    if unknown:
        raise _wrong(f"entry {place}: unknown key {unknown[0][:_ID_CHARACTERS]}")
    todo_id = entry.get("id", place)
    if isinstance(todo_id, bool) or not isinstance(todo_id, str | int):
        raise _wrong(f"entry {place}: id must be text")
    todo_id = " ".join(str(todo_id).split())
    if not 0 < len(todo_id) <= _ID_CHARACTERS:
        raise _wrong(f"entry {place}: id must have 1 to {_ID_CHARACTERS} characters")
    before = known.get(todo_id, Todo(todo_id, ""))
    text, status = entry.get("text", before.text), entry.get("status", before.status)
    if not isinstance(text, str) or not text.strip():
        raise _wrong(f"entry {place}: text is missing")
    if not isinstance(status, str) or status not in _MARKS:
        raise _wrong(f"entry {place}: status must be one of {', '.join(_MARKS)}")
    text = " ".join(text.encode("utf-8", "replace").decode().split())
    if len(text) > _TEXT_CHARACTERS:
        raise _wrong(f"entry {place}: more than {_TEXT_CHARACTERS} characters")
    return Todo(todo_id.encode("utf-8", "replace").decode(), text, status)


def _wrong(message: str) -> ToolArgumentError:
    return ToolArgumentError(message, field="todos")
