"""Forks on a tree small enough to count every session: their expected gradient is that of the values of the
states that were forked, whatever rule chose them."""

import itertools
import math
from collections.abc import Iterator
from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from etude.algorithms.signal import weigh_group
from etude.config import Baseline, RlConfig
from etude.config.reinforcement import ForkTurn
from etude.environment.fork_groups import ForkRefusal, choose_turn
from etude.records import (
    Group,
    PolicyVersion,
    RewardBreakdown,
    SamplingParams,
    Segment,
    Status,
    ToolCall,
    ToolResult,
    Trajectory,
    TrajectoryId,
    Turn,
    VersionSpan,
)

STOP, LOOK, EDIT = range(3)
MOST_TURNS = 3
History = tuple[int, ...]
Policy = dict[History, NDArray[np.float64]]
"""Logits [3] of the next message in each state."""
CONFIG = RlConfig(baseline="leave_one_out", min_graded=2)


def is_over(history: History) -> bool:
    return len(history) == MOST_TURNS or history[-1:] == (STOP,)


def states(history: History = ()) -> Iterator[History]:
    if not is_over(history):
        yield history
        for choice in range(3):
            yield from states((*history, choice))


def solved(history: History) -> float:
    """A verdict that depends on everything."""
    return float(sum(3**place * (choice + 1) for place, choice in enumerate(history)) % 7 in (1, 2, 5))


def chances(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(logits) / np.exp(logits).sum()


def ends(policy: Policy, state: History) -> Iterator[tuple[History, float]]:
    """Every session that goes on from the state, and how likely it is."""
    if is_over(state):
        yield state, 1.0
        return
    for choice, chance in enumerate(chances(policy[state])):
        for end, rest in ends(policy, (*state, choice)):
            yield end, chance * rest


def score(policy: Policy, end: History, start: int) -> NDArray[np.float64]:
    """The gradient of the log-probability of a session's messages from number `start` on, [states, 3]."""
    found = {state: np.zeros(3) for state in policy}
    for place in range(start, len(end)):
        found[end[:place]] = np.eye(3)[end[place]] - chances(policy[end[:place]])
    return np.array(list(found.values()))


def session(policy: Policy, end: History) -> Trajectory:
    """As a record: a token of prompt, then each message one token, with a token of answer behind it."""
    tokens = np.array([9, *itertools.chain(*((choice, 9) for choice in end))], dtype=np.int32)
    sampled = np.arange(len(tokens)) % 2 == 1
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    logprobs[1::2] = [math.log(chances(policy[end[:n]])[choice]) for n, choice in enumerate(end)]
    identity = TrajectoryId("run", "task", 0, 0, 0)
    spans = (VersionSpan(0, len(tokens), PolicyVersion("run", 0)),)
    segment = Segment(
        "s", str(identity), tokens, sampled, logprobs, spans, spans, (), SamplingParams(), "", ""
    )
    kinds = ({"kind": "edit", "changed": choice == EDIT} for choice in end)
    turns = tuple(
        Turn("s", 1 + 2 * n, 2 + 2 * n, "", (ToolCall("x"),), (ToolResult("", facts=kind),))
        for n, kind in enumerate(kinds)
    )
    reward = RewardBreakdown(solved(end))
    return Trajectory(identity, (segment,), turns, Status.DONE, reward=reward)


def expected_gradient(
    policy: Policy, turn: ForkTurn, *, with_own: bool
) -> tuple[NDArray[np.float64], dict[History, float]]:
    """Of groups of two siblings, over all sessions and siblings; and how often each state is forked.

    `with_own`: the forked session's own end is a plain member as well.
    """
    total, forked = np.zeros((len(policy), 3)), dict[History, float]()
    records = {end: session(policy, end) for end, _ in ends(policy, ())}
    for own, chance in ends(policy, ()):
        point = choose_turn(records[own], turn, (0,))
        if isinstance(point, ForkRefusal):
            continue
        state = own[:point]
        forked[state] = forked.get(state, 0.0) + chance
        for pair in itertools.product(ends(policy, state), repeat=2):
            members = [own, *(end for end, _ in pair)] if with_own else [end for end, _ in pair]
            group = Group("g", "fork", 3, tuple(records[end] for end in members))
            advantages = weigh_group(group, CONFIG).advantages
            weight = chance * pair[0][1] * pair[1][1] / len(members)
            for end, advantage in zip(members, advantages, strict=True):
                if advantage:
                    total += weight * advantage * score(policy, end, point)
    return total, forked


def value_gradient(policy: Policy, state: History) -> NDArray[np.float64]:
    """Of the state's value: the chance to solve the task from there."""
    return sum(
        (chance * solved(end) * score(policy, end, len(state)) for end, chance in ends(policy, state)),
        np.zeros((len(policy), 3)),
    )


@pytest.mark.parametrize("turn", get_args(ForkTurn))
def test_the_expected_gradient_of_fork_groups_is_that_of_the_forked_states_values(turn: ForkTurn) -> None:
    rng = np.random.default_rng(3)
    policy = {state: 0.5 * rng.normal(size=3) for state in states()}
    found, forked = expected_gradient(policy, turn, with_own=False)
    assert len(forked) > 1, "states of more than one depth"
    exact = sum(weight * value_gradient(policy, state) for state, weight in forked.items())
    np.testing.assert_allclose(found, exact, atol=1e-8)
    assert np.abs(exact).max() > 1e-3
    biased, _ = expected_gradient(policy, turn, with_own=True)
    cosine = (biased * exact).sum() / np.linalg.norm(biased) / np.linalg.norm(exact)
    assert cosine < 0.999 or abs(np.linalg.norm(biased) / np.linalg.norm(exact) - 1) > 0.05, "the toy tells"


@pytest.mark.parametrize(("baseline", "share"), [("leave_one_out", 1.0), ("group_mean", 0.5)])
def test_the_expected_gradient_of_task_groups_is_the_policy_gradient(
    baseline: Baseline, share: float
) -> None:
    """Of groups of two, or as much of it as the baseline leaves: (n - 1) / n."""
    rng = np.random.default_rng(4)
    policy = {state: 0.5 * rng.normal(size=3) for state in states()}
    records = {end: session(policy, end) for end, _ in ends(policy, ())}
    total = np.zeros((len(policy), 3))
    for pair in itertools.product(ends(policy, ()), repeat=2):
        group = Group("g", "task", 2, tuple(records[end] for end, _ in pair))
        advantages = weigh_group(group, RlConfig(baseline=baseline)).advantages
        for (end, _), advantage in zip(pair, advantages, strict=True):
            total += pair[0][1] * pair[1][1] / 2 * advantage * score(policy, end, 0)
    np.testing.assert_allclose(total, share * value_gradient(policy, ()), atol=1e-8)
