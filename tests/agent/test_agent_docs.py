import re
from pathlib import Path

from agent_builders import renderer

from etude.agent import SessionLimits, ToolLimits, core_registry

PAGE = (Path(__file__).parents[2] / "docs" / "agent.md").read_text(encoding="utf-8")


def test_the_page_lists_every_tool_with_its_arguments():
    for schema in core_registry().schemas:
        row = re.search(rf"^\| `{schema.name}` \|([^|]*)\|", PAGE, re.MULTILINE)
        assert row, schema.name
        written = re.findall(r"`([a-z_]+\??)`", row[1])
        assert written == [p.name if p.required else f"{p.name}?" for p in schema.parameters]


def test_the_page_gives_the_limits_as_they_are():
    for name in ("max_turns", "max_calls_per_turn", "max_tokens", "max_message_tokens"):
        assert f"| `{name}` | {getattr(SessionLimits(), name)} |" in PAGE
    assert f"`list_entries` | {ToolLimits().list_entries} |" in PAGE
    assert f"| `grep_matches` | {ToolLimits().grep_matches} |" in PAGE


def test_the_errors_on_the_page_are_those_that_agents_see():
    rows = re.findall(r"^\| `(<[^`]+>)`(?: alone)? \| `error: ([^`]+)` \|", PAGE, re.MULTILINE)
    assert len(rows) >= 4
    for message, error in rows:
        (call,) = renderer().parse(renderer().message([message]))
        assert call.error == error
