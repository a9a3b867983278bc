"""Titles of tool calls, and previews of edits and commands, for the user."""

from __future__ import annotations

from etude.agent.tools.values import words_of
from etude.errors import ToolArgumentError
from etude.records import ToolCall

_NUM_LINES = 60
_NUM_PATHS = 1000
_TITLE_CHARACTERS = 100
_TITLES = ("path", "command", "pattern", "query", "url", "question", "id")

KINDS = {
    "read_file": "read",
    "list_dir": "read",
    "read_lints": "read",
    "glob": "search",
    "grep": "search",
    "semantic_search": "search",
    "edit_lines": "edit",
    "search_replace": "edit",
    "write_file": "edit",
    "apply_patch": "edit",
    "delete_file": "delete",
    "run_command": "execute",
    "run_tests": "execute",
    "todo_write": "think",
}
"""Kinds of tools in the Agent Client Protocol; other tools are `other`."""


def call_title(call: ToolCall) -> str:
    """A title of the call, on one line."""
    name = call.name or "(no call)"
    if paths := _paths(call):
        return _cut(f"{name} {' '.join(paths)}")
    for key in _TITLES:
        if value := call.arguments.get(key, "").strip():
            return _cut(f"{name} {' '.join(value.split())}")
    return name


def call_preview(call: ToolCall) -> list[str]:
    """The text that the call would write or run, by lines: `-` and `+` before removed and added ones.

    For an MCP server's tool, whose arguments are unknown here: all of them.
    """
    arguments = call.arguments
    if call.name not in KINDS:
        return _head([line for name in arguments for line in f"{name}: {arguments[name]}".splitlines()])
    if "command" in arguments:
        return _head([f"$ {line}" for line in arguments["command"].splitlines()])
    if paths := _paths(call):
        return _head(paths)
    if "patch" in arguments:
        return _head(arguments["patch"].splitlines())
    lines = [f"-{line}" for line in arguments.get("old", "").splitlines()]
    if "start" in arguments:
        end = arguments.get("end") or arguments["start"]
        lines.append(f"@@ lines {arguments['start'].strip()} to {end.strip()} @@")
    for key in ("new", "text"):
        lines += [f"+{line}" for line in arguments.get(key, "").splitlines()]
    return _head(lines)


def _paths(call: ToolCall) -> list[str]:
    """The files that `run_tests` or `read_lints` is restricted to; empty: all."""
    try:
        return words_of(call.arguments, "paths", _NUM_PATHS)
    except ToolArgumentError:  # the tool reports it
        return [call.arguments["paths"]]


def _head(lines: list[str]) -> list[str]:
    if len(lines) <= _NUM_LINES:
        return lines
    return [*lines[:_NUM_LINES], f"... {len(lines) - _NUM_LINES} lines more"]


def _cut(text: str) -> str:
    return text if len(text) <= _TITLE_CHARACTERS else text[: _TITLE_CHARACTERS - 3] + "..."
