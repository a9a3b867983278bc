"""Every attempt on the local backend, as root and as a plain user, and the control of each."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.adversary.escape.attempts import ATTEMPTS
from tests.adversary.escape.holes import HOLES
from tests.adversary.escape.judging import Board, board
from tests.adversary.escape.model import USERS, User

pytestmark = pytest.mark.alone

CASES = [(user, name) for user in USERS for name, attempt in ATTEMPTS.items() if user in attempt.users]
OWN = "root" if os.geteuid() == 0 else "plain"
ATTACKS = [pytest.param(user, name, marks=() if user == OWN else pytest.mark.slow) for user, name in CASES]
CONTROLS = [
    pytest.param(user, name, marks=() if user == OWN else pytest.mark.repeated) for user, name in CASES
]
"""What is taken away is the same for both users."""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[Board]:
    """The selected attempts and controls."""
    with board(request) as opened:
        yield opened


@pytest.mark.parametrize(("user", "name"), ATTACKS)
def test_the_attempt_fails(outcomes: Board, user: User, name: str) -> None:
    outcomes.expect_failure("local", user, name)


@pytest.mark.slow
@pytest.mark.parametrize(("user", "name"), CONTROLS)
def test_the_attempt_succeeds_without_its_protection(outcomes: Board, user: User, name: str) -> None:
    outcome = outcomes.look("local", user, "controls", name)
    hole = HOLES["local"].get(name)
    if outcome.verdict == "impossible":
        pytest.skip(outcome.detail)
    if hole is not None and user in hole.users and outcome.verdict == "held":
        pytest.skip(f"there is nothing to take away: {hole.reason}")
    assert outcome.verdict == "escaped", outcome.detail
