"""The display of a call that needs the user's approval."""

from etude.cli.agent_calls import call_preview, call_title
from etude.records import ToolCall


def test_all_arguments_of_an_unknown_tool_are_shown() -> None:
    call = ToolCall("files_write", {"path": "/home/a/.profile", "content": "one\ntwo", "command": "now"})
    assert call_title(call) == "files_write /home/a/.profile"
    assert call_preview(call) == ["path: /home/a/.profile", "content: one", "two", "command: now"]


def test_an_edit_is_shown_by_what_goes_and_comes() -> None:
    call = ToolCall("search_replace", {"path": "a.py", "old": "x", "new": "y"})
    assert call_preview(call) == ["-x", "+y"]
