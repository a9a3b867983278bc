"""Trails: tasks that outlast a model's window, and cannot be solved without carrying something over.

A trail leads from file to file, each naming the next. One file near its beginning gives the key of the
colour that the task asks for; others give keys of other colours. Where the trail ends, `answer.py` is to hold
the key. Every file must be read, for its successor; by then the key has long left a short context.
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
"""The key lies in this first share of the trail."""
_OTHER_KEYS = 0.08
"""Odds that a file gives the key of another colour."""
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
    colour, key = rng.choice(COLOURS), rng.randint(10, 99)
    others = [other for other in COLOURS if other != colour]
    place = rng.randrange(max(1, int(length * _KEY_SHARE)))
    files: dict[str, str] = {ANSWER_FILE: "ANSWER = 0\n"}
    for number, name in enumerate(names):
        lines = [f"go {names[number + 1]}" if number + 1 < length else "end"]
        if number == place:
            lines.append(f"{colour} {key}")
        elif rng.random() < _OTHER_KEYS:
            lines.append(f"{rng.choice(others)} {rng.randint(10, 99)}")
        files[name] = "\n".join(lines) + "\n"
    hidden = f"from answer import ANSWER\n\n\ndef test_answer():\n    assert ANSWER == {key}\n"
    return Task(
        id=task_id,
        instruction=f"follow {names[0]}, answer {colour}",
        files=files,
        hidden_files={_HIDDEN_TESTS: hidden},
        solution_files={ANSWER_FILE: f"ANSWER = {key}\n"},
        allowed_paths=(ANSWER_FILE,),
        hidden_test_paths=(_HIDDEN_TESTS,),
        metadata={"family": "trail", "level": length, "split": split, "colour": colour},
    )


class TrailAuthor:
    """Plays a trail, and is a poor author of summaries: mostly it only notes where it goes on.

    It works from what it was shown since its context began, as a model must: a key that it left out of a
    summary is gone, and its answer is 0. So its sessions show both kinds of summaries, and which kind succeeds
    is left for reinforcement learning to find out. It says the key aloud where it finds it.
    """

    def __init__(self, task: Task, rng: Random, note_key: float) -> None:
        """`note_key`: odds that a summary carries the key."""
        words = task.instruction.replace(",", "").split()
        self._next = words[1]
        self._colour = str(task.metadata["colour"])
        self._key: str | None = None
        self._ended = False
        self._rng = rng
        self._note_key = note_key

    def message(self, results: Sequence[ToolResult] | None) -> list[ToolCall | str]:
        """The next message's calls."""
        known = self._key
        for result in results or ():
            self._look_at(result.output)
        words = [f"{self._colour} {self._key}"] if self._key != known else []
        if not self._ended:
            return [*words, ToolCall("read_file", {"path": self._next})]
        edit = {"path": ANSWER_FILE, "start": "1", "text": f"ANSWER = {self._key or 0}"}
        return [*words, ToolCall("edit_lines", edit), ToolCall("finish")]

    def summary(self, results: Sequence[ToolResult] | None) -> str:
        """What the author carries over; what it leaves out it forgets."""
        for result in results or ():
            self._look_at(result.output)
        if self._rng.random() >= self._note_key:
            self._key = None
        place = "end" if self._ended else f"go {self._next}"
        return place if self._key is None else f"{place} {self._colour} {self._key}"

    def _look_at(self, output: str) -> None:
        for line in output.split("\n"):
            match line.partition("\t")[2].split():
                case ["go", path]:
                    self._next = path
                case ["end"]:
                    self._ended = True
                case [colour, key] if colour == self._colour:
                    self._key = key
                case _:
                    pass
