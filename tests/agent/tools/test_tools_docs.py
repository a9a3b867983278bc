import re
from pathlib import Path

from etude.agent import full_registry
from etude.agent.tools.interface import ToolLimits

PAGE = (Path(__file__).parents[3] / "docs" / "tools.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
SCHEMAS = {schema.name: schema for schema in full_registry().schemas}


def test_every_tool_has_a_section_that_names_its_parameters():
    assert SECTIONS.keys() == SCHEMAS.keys()
    for name, text in SECTIONS.items():
        for parameter in SCHEMAS[name].parameters:
            assert re.search(rf"`{parameter.name}\??`", text), (name, parameter.name)


def test_limits_on_the_page_are_limits_of_tools():
    named = set(re.findall(r"`([a-z]+_[a-z_]+)`", PAGE))
    limits = {"file_bytes", "list_entries", "list_depth", "grep_matches", "read_lines", "line_characters"}
    assert limits | {"parallel_calls", "provider_attempts"} <= named
    assert all(hasattr(ToolLimits(), name) for name in limits | {"parallel_calls", "provider_attempts"})
