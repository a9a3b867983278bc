"""Kinds of attacks are counted by their causes; each attempt has a control, or the reason for none."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.adversary.escape.attempts import ATTEMPTS
from tests.adversary.escape.causes import CAUSES, FOUND_BEFORE


def test_every_attempt_stands_in_the_row_of_one_cause() -> None:
    rows = Counter(name for names in CAUSES.values() for name in names)
    assert rows == Counter(ATTEMPTS.keys())


def test_the_causes_are_many_and_a_third_of_them_is_new() -> None:
    assert len(CAUSES) >= 120
    assert set(CAUSES) >= FOUND_BEFORE
    assert 3 * len(FOUND_BEFORE) <= 2 * len(CAUSES)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_has_a_control_or_says_why_not(name: str) -> None:
    attempt = ATTEMPTS[name]
    assert bool(attempt.program) != bool(attempt.scenario)
    assert attempt.lifts or attempt.outside or attempt.control or attempt.no_control
    assert attempt.protects
