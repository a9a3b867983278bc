"""Baseline routing policies: those of load balancers without knowledge of sessions."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Protocol

from etude.inference.router.types import NoReplicaError, RouteRequest


class Routing(Protocol):
    """A routing policy: the common interface of `Router` and the baselines."""

    def begin(self, request: RouteRequest, now_s: float, exclude: Collection[str] = ()) -> str:
        """See Router."""
        ...

    def progress(self, request_id: str, generated_tokens: int) -> None:
        """See Router."""
        ...

    def end(
        self, request_id: str, now_s: float, generated_tokens: int, held_tokens: int | None = None
    ) -> None:
        """See Router."""
        ...

    def close_session(self, session: str) -> None:
        """See Router."""
        ...


class _BaselinePolicy:
    """A policy that ignores load and progress."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def _candidates(self, exclude: Collection[str]) -> list[str]:
        candidates = [name for name in self._names if name not in exclude]
        if not candidates:
            raise NoReplicaError("no replica is left", field="exclude", received=sorted(exclude))
        return candidates

    def progress(self, request_id: str, generated_tokens: int) -> None:
        """See Routing.progress."""

    def end(
        self, request_id: str, now_s: float, generated_tokens: int, held_tokens: int | None = None
    ) -> None:
        """See Routing.end."""

    def close_session(self, session: str) -> None:
        """See Routing.close_session."""


class RoundRobin(_BaselinePolicy):
    """Sends each request to the next replica."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._next = 0

    def begin(self, request: RouteRequest, now_s: float, exclude: Collection[str] = ()) -> str:
        """See Routing.begin."""
        candidates = self._candidates(exclude)
        self._next += 1
        return candidates[self._next % len(candidates)]


class RoundRobinSessions(RoundRobin):
    """Assigns each session to the next replica, where it stays."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._homes: dict[str, str] = {}

    def begin(self, request: RouteRequest, now_s: float, exclude: Collection[str] = ()) -> str:
        """See Routing.begin."""
        home = self._homes.get(request.session or "")
        if home is None or home in exclude:
            home = super().begin(request, now_s, exclude)
            if request.session is not None:
                self._homes[request.session] = home
        return home

    def close_session(self, session: str) -> None:
        """See Routing.close_session."""
        self._homes.pop(session, None)


class RandomChoice(_BaselinePolicy):
    """Sends each request to a random replica."""

    def __init__(self, names: Sequence[str], seed: int = 0) -> None:
        super().__init__(names)
        self._random = random.Random(seed)

    def begin(self, request: RouteRequest, now_s: float, exclude: Collection[str] = ()) -> str:
        """See Routing.begin."""
        return self._random.choice(self._candidates(exclude))
