"""Trails: tasks that outlast a model's window, and cannot be solved without carrying something over.

A trail leads from file to file, each naming the next. One file near its beginning gives a key, and in the
place of the last file's `end` the key is to be written. So every file must be read, and at the end the key
has long left a short context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from etude.errors import TaskError
from etude.records import Task, ToolCall, ToolResult

_HIDDEN_TESTS = "tests/test_hidden.py"
_NUM_NAMES = 900
_KEY_SHARE = 0.3
"""The key lies in this first share of the trail."""
_SHORTEST = 3


class TrailGenerator:
    """Trails by index; lengths are drawn between `shortest` and `longest` files, short ones more often.

    Raises TaskError for lengths that make no trail.
    """

    def __init__(self, seed: int, split: str, shortest: int, longest: int) -> None:
        if not _SHORTEST <= shortest <= longest <= _NUM_NAMES:
            raise TaskError(
                "trails cannot have these lengths",
                field="tasks.trail_lengths",
                received=(shortest, longest),
                fix=f"{_SHORTEST} <= shortest <= longest <= {_NUM_NAMES}",
            )
        self.seed = seed
        self.split = split
        self.lengths = (shortest, longest)

    def task(self, index: int) -> Task:
        """The task with this index: always the same. Lengths are uniform in their logarithm."""
        rng = Random(f"trail/{self.seed}/{self.split}/{index}")
        shortest, longest = self.lengths
        drawn = math.exp(rng.uniform(math.log(shortest), math.log(longest + 1)))
        identity = f"trail-{self.split}-{self.seed}-{index}"
        return make_trail(identity, min(int(drawn), longest), self.split, rng)


def make_trail(task_id: str, length: int, split: str, rng: Random) -> Task:
    """A trail of `length` files."""
    names = [f"d/{number}" for number in rng.sample(range(100, 100 + _NUM_NAMES), length)]
    key, place = rng.randint(10, 99), rng.randrange(max(1, int(length * _KEY_SHARE)))
    files: dict[str, str] = {}
    for number, name in enumerate(names):
        lines = [f"go {names[number + 1]}" if number + 1 < length else "end"]
        if number == place:
            lines.append(f"key {key}")
        files[name] = "\n".join(lines) + "\n"
    last = names[-1]
    hidden = f'def test_answer():\n    assert open("{last}").read() == "{key}\\n"\n'
    return Task(
        id=task_id,
        instruction=f"follow {names[0]}",
        files=files,
        hidden_files={_HIDDEN_TESTS: hidden},
        solution_files={last: f"{key}\n"},
        allowed_paths=(last,),
        hidden_test_paths=(_HIDDEN_TESTS,),
        metadata={"family": "trail", "level": length, "split": split},
    )


class TrailAuthor:
    """Plays a trail, and mostly is a poor author of summaries: it only notes where it goes on.

    It works from what it was shown since its context began, as a model must: a key that it left out of a
    summary is gone, and it writes 00. In other sessions it notes the key as well. Which kind succeeds is left
    for reinforcement learning to find out. It says the key aloud where it finds it.
    """

    def __init__(self, task: Task, rng: Random, note_key: float) -> None:
        """`note_key`: odds that the summaries of this session carry the key."""
        self._file = self._next = task.instruction.split()[1]
        self._key = ""
        self._ended = False
        self._notes_key = rng.random() < note_key

    def message(self, results: Sequence[ToolResult] | None) -> list[ToolCall | str]:
        """The next message's calls."""
        words = self._look_at(results)
        if self._ended:
            edit = {"path": self._file, "start": "1", "text": self._key or "00"}
            return [*words, ToolCall("edit_lines", edit), ToolCall("finish")]
        self._file = self._next
        return [*words, ToolCall("read_file", {"path": self._file})]

    def summary(self, results: Sequence[ToolResult] | None) -> str:
        """What the author carries over; what it leaves out it forgets."""
        self._look_at(results)
        if not self._notes_key:
            self._key = ""
        place = f"end {self._file}" if self._ended else f"go {self._next}"
        return f"{place} key {self._key}" if self._key else place

    def _look_at(self, results: Sequence[ToolResult] | None) -> list[str]:
        """Takes in what was shown; the key if it was among it."""
        found: list[str] = []
        for line in (line for result in results or () for line in result.output.split("\n")):
            match line.partition("\t")[2].split():
                case ["go", path]:
                    self._next = path
                case ["end"]:
                    self._ended = True
                case ["key", key]:
                    self._key = key
                    found.append(f"key {key}")
                case _:
                    pass
        return found
