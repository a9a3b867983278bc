"""The page about `etude agent` says what the command does."""

import re
from pathlib import Path

from etude.cli.agent import agent_command
from etude.cli.agent_loop import EXIT_KEPT_BACK, EXIT_UNFINISHED
from etude.cli.agent_output import EXIT_CLOSED_PIPE
from etude.controller.agent import trees
from etude.controller.agent.approval import MODES
from etude.controller.agent.events import (
    AgentText,
    CallsRequested,
    FilesChanged,
    MessageEnded,
    Notice,
    RunEnded,
    ToolCallEnded,
    ToolCallStarted,
    event_document,
)
from etude.records import Status, ToolCall, ToolResult
from tests.cli.commands import option_names

PAGE = (Path(__file__).parents[2] / "docs" / "agent-cli.md").read_text(encoding="utf-8")


def test_every_option_on_the_page_exists() -> None:
    known = option_names("agent")
    written = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    assert agent_command.__doc__
    assert written <= known, written - known
    told = known - {"--help", "path", "--temperature", "--tools", "--instruction"}
    assert told - {"-p"} <= written, told - written


def test_the_modes_and_events_on_the_page_are_those_there_are() -> None:
    assert re.findall(r"^\| `([a-z-]+)` \| (?:not )?asked", PAGE, re.MULTILINE) == list(MODES)
    call, result = ToolCall("x"), ToolResult("")
    made = (
        AgentText(""), AgentText("", "reasoning"), AgentText("", "summary"), MessageEnded(),
        CallsRequested(1, ()), ToolCallStarted(1, 0, call), ToolCallEnded(1, 0, call, result),
        FilesChanged(1, (), True, {}),
        Notice(""), Notice("", "retry"), Notice("", "context"), RunEnded(Status.DONE, ""),
    )  # fmt: skip
    table = PAGE[PAGE.index("| `event` |") : PAGE.index("| exit code |")]
    for event in made:
        document = event_document(event)
        assert f"`{document['event']}`" in table
        for key in document.keys() - {"event"}:
            assert f"`{key}`" in table


def test_the_limits_on_the_page_are_those_there_are() -> None:
    assert f"Files above {trees.MAX_FILE_BYTES >> 20} MiB" in PAGE
    assert f"{trees.MAX_BYTES >> 20} MiB or\n  {trees.MAX_FILES:,} files" in PAGE
    assert f"| {EXIT_UNFINISHED} | it came to a limit |" in PAGE
    assert f"| {EXIT_KEPT_BACK} | the agent finished, and something was kept back" in PAGE
    assert f"| {EXIT_CLOSED_PIPE} | the reader of the output has closed it" in PAGE
