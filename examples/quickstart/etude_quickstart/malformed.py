"""Malformed tool calls, with mistakes typical of an untrained agent."""

from __future__ import annotations

from random import Random

from etude.records import ToolCall

_WRONG_NAMES = {
    "list_dir": "list_files",
    "grep": "search",
    "read_file": "open_file",
    "edit_lines": "edit_file",
    "search_replace": "replace",
    "run_tests": "test",
    "run_command": "shell",
    "finish": "done",
}
_OPTIONAL = {"end"}
"""Optional arguments: a call without them is still well-formed."""


def malform(call: ToolCall, rng: Random) -> str:
    """The call as raw text with one mistake: no closing tag, an unknown tool or a missing argument."""
    choice = rng.randrange(3)
    if choice == 0:
        return _spell(call.name, call).removesuffix(f"</{call.name}>")
    if choice == 1 or not call.arguments:
        return _spell(_WRONG_NAMES[call.name], call)
    dropped = rng.choice(sorted(call.arguments.keys() - _OPTIONAL))
    kept = {name: value for name, value in call.arguments.items() if name != dropped}
    return _spell(call.name, ToolCall(call.name, kept))


def _spell(name: str, call: ToolCall) -> str:
    body = "".join(f"<{key}>{value}</{key}>" for key, value in call.arguments.items())
    return f"<{name}>{body}</{name}>"
