"""A finite set of tasks, played epoch by epoch.

number       0 1 2 3 | 4 5 6 7 | 8 ...
epoch           0    |    1    |
task         c a d b | b d a c |        each epoch has every task once, in an order of its own
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache

from etude.errors import TaskError
from etude.records import Task

_DIGEST_BYTES = 16


class EpochSource:
    """A TaskSource over a finite set of tasks, repeated. A pure function of (tasks, seed, number).

    An epoch's order depends on the seed and the tasks' ids alone: not on how they are listed, nor on Python.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, num_epochs: int = 0) -> None:
        """`num_epochs`: the source ends after so many; 0: never.

        Raises TaskError if there is no task, or two have the same id.
        """
        self._tasks = {task.id: task for task in tasks}
        if not self._tasks:
            raise TaskError("there are none", field="tasks", fix="name a directory that holds tasks")
        if len(self._tasks) != len(tasks):
            ids = [task.id for task in tasks]
            twice = next(name for name in ids if ids.count(name) > 1)
            raise TaskError("two tasks have this id", field="id", received=twice, fix="give each its own")
        self._seed = seed
        self.end: int | None = len(tasks) * num_epochs if num_epochs else None
        """The first number without a task; None: the source is endless."""
        self.digest = _digest_of(tasks)
        """Digest of all tasks with their contents: if it is equal, numbers name the same tasks."""
        self._order = lru_cache(maxsize=2)(self._make_order)

    def __len__(self) -> int:
        """Tasks of one epoch."""
        return len(self._tasks)

    def __call__(self, number: int) -> Task:
        """The task of this number, before `end`."""
        assert self.end is None or number < self.end, "no task has this number"
        epoch, place = divmod(number, len(self._tasks))
        return self._tasks[self._order(epoch)[place]]

    def epoch_of(self, number: int) -> int:
        """The epoch that a number belongs to, from 0."""
        return number // len(self._tasks)

    def _make_order(self, epoch: int) -> list[str]:
        def place(name: str) -> bytes:
            return hashlib.blake2b(json.dumps([self._seed, epoch, name]).encode()).digest()

        return sorted(self._tasks, key=place)


def epoch_of(tasks: object, number: int) -> int:
    """The epoch that a number of this source belongs to; 0 where tasks are not repeated."""
    return tasks.epoch_of(number) if isinstance(tasks, EpochSource) else 0


def _digest_of(tasks: Sequence[Task]) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for task in sorted(tasks, key=lambda task: task.id):
        contents = {**asdict(task), "directory": None}  # it may have moved when a run is resumed
        digest.update(json.dumps(contents, sort_keys=True, default=_name_of_bytes).encode())
    return digest.hexdigest()


def _name_of_bytes(data: bytes) -> str:
    """Represents the archive of a task's own tests by its digest."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
