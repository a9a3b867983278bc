"""Observers: the interface through which a run reports its progress to people."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol


class Observer(Protocol):
    """Receives progress reports of a run. Calls come from one thread; stages do not nest."""

    def expect_stages(self, stages: Sequence[tuple[str, float]]) -> None:
        """The stages of the whole run, in order, each with the seconds that it is expected to take."""
        ...

    def stage_begins(self, name: str, total_steps: int, unit: str = "step") -> None:
        """A stage of `total_steps` steps begins; 0: unknown. `unit`: name of a step."""
        ...

    def stage_advances(self, step: int, values: Mapping[str, float]) -> None:
        """`step` steps of the stage are done; `values` are its latest figures."""
        ...

    def stage_ends(self) -> None:
        """The stage is over, however it ended."""
        ...

    def say(self, text: str) -> None:
        """Shows one line of text to people."""
        ...


@contextlib.contextmanager
def show_stage(
    observer: Observer, name: str, total_steps: int, unit: str = "step"
) -> Iterator[Callable[[int], None]]:
    """A stage that lasts as long as the `with` block; yields a function that reports the steps done."""
    observer.stage_begins(name, total_steps, unit)
    try:
        yield lambda num_done: observer.stage_advances(num_done, {})
    finally:
        observer.stage_ends()


class SilentObserver:
    """Implements Observer without any output."""

    def expect_stages(self, stages: Sequence[tuple[str, float]]) -> None:
        """Ignored."""

    def stage_begins(self, name: str, total_steps: int, unit: str = "step") -> None:
        """Ignored."""

    def stage_advances(self, step: int, values: Mapping[str, float]) -> None:
        """Ignored."""

    def stage_ends(self) -> None:
        """Ignored."""

    def say(self, text: str) -> None:
        """Ignored."""


class RecordingObserver:
    """Implements Observer by recording all reports: for tests, and for processes that pass them on."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int]] = []
        self.advances: list[tuple[str, int, dict[str, float]]] = []
        """(stage, step, values)"""
        self.lines: list[str] = []
        self.open_stage: str | None = None
        self.unit = ""
        """Of the latest stage."""
        self.expected: list[tuple[str, float]] = []

    def expect_stages(self, stages: Sequence[tuple[str, float]]) -> None:
        """Keeps the stages."""
        self.expected = list(stages)

    def stage_begins(self, name: str, total_steps: int, unit: str = "step") -> None:
        """Keeps the stage."""
        assert self.open_stage is None, f"{name} begins within {self.open_stage}"
        self.open_stage = name
        self.stages.append((name, total_steps))
        self.unit = unit

    def stage_advances(self, step: int, values: Mapping[str, float]) -> None:
        """Keeps the values."""
        assert self.open_stage is not None, "a step outside every stage"
        self.advances.append((self.open_stage, step, dict(values)))

    def stage_ends(self) -> None:
        """Closes the stage."""
        self.open_stage = None

    def say(self, text: str) -> None:
        """Keeps the line."""
        self.lines.append(text)
