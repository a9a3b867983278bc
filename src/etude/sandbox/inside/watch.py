"""Looking after something from time to time, in a loop that waits for other things."""

from __future__ import annotations

from collections.abc import Callable


class Watch:
    """Looks when it is time to; waits for nothing. Whoever waits asks `sooner` for how long, and calls `look`
    afterwards."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next_s = clock()

    def sooner(self, timeout_ms: float | None) -> float:
        """How long one may wait who would wait so long otherwise. Milliseconds."""
        until_ms = max(0.0, self._next_s - self._clock()) * 1e3 + 1.0
        return until_ms if timeout_ms is None else min(timeout_ms, until_ms)

    def look(self) -> None:
        """Looks, once it is time to."""
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + self._look()

    def _look(self) -> float:
        """Does what is to be done. Returns the time until the next look, seconds."""
        raise NotImplementedError
