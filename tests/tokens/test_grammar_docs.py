import re
from pathlib import Path

from token_builders import HERMES

from etude.tokens.grammar import parse_calls
from etude.tokens.grammar.json_reader import MAX_DEPTH, MAX_KEY_CHARACTERS, MAX_SCALAR_CHARACTERS

PAGE = (Path(__file__).parents[2] / "docs" / "grammars.md").read_text(encoding="utf-8")


def test_the_errors_on_the_page_are_those_that_agents_see():
    rows = re.findall(r"^\| (?:`([\[{][^`]*)`|nothing) \| `([^`]+)` \|$", PAGE, re.MULTILINE)
    assert len(rows) == 18
    for body, error in rows:
        (call,) = parse_calls(HERMES.parser(True), [f"<tool_call>{body}</tool_call>"])
        assert call.error == error


def test_the_limits_on_the_page_are_those_that_hold():
    assert f"`nested deeper than {MAX_DEPTH}`" in PAGE
    assert f"`key too long` ({MAX_KEY_CHARACTERS})" in PAGE
    assert f"`number too long` ({MAX_SCALAR_CHARACTERS})" in PAGE
