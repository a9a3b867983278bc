"""The scripted expert of parts: one bug, somewhere in a chain of calls."""

from __future__ import annotations

from random import Random

from etude.records import Task, ToolCall
from etude.tasks.edits import Edit, as_call, body_start
from etude.tasks.expert import IMPORT, Expert
from etude.tasks.skill import ExpertSkill

OTHER_FILE = 0.35
"""Share of edits that write the body of another file of the chain, as it stands already."""
PART_SKILL = ExpertSkill(right_edit=0.75, rewrite=0.4)


class PartExpert(Expert):
    """Reads the whole chain, then works as any Expert."""

    def __init__(self, task: Task, rng: Random, skill: ExpertSkill | None = None) -> None:
        super().__init__(task, rng, skill or PART_SKILL)

    def _next_to_read(self) -> str | None:
        path = next((known for known in self._paths if known.endswith(f"/{self._function}.py")), None)
        while path in self._texts:
            modules = IMPORT.findall("\n".join(self._texts[path]))
            if not modules:
                return None
            path = modules[0].replace(".", "/") + ".py"
        return path

    def _edit(self) -> ToolCall:
        others = sorted(self._texts.keys() - {self._fix.path})
        if others and not self._mending and self._chance(OTHER_FILE):
            path = self._rng.choice(others)
            text = self._texts[path]
            first = body_start(text)
            return as_call(Edit(path, first, "\n".join(text[first - 1 :])), text, by_text=False)
        return super()._edit()
