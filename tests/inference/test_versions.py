"""Which policy versions answer a request."""

from __future__ import annotations

import pytest

from etude.inference.requests import serves
from etude.records import PolicyVersion

SERVED = PolicyVersion("run", 7, "abc")


@pytest.mark.parametrize(
    ("wanted", "exactly", "at_least"),
    [
        (PolicyVersion("run", 7, "abc"), True, True),
        (PolicyVersion("run", 7), True, True),
        (PolicyVersion("run", 7, "other"), False, False),
        (PolicyVersion("run", 6), False, True),
        (PolicyVersion("run", 6, "other"), False, True),
        (PolicyVersion("run", 8), False, False),
        (PolicyVersion("else", 7), False, False),
    ],
)
def test_a_version_answers_for_itself_and_for_earlier_ones_where_those_are_the_least(
    wanted: PolicyVersion, exactly: bool, at_least: bool
) -> None:
    assert serves(SERVED, wanted, wanted_is_minimum=False) is exactly
    assert serves(SERVED, wanted, wanted_is_minimum=True) is at_least


def test_nothing_is_served_without_weights() -> None:
    assert not serves(None, SERVED, wanted_is_minimum=True)
