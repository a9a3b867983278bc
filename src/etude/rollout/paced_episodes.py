"""Finished episodes on a reproducible schedule, which decides when each one counts."""

from __future__ import annotations

from collections.abc import Callable

from etude.environment.member import MemberSampler
from etude.protocols import Sampler

OnEpisodeCounted = Callable[[], None]
"""Callback that adds a finished episode to its group."""


class PacedEpisodes:
    """Holds finished episodes back until the schedule has recorded the ends of all of their sessions.

    Without a schedule an episode counts as soon as it finishes, and nothing is held back.
    """

    def __init__(self) -> None:
        self.is_paced = False
        """Whether there is a schedule."""
        self._views: dict[str, MemberSampler] = {}
        """Session whose end the schedule has not recorded yet -> its episode's view of the sampler."""
        self._held_back: dict[MemberSampler, OnEpisodeCounted] = {}

    def new_view(self, sampler: Sampler) -> MemberSampler:
        """A view of the sampler for one episode, which keeps track of the sessions that it opens."""
        return MemberSampler(sampler, self.is_paced, self._views.__setitem__ if self.is_paced else None)

    def hold_back(self, view: MemberSampler, on_counted: OnEpisodeCounted) -> bool:
        """Keeps the callback of a finished episode until it counts; returns False if it counts at once."""
        if not self.is_paced or not view.unrecorded_ends:
            return False
        self._held_back[view] = on_counted
        return True

    def record_end(self, session_id: str) -> OnEpisodeCounted | None:
        """The schedule has recorded the end of a session. Returns the callback of its episode if that has
        finished and this was its last session; the caller calls it."""
        view = self._views.pop(session_id, None)
        if view is None:
            return None
        view.unrecorded_ends.discard(session_id)
        return None if view.unrecorded_ends else self._held_back.pop(view, None)

    def stop_pacing(self) -> list[OnEpisodeCounted]:
        """Ends the schedule; returns the callbacks of the episodes that were held back."""
        self.is_paced = False
        held_back, self._held_back = self._held_back, {}
        return list(held_back.values())

    def clear(self) -> None:
        """Drops all episodes without counting them."""
        self._held_back.clear()
        self._views.clear()
