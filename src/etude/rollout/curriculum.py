"""The curriculum: chooses which task is played next.

    numbers 0, 1, 2 ... ── passed over? ── look-ahead, longest first ── begun ── resolved
                       (task or level outside the band)

A number always means the same task, is considered once and never played again, so no prompt is repeated, or,
in a finite set (`EpochSource`), once per epoch. Numbers that were begun and not resolved are `pending`: a
resumed run begins with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from etude.algorithms.signal import graded_members
from etude.config import CurriculumConfig
from etude.errors import ConfigError
from etude.records import Group, Task
from etude.rollout.epochs import EpochSource
from etude.rollout.pricing import PriceState

TaskSource = Callable[[int], Task]
"""Task number -> task: the same number always gives the same task. An EpochSource may be finite."""

_SMOOTHING = 0.8


@dataclass(slots=True)
class LevelRecord:
    """Recent results of sessions on tasks of one level, or on one task."""

    num_groups: int = 0
    pass_rate: float = 0.0
    """Running mean over groups."""
    tokens: float = 0.0
    """Running mean of a session's sampled tokens."""
    num_passed_over: int = 0
    """Tasks that were outside the pass band, including those played all the same as probes."""


@dataclass(slots=True)
class CollectorState:
    """State from which a resumed run continues with the same tasks. Plain values, stored in checkpoints."""

    next_task: int = 0
    """The first number that was not considered yet."""
    useful_share: float = 1.0
    """Running share of groups with variance: how many groups to ask for at once."""
    pending: list[int] = field(default_factory=list[int])
    """Smaller numbers that are neither trained on nor dropped, in the order in which they are to be begun."""
    levels: dict[str, LevelRecord] = field(default_factory=dict[str, LevelRecord])
    tasks: dict[str, LevelRecord] = field(default_factory=dict[str, LevelRecord])
    """The same for each task by id, for a finite set of which the curriculum selects or orders tasks."""
    num_passed_over: int = 0
    """Numbers that were considered and not played."""
    source: str = ""
    """Digest of the finite set of tasks; empty where there is none."""
    price: PriceState = field(default_factory=PriceState)

    def __post_init__(self) -> None:
        """Converts records from the dictionaries of a checkpoint."""
        self.levels, self.tasks = _records(self.levels), _records(self.tasks)
        if isinstance(self.price, dict):
            self.price = PriceState(**cast("dict[str, Any]", self.price))


