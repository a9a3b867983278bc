from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from etude.records import RewardBreakdown, Status, ToolErrorClass, Trajectory
from etude.store.comparison import compare
from tests.store.builders import make_chain, make_trajectory, trees


@settings(deadline=None)
@given(trees())
def test_a_trajectory_is_equal_to_itself(trajectory: Trajectory) -> None:
    compared = compare(trajectory, trajectory)
    assert compared.equal
    assert compared.common_turns == len(trajectory.turns)


def test_durations_versions_and_logprobs_are_no_difference() -> None:
    one = make_trajectory(step=0)
    (segment,) = one.segments
    slow = tuple(
        replace(turn, results=tuple(replace(result, duration_s=9.0) for result in turn.results))
        for turn in one.turns
    )
    other = replace(one, turns=slow, segments=(replace(segment, logprobs=segment.logprobs - 1),))
    assert compare(one, other).equal


@pytest.mark.parametrize("aspect", ["tokens", "text", "calls", "results"])
def test_the_first_turn_that_differs_is_named_with_what_differs(aspect: str) -> None:
    one = make_trajectory(num_turns=2)
    (segment,) = one.segments
    turn = one.turns[1]
    if aspect == "tokens":
        tokens = segment.tokens.copy()
        tokens[turn.start] += 1
        other = replace(one, segments=(replace(segment, tokens=tokens),))
    else:
        changes = {
            "text": {"text": "other"},
            "calls": {"calls": (replace(turn.calls[0], name="grep"),)},
            "results": {"results": (replace(turn.results[0], error=ToolErrorClass.TIMEOUT),)},
        }
        other = replace(one, turns=(one.turns[0], replace(turn, **changes[aspect])))
    found = compare(one, other).divergence
    assert found is not None
    assert (found.turn, found.aspects) == (2, (aspect,))
    assert found.token == (turn.start if aspect == "tokens" else None)
    assert found.call == (0 if aspect in ("calls", "results") else None)


def test_a_session_that_is_over_earlier_parts_there() -> None:
    one = make_trajectory(num_turns=2)
    compared = compare(one, replace(one, turns=one.turns[:1], status=Status.LIMIT, cause="turns"))
    assert compared.divergence is not None
    assert (compared.divergence.turn, compared.divergence.aspects) == (2, ("missing",))
    assert compared.divergence.right is None
    assert compared.outcome == {"status": ("done", "limit"), "cause": ("", "turns")}


def test_only_the_end_may_differ() -> None:
    one = make_trajectory()
    compared = compare(one, replace(one, reward=RewardBreakdown(0.0)))
    assert compared.divergence is None
    assert not compared.equal
    assert compared.outcome == {"reward": (0.95, 0.0)}


def test_another_summary_opens_another_context() -> None:
    one = make_chain(2)
    second = one.segments[1]
    tokens = second.tokens.copy()
    tokens[3] += 1
    other = replace(one, segments=(one.segments[0], replace(second, tokens=np.array(tokens))))
    found = compare(one, other).divergence
    assert found is not None
    assert (found.turn, found.aspects, found.token) == (3, ("tokens",), 3)
