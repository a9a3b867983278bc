"""The attempts that mean something in a guest of its own, on the backends that have one.

Each control belongs to the local backend: what is taken away there has no part in a guest.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.adversary.escape.attempts import ATTEMPTS
from tests.adversary.escape.judging import Board, board
from tests.adversary.escape.model import USERS, User

pytestmark = [pytest.mark.slow, pytest.mark.foreign]
RUNS: list[tuple[str, User]] = [*(("gvisor", user) for user in USERS), ("vm", "root")]
"""QEMU is a plain user's process in any case (root gives itself up for it), and guests are alike; so are the
kernels that gVisor gives both users."""
CASES = [
    pytest.param(
        backend, user, name, marks=() if (backend, user) == ("gvisor", "root") else pytest.mark.repeated
    )
    for backend, user in RUNS
    for name, attempt in ATTEMPTS.items()
    if attempt.reach == "everywhere" and user in attempt.users
]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[Board]:
    """The selected attempts."""
    with board(request) as opened:
        yield opened


@pytest.mark.parametrize(("backend", "user", "name"), CASES)
def test_the_attempt_fails_in_a_guest(outcomes: Board, backend: str, user: User, name: str) -> None:
    outcomes.expect_failure(backend, user, name)
