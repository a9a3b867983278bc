"""A scripted expert: plays bug-fixing sessions with the agent's tools, and makes mistakes on purpose.

It is a pure state machine that acts on its observations: paths from listings, greps and imports, files that
it read, results of the tests. Only the right edit itself comes from the task's reference fix. Its sessions
teach a randomly initialised model how to use tools; its mistakes leave room for reinforcement learning.

    look -> read -> (read what it imports) -> edit -> test -> finish
                             ^                          |
                             +--------- failed ---------+--> give up
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from etude.errors import TaskError
from etude.records import Task, ToolCall, ToolResult
from etude_quickstart.edits import Edit, ReferenceFix, as_call
from etude_quickstart.malformed import malform
from etude_quickstart.skill import ExpertSkill

MAX_TURNS = 10
MAX_CALLS_PER_TURN = 4

_TEST_NAME = re.compile(r"\btest_(\w+)")
IMPORT = re.compile(r"^from ([\w.]+) import ", re.MULTILINE)
_PATH = re.compile(r"^([\w./-]+\.py)(?::\d+: .*)?$")
_READ_LINE = re.compile(r"\d+\t(.*)", re.DOTALL)


class Expert:
    """Plays one session of a task: call `message`, run its calls, pass the results to the next `message`.

    Raises TaskError for a task whose instruction names no test or whose reference fix is not a change
    of lines in one file.
    """

    def __init__(self, task: Task, rng: Random, skill: ExpertSkill | None = None) -> None:
        self._skill = skill or ExpertSkill()
        self._rng = rng
        self._function = self._tested_function(task)
        self._fix = ReferenceFix(task)
        self._calls: list[ToolCall | str] = []
        self._num_turns = 0
        self._paths: list[str] = []
        self._texts: dict[str, list[str]] = {}
        self._edited = False
        self._num_tries = 0
        self._tests_pass: bool | None = None
        self._is_fixing = False
        self.done = False
        """Whether the last message ended the session."""

    def _tested_function(self, task: Task) -> str:
        match = _TEST_NAME.search(task.instruction)
        if match is None:
            raise TaskError(
                "names no test", field="instruction", received=task.instruction, fix="say which test fails"
            )
        return match[1]

    def message(self, results: Sequence[ToolResult] | None) -> Sequence[ToolCall | str]:
        """The next message, given the results of the last one's calls (None at the start).

        Calls, and raw text in place of a call that is malformed.
        """
        assert not self.done, "the session is over"
        for call, result in zip(self._calls, results or (), strict=False):
            if isinstance(call, ToolCall):
                self._observe(call, result)
        self._num_turns += 1
        self._calls = [ToolCall("finish")] if self._num_turns == MAX_TURNS else self._compose()
        self.done = any(isinstance(call, ToolCall) and call.name == "finish" for call in self._calls)
        return tuple(self._calls)

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _observe(self, call: ToolCall, result: ToolResult) -> None:
        """Updates the state with the result of one call."""
        if call.name in ("list_dir", "grep"):
            for line in result.output.splitlines():
                match = _PATH.match(line)
                if match:
                    self._add_path(match[1])
        elif call.name == "read_file" and result.error is None:
            matches = [_READ_LINE.fullmatch(line) for line in result.output.split("\n")]
            text = [match[1] for match in matches if match]
            self._texts[call.arguments["path"]] = text
            for module in IMPORT.findall("\n".join(text)):
                self._add_path(module.replace(".", "/") + ".py")
        elif call.name == "run_tests":
            self._tests_pass = result.error is None and bool(
                re.fullmatch(r"\d+ passed", result.output.strip())
            )
        elif call.name in ("edit_lines", "search_replace") and result.error is not None:
            self._texts.pop(call.arguments["path"], None)  # the file's content is uncertain now
        elif call.name in ("edit_lines", "search_replace") and result.output == "no change":
            self._edited = False  # nothing to test, so the next step is another try

    def _add_path(self, path: str) -> None:
        if path not in self._paths and not path.startswith("tests/"):
            self._paths.append(path)

    def _compose(self) -> list[ToolCall | str]:
        """The calls of one message: as many steps as fit into it."""
        calls: list[ToolCall | str] = []
        while len(calls) < MAX_CALLS_PER_TURN:
            if len(calls) < MAX_CALLS_PER_TURN - 1 and self._chance(self._skill.pointless_look):
                calls.append(self._pointless_look())
            call = self._next_call(calls)
            if call is None:
                break
            if self._chance(self._skill.malformed):
                calls.append(malform(call, self._rng))
                break
            calls.append(call)
            self._assume(call)
            if call.name == "finish" or not (self._is_fixing or self._chance(self._skill.parallel)):
                break
        return calls

    def _assume(self, call: ToolCall) -> None:
        """Applies a new edit to the state in advance; an error in its result reverts that."""
        if call.name in ("edit_lines", "search_replace"):
            self._edited = True
            self._tests_pass = None
            edit = self._fix.edit_of(call, self._texts.get(call.arguments["path"]))
            if edit is not None:
                self._texts[edit.path] = edit.apply(self._texts[edit.path])

    def _next_call(self, calls: Sequence[ToolCall | str]) -> ToolCall | None:
        """The next step; None if it needs the results of `calls`, in the same message."""
        names = [call.name for call in calls if isinstance(call, ToolCall)]
        if "run_tests" in names:
            return None
        if self._tests_pass:
            return ToolCall("finish")
        if self._is_fixing:
            return self._edit()
        if self._edited and self._tests_pass is None:
            untested = self._chance(self._skill.untested_finish)
            return ToolCall("finish") if untested else ToolCall("run_tests")
        if self._edited and not names:
            return self._after_failure()
        return self._approach(calls)

    def _after_failure(self) -> ToolCall:
        """The step after a failed test run: give up, read the file again or edit again."""
        if not self._chance(self._skill.retry):
            return ToolCall("finish")
        if self._fix.path not in self._texts or self._chance(self._skill.reread):
            self._edited = False
            self._texts.pop(self._fix.path, None)
            return ToolCall("read_file", {"path": self._fix.path})
        return self._edit()

    def _approach(self, calls: Sequence[ToolCall | str]) -> ToolCall | None:
        """The next step towards the first edit: look, read, follow the import."""
        skill, names = self._skill, [call.name for call in calls if isinstance(call, ToolCall)]
        if not calls and self._tests_pass is None and not self._paths and self._chance(skill.test_first):
            return ToolCall("run_tests")
        asked = {call.arguments.get("path") for call in calls if isinstance(call, ToolCall)}
        path = self._next_to_read()
        if path is None and self._fix.path in self._texts:
            return self._edit()
        if path is None:
            return None if {"list_dir", "grep"} & set(names) else self._look()
        if path not in asked:
            if path == self._fix.path and self._chance(skill.blind_edit):
                return self._blind_edit()
            return ToolCall("read_file", {"path": path})
        others = [other for other in self._paths if other not in asked and other not in self._texts]
        if others and self._chance(skill.read_ahead):
            return ToolCall("read_file", {"path": others[0]})
        return None

    def _next_to_read(self) -> str | None:
        """The file of the tested function, then the file it imports; None if unknown or already read."""
        path = next((known for known in self._paths if known.endswith(f"/{self._function}.py")), None)
        while path in self._texts and path != self._fix.path:
            modules = IMPORT.findall("\n".join(self._texts[path]))
            if not modules:
                return None
            path = modules[0].replace(".", "/") + ".py"
        return None if path in self._texts else path

    def _look(self) -> ToolCall:
        if self._chance(self._skill.list_files):
            return ToolCall("list_dir")
        return ToolCall("grep", {"pattern": f"def {self._function}"})

    def _pointless_look(self) -> ToolCall:
        choice = self._rng.randrange(3)
        others = [path for path in self._paths if path != self._fix.path]
        if choice == 0 and others:
            return ToolCall("read_file", {"path": self._rng.choice(others)})
        if choice == 1:
            return ToolCall("grep", {"pattern": "def "})
        return ToolCall("list_dir")

    def _edit(self) -> ToolCall:
        """An edit based on the expert's view of the file."""
        skill, text = self._skill, self._texts[self._fix.path]
        if self._fix.num_wrong_lines(text) == 0:
            return ToolCall("finish")  # the tests fail for a reason unknown to the expert
        right = self._is_fixing or self._chance(skill.right_retry if self._num_tries else skill.right_edit)
        rewrite = not self._is_fixing and self._chance(skill.rewrite)
        if right:
            edit = self._fix.right_edit(text)
            self._is_fixing = self._fix.num_wrong_lines(text) > 1 and not rewrite
        elif self._chance(skill.idle):
            edit = self._fix.idle_edit(text, self._rng)
        else:
            edit = self._fix.wrong_edit(text, self._rng, skill.other_line, skill.misplaced)
        if rewrite:
            edit = self._fix.rewritten(edit, text, corrected=right)
        self._num_tries += 1
        return as_call(edit, text, by_text=self._chance(skill.search_replace))

    def _blind_edit(self) -> ToolCall:
        """A guessed edit: a random change of a random line."""
        edit = self._fix.wrong_edit(self._fix.broken, self._rng, 1.0, 0.0)
        return as_call(edit, self._fix.broken, by_text=False)


__all__ = ["MAX_CALLS_PER_TURN", "MAX_TURNS", "Edit", "Expert"]
