"""Per-session counts for monitors and rewards, updated turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from etude.agent.tools.todo_write import OPEN_MARKS
from etude.records import ToolCall, ToolResult

_WRITING = frozenset({"text", "new", "patch"})
"""Arguments of the editing tools that hold what is written."""
_COMMENTS = ("#", "//", "/*", "*")


@dataclass(slots=True)
class SessionFacts:
    """Counts over one session; plain JSON values, stored with its trajectory."""

    num_turns: int = 0
    num_calls: int = 0
    """Well-formed calls that were run."""
    parallel_turns: int = 0
    """Turns with two well-formed calls or more."""
    malformed: int = 0
    """Calls that do not parse, calls above the limit of a turn, and turns without any call."""
    tool_errors: int = 0
    """Well-formed calls whose tool answered with an error."""
    errors_by_class: dict[str, int] = field(default_factory=dict[str, int])
    """The same by `ToolErrorClass`."""
    num_commands: int = 0
    """Commands run in a terminal."""
    num_questions: int = 0
    """Questions put to the user."""
    open_todos: int = 0
    """To-dos that are neither done nor cancelled."""
    written_characters: int = 0
    """Characters that edits wrote, white space left out."""
    comment_characters: int = 0
    """Those of them in lines that are nothing but a comment."""
    num_edits: int = 0
    """Edits that changed a file."""
    edits_after_read: int = 0
    """Edits of a file that an earlier turn had read; for a patch, all of its files."""
    num_test_runs: int = 0
    num_summaries: int = 0
    last_tests_green: bool = False
    """Whether the last test run passed and nothing was edited since."""
    finished: bool = False
    """Whether the agent itself ended the session."""
    first_edit_right: bool = False
    """Whether the first test run after the first edit was green, with no second edit before it."""
    files_read: list[str] = field(default_factory=list[str])
    """Paths in the order in which they were first read."""
    _first_edit_open: bool = False

    def on_turn(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> None:
        """Counts one turn."""
        known = frozenset(self.files_read)
        well_formed = 0
        for call, result in zip(calls, results, strict=True):
            if call.error is not None:
                self.malformed += 1
                continue
            well_formed += 1
            self._count(result, known)
            if result.facts.get("kind") == "edit" and result.facts["changed"]:
                self._count_writing(call)
        self.num_turns += 1
        self.num_calls += well_formed
        self.parallel_turns += well_formed >= 2

    def _count(self, result: ToolResult, known: frozenset[str]) -> None:
        facts = result.facts
        self.finished = self.finished or result.finished
        if result.error is not None:
            self.tool_errors += 1
            self.errors_by_class[result.error] = self.errors_by_class.get(result.error, 0) + 1
        match facts.get("kind"):
            case "read":
                path = str(facts["path"])
                if path not in self.files_read:
                    self.files_read.append(path)
            case "edit" if facts["changed"]:
                self._first_edit_open = self.num_edits == 0
                self.num_edits += 1
                paths = str(facts.get("paths", facts["path"])).split("\n")
                self.edits_after_read += known.issuperset(paths)
                self.last_tests_green = False
            case "test":
                self.num_test_runs += 1
                self.last_tests_green = bool(facts["green"])
                if self._first_edit_open:
                    self.first_edit_right = self.last_tests_green
                    self._first_edit_open = False
            case "command":
                self.num_commands += 1
            case "question":
                self.num_questions += 1
            case "todo":
                todos = str(facts["todos"]).splitlines()
                self.open_todos = sum(todo.startswith(OPEN_MARKS) for todo in todos)

    def _count_writing(self, call: ToolCall) -> None:
        """Counts characters in the arguments that an edit writes; of a patch, in its added lines."""
        for name in _WRITING & call.arguments.keys():
            for line in call.arguments[name].splitlines():
                if name == "patch":
                    if not line.startswith("+") or line.startswith("+++"):
                        continue
                    line = line[1:]
                bare = "".join(line.split())
                self.written_characters += len(bare)
                if bare.startswith(_COMMENTS):
                    self.comment_characters += len(bare)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)
