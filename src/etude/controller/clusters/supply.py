"""Monitors whether new weights reach a cluster, and how long it tolerates that they do not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from etude.errors import InfrastructureError, WeightUpdateError
from etude.weights import Subscriber

_LOOK_S = 1.0


class WeightsLostError(WeightUpdateError):
    """New weights have not reached a cluster for longer than its patience: the run cannot use it."""


class Supply:
    """Tracks fetches of weights that fail, or that wait for a store. For one event loop."""

    def __init__(
        self, link: Subscriber, source: str, patience_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`source`: of weights, for messages. `patience_s`: how long they may fail. `clock`: in seconds."""
        self._link, self._source, self._patience_s = link, source, patience_s
        self._clock = clock
        self._failure = ""
        self._since_s: float | None = None

    def record_failure(self, error: InfrastructureError) -> None:
        """A version could not be fetched or activated."""
        self._failure = str(error)

    def record_arrival(self) -> None:
        """A version is in service here."""
        self._failure, self._since_s = "", None

    @property
    def trouble(self) -> str:
        """Why new weights do not come; empty while no failure is known."""
        return self._failure or self._link.trouble

    def check(self) -> None:
        """Raises WeightsLostError once trouble has lasted longer than the patience without a new version."""
        trouble = self.trouble
        if not trouble:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = self._clock()
        elif self._clock() - self._since_s > self._patience_s:
            raise WeightsLostError(
                f"no new weights have come for {self._patience_s:g} s: {trouble}",
                field="weights.read_url",
                received=self._source,
                fix="check that the relay is running and can reach the weight store, then join again",
            )

    async def watch(self, say: Callable[[str], None]) -> None:
        """Reports through `say` when trouble begins and ends, until it raises as `check` does."""
        was_reported = False
        while True:
            self.check()
            trouble = self.trouble
            if trouble and not was_reported:
                say(f"new weights cannot be fetched: {trouble}")
            elif was_reported and not trouble:
                say("new weights can be fetched again")
            was_reported = bool(trouble)
            await asyncio.sleep(_LOOK_S)
