"""A session's verdict: begun once, tried again where our machinery failed, and the same ever after."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from etude.environment.site import Outcome
from etude.errors import ConfigError, UserError
from etude.kit.tasks import start_watched
from etude.records import Status

Grade = Callable[[Status, str], Coroutine[Any, Any, Outcome]]
"""(how the session ended, cause) -> what it earned."""


class Submission:
    """The grading of one session, for one event loop."""

    def __init__(self, grade: Grade) -> None:
        self._grade = grade
        self._task: asyncio.Task[Outcome] | None = None

    @property
    def outcome(self) -> Outcome | None:
        """What the session earned, once that is known."""
        return self._task.result() if self._task is not None and not self._is_open else None

    @property
    def running(self) -> asyncio.Task[Outcome] | None:
        """The grading that goes on."""
        return self._task if self._task is not None and not self._task.done() else None

    async def ask(self, status: Status, cause: str) -> Outcome:
        """The outcome: of the grading that runs or has ended, else of a new one. Raises what grading raises.

        Whoever stops waiting leaves it running.
        """
        if self.running is None and self._is_open:
            self._task = start_watched(self._grade(status, cause))
        assert self._task is not None
        return await asyncio.shield(self._task)

    @property
    def _is_open(self) -> bool:
        """Whether nothing is known: it was not begun, runs, or has failed."""
        task = self._task
        return task is None or not task.done() or task.cancelled() or task.exception() is not None


def check_ending(status: object, cause: object) -> None:
    """Raises UserError unless a session can end so: a Status but `infrastructure` (or None), and words."""
    graded = [one for one in Status if one is not Status.INFRASTRUCTURE]
    if status is Status.INFRASTRUCTURE:
        raise ConfigError(
            "an infrastructure failure is never graded",
            field="status",
            received=status.value,
            fix="close the session",
        )
    if status is not None and not isinstance(status, Status):
        names = ", ".join(f"Status.{one.name}" for one in graded)
        raise UserError("is no Status", field="status", received=repr(status)[:200], fix=f"None, {names}")
    if not isinstance(cause, str):
        raise UserError("must be words", field="cause", received=repr(cause)[:200], fix="send a string")
