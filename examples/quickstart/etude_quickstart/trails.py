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
_SLIP = 0.03
"""Odds that the scripted author names a file that is not there."""


class TrailGenerator:
    """Trails by index; lengths are drawn between a shortest and a longest, short ones more often.

    With `lengths_at_end` both bounds grow with the index, by equal factors, until `grow_over`: a curriculum.
    Raises TaskError for lengths that make no trail.
    """

    def __init__(
        self,
        seed: int,
        split: str,
        lengths: tuple[int, int],
        lengths_at_end: tuple[int, int] | None = None,
        grow_over: int = 1,
    ) -> None:
        check_lengths("tasks.trail_lengths", lengths)
        if lengths_at_end is not None:
            check_lengths("tasks.trail_lengths_at_end", lengths_at_end)
        self.seed = seed
        self.split = split
        self.lengths = lengths
        self.lengths_at_end = lengths_at_end or lengths
        self.grow_over = max(1, grow_over)

    def task(self, index: int) -> Task:
        """The task with this index: always the same. Lengths are uniform in their logarithm."""
        rng = Random(f"trail/{self.seed}/{self.split}/{index}")
        share = min(1.0, index / self.grow_over)
        shortest, longest = (
            round(start ** (1 - share) * end**share)
            for start, end in zip(self.lengths, self.lengths_at_end, strict=True)
        )
        drawn = math.exp(rng.uniform(math.log(shortest), math.log(longest + 1)))
        identity = f"trail-{self.split}-{self.seed}-{index}"
        return make_trail(identity, min(int(drawn), longest), self.split, rng)


def check_lengths(field: str, lengths: tuple[int, int]) -> None:
    """Raises TaskError for lengths, shortest and longest, that make no trail."""
    if not _SHORTEST <= lengths[0] <= lengths[1] <= _NUM_NAMES:
        raise TaskError(
            "trails cannot have these lengths",
            field=field,
            received=lengths,
            fix=f"{_SHORTEST} <= shortest <= longest <= {_NUM_NAMES}",
        )


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
    """Plays a trail, mostly with poor summaries that contain only the next file.

    It uses only what it was shown since its context began, as a model must: if the key is not in the summary,
    it writes 00. In other sessions the summary has the key as well; reinforcement learning has to find out
    which kind succeeds. It repeats the key in a message when it finds it. Sometimes it names a missing file,
    reads the error, and looks up the name again: sessions can recover from a slip.
    """

    def __init__(self, task: Task, rng: Random, note_key: float, slip: float = _SLIP) -> None:
        """`note_key`: odds that the summaries of this session carry the key."""
        self._names = task.files.keys()
        self._next = task.instruction.split()[1]
        self._key = ""
        self._ended = self._written = False
        self._rng = rng
        self._slip = slip
        self._notes_key = rng.random() < note_key

    def message(self, results: Sequence[ToolResult] | None) -> list[ToolCall | str]:
        """The next message's calls."""
        words = self._look_at(results)
        if self._written:
            return [ToolCall("finish")]
        path = self._slipped() if self._rng.random() < self._slip else self._next
        if self._ended:
            self._written = True
            return [*words, ToolCall("edit_lines", {"path": path, "start": "1", "text": self._key or "00"})]
        return [*words, ToolCall("read_file", {"path": path})]

    def summary(self, results: Sequence[ToolResult] | None) -> str:
        """The summary, which is all that the author remembers afterwards."""
        self._look_at(results)
        if not self._notes_key:
            self._key = ""
        place = f"{'end' if self._ended else 'go'} {self._next}"
        return f"{place} key {self._key}" if self._key else place

    def _slipped(self) -> str:
        """The name of a missing file that differs from the right one in one digit."""
        while True:
            place = self._rng.randrange(len("d/"), len(self._next))
            path = f"{self._next[:place]}{self._rng.randrange(10)}{self._next[place + 1 :]}"
            if path not in self._names:
                return path

    def _look_at(self, results: Sequence[ToolResult] | None) -> list[str]:
        """Reads the results; returns the key if they contain it."""
        found: list[str] = []
        if any(result.error for result in results or ()):
            self._written = False
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
