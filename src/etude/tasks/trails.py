"""Trails: tasks that outlast a model's window, and cannot be solved without carrying something over.

A trail leads from file to file, each naming the next. Two files near its beginning give a key each, of
different colours. Only the last file says which colour is asked for; `answer.py` is to hold its key. So every
file must be read, and when the question comes, both keys have long left a short context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from etude.errors import TaskError
from etude.records import Task, ToolCall, ToolResult

COLOURS = ("red", "blue", "green", "white")
ANSWER_FILE = "answer.py"
_HIDDEN_TESTS = "tests/test_hidden.py"
_NUM_NAMES = 900
_KEY_SHARE = 0.3
"""The keys lie in this first share of the trail."""
_NUM_KEYS = 2
_SHORTEST = 4


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
    early = max(_NUM_KEYS, int(length * _KEY_SHARE))
    places = rng.sample(range(early), _NUM_KEYS)
    keys = dict(zip(rng.sample(COLOURS, _NUM_KEYS), rng.sample(range(1, 10), _NUM_KEYS), strict=True))
    given = dict(zip(places, keys.items(), strict=True))
    asked = rng.choice(list(keys))
    files: dict[str, str] = {ANSWER_FILE: "ANSWER = 0\n"}
    for number, name in enumerate(names):
        lines = [f"go {names[number + 1]}" if number + 1 < length else f"end {asked}"]
        if number in given:
            colour, key = given[number]
            lines.append(f"{colour} {key}")
        files[name] = "\n".join(lines) + "\n"
    hidden = f"from answer import ANSWER\n\n\ndef test_answer():\n    assert ANSWER == {keys[asked]}\n"
    return Task(
        id=task_id,
        instruction=f"follow {names[0]}",
        files=files,
        hidden_files={_HIDDEN_TESTS: hidden},
        solution_files={ANSWER_FILE: f"ANSWER = {keys[asked]}\n"},
        allowed_paths=(ANSWER_FILE,),
        hidden_test_paths=(_HIDDEN_TESTS,),
        metadata={"family": "trail", "level": length, "split": split},
    )


class TrailAuthor:
    """Plays a trail, and mostly is a poor author of summaries: it only notes where it goes on.

    It works from what it was shown since its context began, as a model must: keys that it left out of a
    summary are gone, and its answer is 0. In other sessions it notes the keys as well. Which kind succeeds is
    left for reinforcement learning to find out. It says a key aloud where it finds it.
    """

    def __init__(self, task: Task, rng: Random, note_keys: float) -> None:
        """`note_keys`: odds that the summaries of this session carry the keys."""
        self._next = task.instruction.split()[1]
        self._keys: dict[str, str] = {}
        self._asked = ""
        self._notes_keys = rng.random() < note_keys

    def message(self, results: Sequence[ToolResult] | None) -> list[ToolCall | str]:
        """The next message's calls."""
        words = self._look_at(results)
        if not self._asked:
            return [*words, ToolCall("read_file", {"path": self._next})]
        edit = {"path": ANSWER_FILE, "start": "1", "text": f"ANSWER = {self._keys.get(self._asked, '0')}"}
        return [*words, ToolCall("edit_lines", edit), ToolCall("finish")]

    def summary(self, results: Sequence[ToolResult] | None) -> str:
        """What the author carries over; what it leaves out it forgets."""
        self._look_at(results)
        if not self._notes_keys:
            self._keys.clear()
        place = f"end {self._asked}" if self._asked else f"go {self._next}"
        return " ".join([place, *(f"{colour} {key}" for colour, key in self._keys.items())])

    def _look_at(self, results: Sequence[ToolResult] | None) -> list[str]:
        """Takes in what was shown; the keys that were among it."""
        found: list[str] = []
        for line in (line for result in results or () for line in result.output.split("\n")):
            match line.partition("\t")[2].split():
                case ["go", path]:
                    self._next = path
                case ["end", colour]:
                    self._asked = colour
                case [colour, key] if colour in COLOURS:
                    self._keys[colour] = key
                    found.append(f"{colour} {key}")
                case _:
                    pass
        return found
