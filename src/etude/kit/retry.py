"""Retries with exponential backoff.

backoff = Backoff(base_s=0.2, most_s=5.0, within_s=60.0)
answer = await retry_async(ask, on=ControlLostError, backoff=backoff)
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

Answer = TypeVar("Answer")
Failure = TypeVar("Failure", bound=Exception)

OnFailure = Callable[[Failure, float | None], float | None]
"""Called with each failure and the pause before the next attempt (None if no attempt follows). It may raise,
which ends the attempts, or return a longer pause, such as a server's Retry-After."""
_MOST_DOUBLINGS = 64


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pauses between attempts, and when to give up: after a number of attempts, a time, or never."""

    base_s: float = 0.5
    """The pause before the second attempt."""
    most_s: float = math.inf
    """The longest pause."""
    attempts: int | None = None
    """Number of calls in total; None: no limit."""
    within_s: float = math.inf
    """No attempt begins later than this after the first; the last pause is shortened to fit."""
    factor: float = 2.0
    """Ratio of each pause to the previous one."""
    jitter: float = 0.0
    """The random share of each pause, so that many callers do not retry at the same time."""

    def pause_s(self, num_failures: int) -> float:
        """The pause after `num_failures` failures in a row, 1 or more."""
        doublings = min(max(num_failures, 1) - 1, _MOST_DOUBLINGS)
        pause_s = min(self.base_s * self.factor**doublings, self.most_s)
        return pause_s * random.uniform(1.0 - self.jitter, 1.0)

    def pauses(self) -> Iterator[float]:
        """Yields the pause after each failure from now on, and ends when the caller should give up."""
        return self._pauses(time.monotonic() + self.within_s)

    def _pauses(self, end_s: float) -> Iterator[float]:
        for num_failures in itertools.count(1):
            left_s = end_s - time.monotonic()
            if num_failures == self.attempts or left_s <= 0:
                return
            yield min(self.pause_s(num_failures), left_s)


def retry(
    call: Callable[[], Answer],
    on: type[Failure] | tuple[type[Failure], ...],
    backoff: Backoff,
    *,
    unless: type[Exception] | tuple[type[Exception], ...] = (),
    on_failure: OnFailure[Failure] | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> Answer:
    """Calls `call` again while it raises one of `on`, and returns its result. Raises the last failure when
    `backoff` gives up, and errors of the types `unless` at once."""
    pauses = backoff.pauses()
    while True:
        try:
            return call()
        except unless:
            raise
        except on as failure:
            pause_s = _next_pause(pauses, failure, on_failure)
            if pause_s is None:
                raise
        sleep(pause_s)


async def retry_async(
    call: Callable[[], Awaitable[Answer]],
    on: type[Failure] | tuple[type[Failure], ...],
    backoff: Backoff,
    *,
    unless: type[Exception] | tuple[type[Exception], ...] = (),
    on_failure: OnFailure[Failure] | None = None,
) -> Answer:
    """As `retry`, for a coroutine function."""
    pauses = backoff.pauses()
    while True:
        try:
            return await call()
        except unless:
            raise
        except on as failure:
            pause_s = _next_pause(pauses, failure, on_failure)
            if pause_s is None:
                raise
        await asyncio.sleep(pause_s)


def _next_pause(
    pauses: Iterator[float], failure: Failure, on_failure: OnFailure[Failure] | None
) -> float | None:
    pause_s = next(pauses, None)
    least_s = None if on_failure is None else on_failure(failure, pause_s)
    return pause_s if pause_s is None or least_s is None else max(pause_s, least_s)
