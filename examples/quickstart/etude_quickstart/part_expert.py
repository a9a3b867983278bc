"""The scripted expert of parts: one bug, in the file of the failing test.

    run the tests -> read the file of the test that fails -> edit it -> run the tests again
         ^
         +-- or first: list the files, read the last one, edit it

Sessions that start with an arbitrary file teach to follow the test output rather than the file read last.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from etude.records import Task, ToolCall, ToolResult
from etude_quickstart.edits import Edit, as_call, body_start
from etude_quickstart.expert import Expert
from etude_quickstart.skill import ExpertSkill

DETOUR = 0.6
"""Share of sessions that start with the last file, if that is not the broken one."""
PART_SKILL = ExpertSkill(right_edit=0.7, right_retry=0.8, retry=0.85, reread=1.0, rewrite=0.4, parallel=0.6)
_FAILURE = re.compile(r"^FAIL test_\w+: ", re.MULTILINE)


class PartExpert(Expert):
    """Plays one session of a part. See Expert."""

    def __init__(
        self, task: Task, rng: Random, skill: ExpertSkill | None = None, detour: float = DETOUR
    ) -> None:
        super().__init__(task, rng, skill or PART_SKILL)
        self._informed = False
        last = max(task.files.keys() - {*task.test_paths})
        self._detour = last if last != self._fix.path and rng.random() < detour else None

    def _tested_function(self, task: Task) -> str:
        return ""  # a test run shows which one

    def _observe(self, call: ToolCall, result: ToolResult) -> None:
        super()._observe(call, result)
        self._informed |= call.name == "run_tests" and bool(_FAILURE.search(result.output))

    def _approach(self, calls: Sequence[ToolCall | str]) -> ToolCall | None:
        if not self._informed and self._detour is None:
            return ToolCall("run_tests")
        path = self._fix.path if self._informed else self._detour
        assert path is not None
        asked = [call.name for call in calls if isinstance(call, ToolCall)]
        if path in self._texts:
            return self._edit() if self._informed else self._edit_detour(path)
        if path not in self._paths and not self._informed:
            return None if "list_dir" in asked else ToolCall("list_dir")
        return None if "read_file" in asked else ToolCall("read_file", {"path": path})

    def _edit_detour(self, path: str) -> ToolCall:
        """Rewrites the body of a correct file unchanged; the tests are run next."""
        self._detour = None
        text = self._texts[path]
        first = body_start(text)
        return as_call(Edit(path, first, "\n".join(text[first - 1 :])), text, by_text=False)
