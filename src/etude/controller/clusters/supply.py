"""Whether new weights reach a cluster, and how long it bears that they do not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from etude.errors import InfrastructureError, WeightUpdateError
from etude.weights import Subscriber

_LOOK_S = 1.0


class WeightsLostError(WeightUpdateError):
    """New weights have not reached a cluster for longer than it waits: it is of no use to the run."""


class Supply:
    """Keeps account of fetches that fail, or that wait for a store. For one event loop."""

    def __init__(
        self, link: Subscriber, source: str, patience_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`source`: where weights come from, for people. `patience_s`: for how long they may fail to come.
        `clock`: in seconds."""
        self._link, self._source, self._patience_s = link, source, patience_s
        self._clock = clock
        self._failure = ""
        self._since_s: float | None = None

    def failed(self, error: InfrastructureError) -> None:
        """A version could not be had."""
        self._failure = str(error)

    def arrived(self) -> None:
        """A version is in service here."""
        self._failure, self._since_s = "", None

    @property
    def trouble(self) -> str:
        """Why new weights do not come; empty while nothing speaks against it."""
        return self._failure or self._link.trouble

    def check(self) -> None:
        """Raises WeightsLostError once there has been trouble for too long without a version in between."""
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
                fix="see whether the relay runs and reaches the weight store, then join again",
            )

    async def watch(self, say: Callable[[str], None]) -> None:
        """Says when trouble begins and ends, to people, until it raises as `check` does."""
        was_told = False
        while True:
            self.check()
            trouble = self.trouble
            if trouble and not was_told:
                say(f"weights cannot be had: {trouble}")
            elif was_told and not trouble:
                say("weights come again")
            was_told = bool(trouble)
            await asyncio.sleep(_LOOK_S)

    def close(self) -> None:
        """What is being fetched waits no longer."""
        self._link.close()
