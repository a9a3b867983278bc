"""Ends of episodes on a reproducible schedule, which decides when they count."""

from __future__ import annotations

from collections.abc import Callable

from etude.environment.member import MemberSampler
from etude.protocols import Sampler

Arrive = Callable[[], None]
"""What is done with an episode that has ended."""


class NotedEnds:
    """Episodes that have ended, until the schedule has taken note of all of their sessions. Where nothing is
    paced they count when they end."""

    def __init__(self) -> None:
        self.is_paced = False
        """Whether there is a schedule."""
        self._views: dict[str, MemberSampler] = {}
        """Session of which the schedule has yet to note the end -> its episode's view."""
        self._held: dict[MemberSampler, Arrive] = {}

    def view(self, sampler: Sampler) -> MemberSampler:
        """One episode's view of the sampler, all of whose sessions are waited for."""
        return MemberSampler(sampler, self.is_paced, self._views.__setitem__ if self.is_paced else None)

    def hold(self, view: MemberSampler, arrive: Arrive) -> bool:
        """Keeps an episode that has ended; False where it counts at once, and nothing is kept."""
        if not self.is_paced or not view.unnoted:
            return False
        self._held[view] = arrive
        return True

    def note(self, session_id: str) -> Arrive | None:
        """The schedule has noted the end of a session; what is due if it was the last one of an episode that
        has ended."""
        view = self._views.pop(session_id, None)
        if view is None:
            return None
        view.unnoted.discard(session_id)
        return None if view.unnoted else self._held.pop(view, None)

    def stop(self) -> list[Arrive]:
        """There is no schedule any more; what it has held up is due now."""
        self.is_paced = False
        held, self._held = self._held, {}
        return list(held.values())

    def clear(self) -> None:
        """Forgets all episodes."""
        self._held.clear()
        self._views.clear()
