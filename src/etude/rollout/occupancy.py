"""How many sessions ran over time, and what kept more from beginning."""

from __future__ import annotations

from collections.abc import Callable


class Occupancy:
    """Integrates over time what was noted last."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._since_s = self._last_s = clock()
        self._sessions = 0
        self._blocked_by = ""
        self._lacks_oldest = False
        self._session_s = 0.0
        self._blocked_s: dict[str, float] = {}
        self._oldest_s = 0.0

    def note(self, num_sessions: int, blocked_by: str, lacks_oldest: bool) -> None:
        """From now on so many sessions run, this keeps another group from beginning (`staleness`, `slots`, or
        `tasks` that are used up), and the trainer waits for nothing but a group that no later step could
        train, or not."""
        now_s = self._clock()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        self._session_s += elapsed_s * self._sessions
        self._blocked_s[self._blocked_by] = self._blocked_s.get(self._blocked_by, 0.0) + elapsed_s
        self._oldest_s += elapsed_s * self._lacks_oldest
        self._sessions, self._blocked_by, self._lacks_oldest = num_sessions, blocked_by, lacks_oldest

    def take(self) -> dict[str, float]:
        """Figures since the last call: seconds, the mean number of sessions, and shares of the time."""
        self.note(self._sessions, self._blocked_by, self._lacks_oldest)
        elapsed_s = self._last_s - self._since_s
        whole = elapsed_s or 1.0
        figures = {
            "rollout_s": elapsed_s,
            "sessions_mean": self._session_s / whole,
            "waiting_for_oldest_share": self._oldest_s / whole,
            "blocked_by_staleness_share": self._blocked_s.get("staleness", 0.0) / whole,
            "blocked_by_slots_share": self._blocked_s.get("slots", 0.0) / whole,
        }
        self._since_s, self._session_s, self._oldest_s, self._blocked_s = self._last_s, 0.0, 0.0, {}
        return figures
