"""The scripted expert of observed tasks: it understands test output, but rarely runs the tests first.

Without a test run it makes a random change. With one it reads the expected value and mostly writes the right
rule. Reinforcement learning has to make the second its habit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from random import Random

from etude.records import Task, ToolCall, ToolResult
from etude_quickstart.code import FIX_MARK, numbered
from etude_quickstart.edits import Edit, as_call
from etude_quickstart.expert import Expert
from etude_quickstart.functions import NAMES
from etude_quickstart.mutations import mutations
from etude_quickstart.observed import (
    NUM_RULES,
    OBSERVED_KINDS,
    RULE_LINE,
    broken_digit,
    expected_digits,
    frames_of,
    observed_function,
)
from etude_quickstart.skill import ExpertSkill

RUN_FIRST = 0.05
"""Share of sessions that run the tests before the first edit."""
OBSERVED_SKILL = ExpertSkill(retry=0.05, right_retry=0.8, rewrite=0.05, test_first=0.0)


class ObservedExpert(Expert):
    """Plays one session of an observed task. See Expert."""

    def __init__(self, task: Task, rng: Random, run_first: float = RUN_FIRST) -> None:
        super().__init__(task, rng, OBSERVED_SKILL)
        self._runs_first = rng.random() < run_first
        self._failure = re.compile(rf"^FAIL test_{self._function}: .* != \d$", re.MULTILINE)
        self._informed = False

    def _observe(self, call: ToolCall, result: ToolResult) -> None:
        super()._observe(call, result)
        self._informed |= call.name == "run_tests" and bool(self._failure.search(result.output))

    def _approach(self, calls: Sequence[ToolCall | str]) -> ToolCall | None:
        if self._runs_first and not self._informed and self._fix.path in self._texts:
            return ToolCall("run_tests")
        return super()._approach(calls)

    def _edit(self) -> ToolCall:
        text = self._texts[self._fix.path]
        if self._informed and self._chance(self._skill.right_retry):
            if self._fix.num_wrong_lines(text) == 0:
                return ToolCall("finish")
            edit = self._fix.right_edit(text)
        else:
            change = self._rng.choice(mutations("\n".join(text)))
            line = change.apply("\n".join(text)).split("\n")[change.line - 1]
            edit = Edit(self._fix.path, change.line, line)
        if self._chance(self._skill.rewrite):
            edit = self._fix.rewritten(edit, text, corrected=False)
        return as_call(edit, text, by_text=self._chance(self._skill.search_replace))


def observed_fix_documents(seed: int, count: int) -> Iterator[str]:
    """Documents of a broken file, numbered, its test output, then the line with the rule. They teach the
    meaning of digits without tool calls."""
    rng = Random(f"observed-fix/{seed}")
    for _ in range(count):
        kind, rule, frame = (
            rng.choice(OBSERVED_KINDS),
            rng.randrange(NUM_RULES),
            rng.choice(frames_of("train")),
        )
        name = rng.choice(NAMES)
        broken, right = (observed_function(kind, frame, which, name, "lib") for which in (None, rule))
        line = right.source.split("\n")[RULE_LINE - 1]
        shown = f"FAIL test_{name}: {broken_digit(kind)} != {expected_digits(kind)[rule]}\n1 failed, 1 passed"
        yield f"{numbered(broken.source)}\n{shown}{FIX_MARK}{RULE_LINE}\t{line}"