class Curriculum:
    """Hands out task numbers and records their results. Changes `state`."""

    def __init__(self, tasks: TaskSource, config: CurriculumConfig, state: CollectorState) -> None:
        """Raises ConfigError if `state` belongs to another set of tasks."""
        self._tasks = tasks
        self._finite = tasks if isinstance(tasks, EpochSource) else None
        self._config = config
        self._state = state
        self._selects = config.pass_band != (0.0, 1.0)
        self._check_source()
        self._ahead: deque[tuple[int, Task]] = deque((number, tasks(number)) for number in state.pending)
        """Chosen and not begun."""
        self._begun: dict[int, Task] = {}
        """Begun and not resolved, in order."""

    @property
    def is_over(self) -> bool:
        """Whether no task is left, as far as numbers have been considered."""
        end = self._finite.end if self._finite is not None else None
        return not self._ahead and end is not None and self._state.next_task >= end

    def has_next(self) -> bool:
        """Whether there is a task to begin. Chooses it now if need be, so call it only when one may begin."""
        if not self._ahead:
            self._look_ahead()
        return bool(self._ahead)

    def begin(self) -> tuple[int, Task]:
        """The next task and its number, if it `has_next`."""
        if not self._ahead:
            self._look_ahead()
        number, task = self._ahead.popleft()
        self._begun[number] = task
        self._update_pending()
        return number, task

    def resolve(self, groups: Iterable[tuple[int, Group]]) -> None:
        """Records the results of numbers that were trained on or dropped."""
        for number, group in groups:
            self._record_results(self._begun.pop(number), group)
        self._update_pending()

    def figures(self) -> dict[str, float]:
        """Metrics: the epoch of a finite set, and tasks that were passed over."""
        figures: dict[str, float] = {}
        if self._finite is not None:
            figures["epoch"] = float(self._finite.epoch_of(max(0, self._state.next_task - 1)))
        if self._selects:
            figures["tasks_passed_over"] = float(self._state.num_passed_over)
        return figures

    def _check_source(self) -> None:
        digest = self._finite.digest if self._finite is not None else ""
        if self._state.next_task and digest != self._state.source:
            raise ConfigError(
                "the tasks differ from those that the run started with",
                field="tasks.directory",
                fix="restore them, or start another run with --name NAME",
            )
        self._state.source = digest

    def _update_pending(self) -> None:
        self._state.pending = [*self._begun, *(number for number, _ in self._ahead)]

    def _look_ahead(self) -> None:
        """Chooses the next numbers to play, those with the longest sessions first."""
        chosen: list[tuple[float, int, Task]] = []
        while len(chosen) < self._config.longest_first and not self._ends_here(chosen):
            number = self._state.next_task
            self._state.next_task += 1
            task = self._tasks(number)
            if self._passes_over(task):
                self._state.num_passed_over += 1
                continue
            record = self._state.tasks.get(task.id) or self._state.levels.get(level_of(task))
            # Tasks without a record come first, so that they soon have one.
            chosen.append((record.tokens if record is not None else float("inf"), number, task))
        chosen.sort(key=lambda choice: (-choice[0], choice[1]))
        self._ahead.extend((number, task) for _, number, task in chosen)

    def _ends_here(self, chosen: list[tuple[float, int, Task]]) -> bool:
        """Whether no number is left, or the next one belongs to another epoch than those chosen."""
        if self._finite is None:
            return False
        number = self._state.next_task
        if self._finite.end is not None and number >= self._finite.end:
            return True
        return bool(chosen) and self._finite.epoch_of(chosen[0][1]) != self._finite.epoch_of(number)

    def _passes_over(self, task: Task) -> bool:
        """Whether the task is outside the pass band: by its own results or, until there are enough, those of
        its level. Counts it, and lets every `probe_every`-th through."""
        config = self._config
        record, least = self._state.tasks.get(task.id), config.min_groups_of_task
        if record is None or record.num_groups < least:
            record, least = self._state.levels.get(level_of(task)), config.min_groups
        low, high = config.pass_band
        if record is None or record.num_groups < least or low <= record.pass_rate <= high:
            return False
        record.num_passed_over += 1
        return record.num_passed_over % config.probe_every != 0

    def _record_results(self, task: Task, group: Group) -> None:
        rewards = [reward for _, reward in graded_members(group)]
        if not rewards:
            return
        passed = sum(reward.task for reward in rewards) / len(rewards)
        tokens = sum(member.num_sampled_tokens for member in group.members) / len(group.members)
        _update_record(self._state.levels.setdefault(level_of(task), LevelRecord()), passed, tokens)
        if self._finite is not None and (self._selects or self._config.longest_first > 1):
            _update_record(self._state.tasks.setdefault(task.id, LevelRecord()), passed, tokens)


def _update_record(record: LevelRecord, passed: float, tokens: float) -> None:
    old = _SMOOTHING if record.num_groups else 0.0
    record.num_groups += 1
    record.pass_rate = old * record.pass_rate + (1 - old) * passed
    record.tokens = old * record.tokens + (1 - old) * tokens


def _records(saved: Mapping[str, Any]) -> dict[str, LevelRecord]:
    return {
        name: LevelRecord(**cast("dict[str, Any]", record)) if isinstance(record, dict) else record
        for name, record in saved.items()
    }


def level_of(task: Task) -> str:
    """The task's level, or an empty string: tasks of one level share a record."""
    return str(task.metadata.get("level", ""))
