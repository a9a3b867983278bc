"""Progress reports: a live bar on a terminal, otherwise a plain line from time to time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
)
from rich.text import Text

from etude.cli.exits import error_console
from etude.cli.time_left import TimeLeft
from etude.observe import Observer

SHOWN = {
    "reward": "reward {:.2f}",
    "pass_rate": "pass {:.0%}",
    "agent_loss": "loss {:.3f}",
    "loss": "loss {:.3f}",
    "tokens_per_s": "{:,.0f} tokens/s",
}


def describe_values(values: Mapping[str, float]) -> str:
    """The most important metrics, in a fixed order; the loss on agent tokens, if there is one."""
    left_out = {"loss"} if "agent_loss" in values else set[str]()
    return "  ".join(
        form.format(float(values[name]))
        for name, form in SHOWN.items()
        if name in values and name not in left_out
    )


def open_observer() -> Observer:
    """An observer on standard error: with bars on a terminal, otherwise with plain lines."""
    console = error_console()
    return RichObserver(console) if console.is_terminal else PlainObserver(console)


class RichObserver:
    """Shows a bar per stage, which stays visible after the stage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._time_left = TimeLeft()

    def expect_stages(self, stages: Sequence[tuple[str, float]]) -> None:
        """Sets the forecast from which the bars show the time left."""
        self._time_left.expect_stages(stages)

    def stage_begins(self, name: str, total_steps: int, unit: str = "step") -> None:
        """Opens the stage's bar."""
        self.stage_ends()
        self._time_left.begin(name, total_steps)
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            _RateColumn(self._time_left, unit),
            TextColumn("{task.fields[values]}"),
            _TimeLeftColumn(self._time_left, unit),
            console=self._console,
        )
        self._progress.start()
        self._task = self._progress.add_task(f"{name:<22}", total=total_steps or None, values="")

    def stage_advances(self, step: int, values: Mapping[str, float]) -> None:
        """Updates the bar."""
        self._time_left.advance(step)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, values=describe_values(values))

    def stage_ends(self) -> None:
        """Stops the bar in its current state."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = None

    def say(self, text: str) -> None:
        """Prints the line above the bar."""
        self._console.print(text, markup=False, highlight=False)


class _RateColumn(ProgressColumn):
    """Steps per second, or seconds per step if that is less than one."""

    def __init__(self, time_left: TimeLeft, unit: str) -> None:
        super().__init__()
        self._time_left, self._unit = time_left, unit

    def render(self, task: Task) -> Text:
        return Text(rate_text(self._time_left.steps_per_s, self._unit), style="dim")


class _TimeLeftColumn(_RateColumn):
    """The time left, or the duration of a finished stage."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        text = f"{task.finished_time:.0f} s" if task.finished_time else self._time_left.words()
        return Text(text, style="cyan")


class PlainObserver:
    """Prints a line when a stage begins and ends, and at most every `every_s` seconds in between."""

    def __init__(
        self, console: Console, every_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._every_s = every_s
        self._clock = clock
        self._time_left = TimeLeft(clock)
        self._name, self._unit = "", "step"
        self._total_steps = 0
        self._step = 0
        self._values: Mapping[str, float] = {}
        self._begun_s = self._printed_s = 0.0

    def expect_stages(self, stages: Sequence[tuple[str, float]]) -> None:
        """Sets the forecast from which the lines show the time left."""
        self._time_left.expect_stages(stages)

    def stage_begins(self, name: str, total_steps: int, unit: str = "step") -> None:
        """Prints the stage's name."""
        self._name, self._total_steps, self._unit = name, total_steps, unit
        self._step, self._values = 0, {}
        self._time_left.begin(name, total_steps)
        self._begun_s = self._printed_s = self._clock()
        self.say(f"{name}: {count_steps(total_steps, unit)}" if total_steps else name)

    def stage_advances(self, step: int, values: Mapping[str, float]) -> None:
        """Prints a line if the last one is old enough."""
        self._step, self._values = step, values
        self._time_left.advance(step)
        if self._clock() - self._printed_s >= self._every_s:
            self._print_step()

    def stage_ends(self) -> None:
        """Prints the stage's final values and its duration."""
        if self._name:
            values = describe_values(self._values)
            steps = f"{count_steps(self._step, self._unit)} in " if self._step or self._total_steps else ""
            seconds = self._clock() - self._begun_s
            self.say(f"{self._name}: {steps}{seconds:.1f} s  {values}".rstrip())
        self._name = ""

    def say(self, text: str) -> None:
        """Prints the line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _print_step(self) -> None:
        self._printed_s = self._clock()
        parts = [f"{self._name} {self._step}/{self._total_steps or '?'}"]
        parts += [rate_text(self._time_left.steps_per_s, self._unit), describe_values(self._values)]
        parts.append(self._time_left.words())
        self.say("  ".join(part for part in parts if part))


def count_steps(count: int, unit: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {unit}" if count == 1 else f"{count} {unit}s"


def rate_text(steps_per_s: float, unit: str = "step") -> str:
    """`2.5 steps/s`, or `4.0 s/step` if a step takes longer than a second."""
    if steps_per_s <= 0:
        return ""
    return f"{steps_per_s:.1f} {unit}s/s" if steps_per_s >= 1 else f"{1 / steps_per_s:.1f} s/{unit}"
