"""Runs the selected cases of a test module side by side, and compares outcomes with what is expected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from etude.sandbox.local.doctor import find_problems
from tests.adversary.escape.holes import HOLES
from tests.adversary.escape.launching import Run, start, why_not
from tests.adversary.escape.model import Hole, Outcome, User

Key = tuple[str, User, str]
"""Backend, user, and `attempts` or `controls`."""


class Board:
    """What has come out of the runs. They begin with the first look."""

    def __init__(self, chosen: dict[Key, list[str]]) -> None:
        self._runs: dict[Key, list[Run]] = {
            (backend, user, what): start(user, backend, what, names, 2 if what == "controls" else 1)
            for (backend, user, what), names in chosen.items()
            if why_not(user) is None
        }

    def look(self, backend: str, user: User, what: str, name: str) -> Outcome:
        """The outcome of one case. Skips where this user or this backend cannot be had."""
        reason = why_not(user)
        if reason is not None:
            pytest.skip(reason)
        runs = self._runs[backend, user, what]
        for run in runs:
            outcomes = run.outcomes()
            if name in outcomes:
                return outcomes[name]
            if "unavailable" in outcomes:
                missing = backend != "local" or find_problems()
                assert missing, f"namespaces should work here: {outcomes['unavailable'].detail}"
                pytest.skip(outcomes["unavailable"].detail)
        pytest.fail(f"no outcome: {[run.log for run in runs]}")

    def hole(self, backend: str, user: User, name: str) -> Hole | None:
        """The hole that this attempt is known to be for this user."""
        hole = HOLES[backend].get(name)
        if hole is None or user not in hole.users:
            return None
        has_groups = hole.without_groups_only and self.look(backend, user, "attempts", "").verdict == "held"
        return None if has_groups else hole

    def close(self) -> None:
        """Ends what still runs."""
        for run in [run for lanes in self._runs.values() for run in lanes]:
            run.close()

    def expect_failure(self, backend: str, user: User, name: str) -> None:
        """Passes if the attempt failed; a known hole is expected, and must still be one."""
        outcome = self.look(backend, user, "attempts", name)
        if outcome.verdict == "impossible":
            if backend == "local":
                pytest.skip(outcome.detail)
            return  # what a guest or its backend does not have lets nobody out
        hole = self.hole(backend, user, name)
        if hole is not None and outcome.verdict in ("escaped", "lost"):
            pytest.xfail(f"{outcome.detail}. {hole.reason}")
        assert hole is None, f"closed: remove it from holes.py ({outcome.detail})"
        assert outcome.verdict == "held", outcome.detail


@contextmanager
def board(request: pytest.FixtureRequest) -> Iterator[Board]:
    """A board with the cases of the requesting module that were selected."""
    chosen: dict[Key, list[str]] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.path == request.path and hasattr(item, "callspec"):
            params: dict[str, Any] = item.callspec.params
            what = "controls" if "without_its_protection" in item.originalname else "attempts"
            chosen.setdefault((params.get("backend", "local"), params["user"], what), []).append(
                params["name"]
            )
    opened = Board(chosen)
    try:
        yield opened
    finally:
        opened.close()
