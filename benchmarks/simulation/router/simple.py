"""Policies to compare with: what load balancers do that know nothing of sessions."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Protocol

from etude.inference.router.types import NoReplicaError, RouteRequest


class Routing(Protocol):
    """Who gets which request: what `Router` and the policies beside it have in common."""

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


class _Blind:
    """Keeps no books."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def _left(self, exclude: Collection[str]) -> list[str]:
        left = [name for name in self._names if name not in exclude]
        if not left:
            raise NoReplicaError("no replica is left", field="exclude", received=sorted(exclude))
        return left

    def progress(self, request_id: str, generated_tokens: int) -> None:
        """See Routing.progress."""

    def end(
        self, request_id: str, now_s: float, generated_tokens: int, held_tokens: int | None = None
    ) -> None:
        """See Routing.end."""

    def close_session(self, session: str) -> None:
        """See Routing.close_session."""


class RoundRobin(_Blind):
    """Each request to the next replica."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._next = 0

    def begin(self, request: RouteRequest, now_s: float, exclude: Collection[str] = ()) -> str:
        """See Routing.begin."""
        left = self._left(exclude)
        self._next += 1
        return left[self._next % len(left)]


class RoundRobinSessions(RoundRobin):
    """Each session to the next replica, where it stays."""

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


class RandomChoice(_Blind):
    """Each request to any replica."""

    def __init__(self, names: Sequence[str], seed: int = 0) -> None:
        super().__init__(names)
        self._random = random.Random(seed)

    def begin(self, request: RouteRequest, now_s: float, exclude: Collection[str] = ()) -> str:
        """See Routing.begin."""
        return self._random.choice(self._left(exclude))
