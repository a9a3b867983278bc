"""The scripted expert of parts: one bug, in one of the files that the instruction names."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from etude.errors import TaskError
from etude.records import Task, ToolCall
from etude.tasks.edits import Edit, as_call, body_start
from etude.tasks.expert import Expert
from etude.tasks.skill import ExpertSkill

OTHER_FILE = 0.35
"""Share of edits that write the body of another named file, as it stands already."""
PART_SKILL = ExpertSkill(right_edit=0.75, rewrite=0.4)


class PartExpert(Expert):
    """Reads every file that the instruction names, then works as any Expert."""

    def __init__(self, task: Task, rng: Random, skill: ExpertSkill | None = None) -> None:
        self._named = [word for word in task.instruction.split() if word.endswith(".py")]
        super().__init__(task, rng, skill or PART_SKILL)

    def _find_function(self, instruction: str) -> str:
        if not self._named:
            raise TaskError(
                "names no file", field="instruction", received=instruction, fix="say which files to look at"
            )
        return ""

    def _approach(self, calls: Sequence[ToolCall | str]) -> ToolCall | None:
        asked = {call.arguments.get("path") for call in calls if isinstance(call, ToolCall)}
        unread = [path for path in self._named if path not in self._texts]
        if not unread:
            return self._edit()
        path = next((path for path in unread if path not in asked), None)
        return None if path is None else ToolCall("read_file", {"path": path})

    def _edit(self) -> ToolCall:
        others = [path for path in self._named if path != self._fix.path and path in self._texts]
        if others and not self._mending and self._chance(OTHER_FILE):
            path = self._rng.choice(others)
            text = self._texts[path]
            first = body_start(text)
            return as_call(Edit(path, first, "\n".join(text[first - 1 :])), text, by_text=False)
        return super()._edit()
