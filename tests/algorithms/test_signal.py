"""The learning signal of groups: verdicts first, prices among successes, penalties on malformed calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.algorithms.signal import Signal, graded_members, signal_of, weigh_group
from etude.config import Baseline, RewardConfig, RlConfig
from etude.records import (
    Group,
    PolicyVersion,
    RewardBreakdown,
    SamplingParams,
    Segment,
    Status,
    ToolCall,
    Trajectory,
    TrajectoryId,
    Turn,
    VersionSpan,
)

FINE, MALFORMED, TOOL_ERROR = "fine", "malformed", "tool error"
TURN = 3
"""Tokens of a message."""


@dataclass(frozen=True)
class Played:
    """A session as its messages, each with one call of this kind."""

    task: float
    kinds: tuple[str, ...] = (FINE,)
    limit: bool = False
    extra_price: float = 0.0

    @property
    def reward(self) -> RewardBreakdown:
        costs = {
            "malformed": 0.05 * self.kinds.count(MALFORMED),
            "invalid_arguments": 0.03 * self.kinds.count(TOOL_ERROR),
            "length": 0.02 * math.log1p(len(self.kinds)) + self.extra_price,
            "limit": 0.1 * self.limit,
        }
        return RewardBreakdown(self.task, {name: -cost for name, cost in costs.items()})


def record(played: Played | None, index: int, first_sampled: int = 1) -> Trajectory:
    """A token of prompt, then the messages; None: the infrastructure failed."""
    kinds = () if played is None else played.kinds
    identity = TrajectoryId("run", "task", 0, 0, index)
    length = 1 + TURN * len(kinds)
    tokens = np.zeros(length, dtype=np.int32)
    sampled = np.arange(length) >= first_sampled
    spans = (VersionSpan(0, length, PolicyVersion("run", 0)),)
    logprobs = np.where(sampled, -1.0, 0.0).astype(np.float32)
    segment = Segment(
        f"{identity}#0", str(identity), tokens, sampled, logprobs, spans, spans, (), SamplingParams(), "", ""
    )
    turns = tuple(
        Turn(
            segment.id,
            start := 1 + TURN * n,
            start + TURN,
            "",
            (ToolCall("x", error="odd" if kind == MALFORMED else None),),
            (),
            ((start + 1, start + TURN),) if kind == MALFORMED else (),
        )
        for n, kind in enumerate(kinds)
    )
    status = Status.INFRASTRUCTURE if played is None else Status.DONE
    reward = None if played is None else played.reward
    return Trajectory(identity, (segment,), turns, status, reward=reward)


def group(*played: Played | None) -> Group:
    members = tuple(record(one, index) for index, one in enumerate(played))
    return Group("g", "task", len(members), members)


def token_advantages(played: Sequence[Played], config: RlConfig, place: int) -> list[float]:
    """Of each token of one member."""
    weighed = weigh_group(group(*played), config)
    return weighed.token_advantages(place, weighed.members[place][0].segments[0]).tolist()


SOLVED, FAILED, ODD = Played(1.0), Played(0.0), Played(0.0, (FINE, MALFORMED))


@pytest.mark.parametrize(
    ("played", "signal"),
    [
        ((SOLVED, FAILED), Signal.TASK),
        ((Played(0.25), Played(0.5)), Signal.TASK),
        ((SOLVED, SOLVED), Signal.NONE),
        ((SOLVED, replace(SOLVED, limit=True)), Signal.PRICE),
        ((SOLVED, Played(1.0, (FINE, MALFORMED))), Signal.PRICE),
        ((FAILED, FAILED), Signal.NONE),
        ((FAILED, replace(FAILED, limit=True)), Signal.NONE),
        ((ODD, FAILED), Signal.FORM),
        ((ODD, ODD), Signal.FORM),
        ((replace(ODD, task=0.25), Played(0.25)), Signal.FORM),  # partial credit is no success
        ((SOLVED, None), Signal.NONE),
        ((None, None), Signal.NONE),
    ],
)
def test_what_can_be_learnt_is_what_graded_members_differ_in(played, signal: Signal) -> None:
    assert signal_of(group(*played), RlConfig()) is signal


def test_of_a_group_that_failed_only_the_tokens_of_malformed_calls_have_an_advantage() -> None:
    odd = token_advantages([ODD, FAILED, FAILED], RlConfig(), 0)
    assert odd == pytest.approx([0, 0, 0, 0, 0, -0.05, -0.05])
    assert not any(token_advantages([ODD, FAILED, FAILED], RlConfig(), 1))
    assert signal_of(group(ODD, FAILED), RlConfig(reward=RewardConfig(malformed_penalty=0))) is Signal.NONE


def test_a_solved_session_pays_for_a_malformed_call_once_by_its_price() -> None:
    solved = Played(1.0, (FINE, MALFORMED))
    assert len(set(token_advantages([solved, FAILED], RlConfig(), 0))) == 1
    assert len(set(token_advantages([SOLVED, ODD], RlConfig(), 1))) == 2, "a failed one by its tokens"


def test_a_malformed_call_before_a_fork_is_nobody_s() -> None:
    siblings = tuple(record(ODD, index, first_sampled=8) for index in range(2))
    assert signal_of(Group("g", "fork", 2, siblings), RlConfig()) is Signal.NONE


@pytest.mark.parametrize("baseline", ["group_mean", "group_mean_std"])
def test_a_group_that_solved_the_task_differs_by_its_prices_undivided_and_by_their_weight(
    baseline: Baseline,
) -> None:
    cheap, dear = Played(1.0), Played(1.0, extra_price=0.04)
    config = RlConfig(baseline=baseline)
    whole = weigh_group(group(cheap, dear), config).advantages
    assert whole.tolist() == pytest.approx([0.02, -0.02], rel=0.1)
    half = weigh_group(replace(group(cheap, dear), price_weight=0.5), config).advantages
    np.testing.assert_allclose(half, whole / 2, rtol=1e-5)


def test_groups_with_fewer_graded_members_than_asked_for_teach_nothing() -> None:
    few = group(SOLVED, FAILED, None, None)
    assert signal_of(few, RlConfig(min_graded=2)) is Signal.TASK
    assert signal_of(few, RlConfig(min_graded=3)) is Signal.NONE


def test_rewards_that_are_no_numbers_make_no_difference() -> None:
    members = group(SOLVED, SOLVED, SOLVED).members
    odd = [replace(members[1], reward=RewardBreakdown(math.nan)),
           replace(members[2], reward=RewardBreakdown(1.0, {"limit": -math.inf}))]  # fmt: skip
    broken = Group("g", "task", 3, (members[0], *odd))
    assert graded_members(broken) == ((members[0], members[0].reward),)
    assert signal_of(broken, RlConfig()) is Signal.NONE


def test_rejection_sampling_trains_what_was_solved_and_nothing_else() -> None:
    config = RlConfig(algorithm="rejection_sampling")
    assert weigh_group(group(SOLVED, ODD, SOLVED), config).advantages.tolist() == [1.0, 0.0, 1.0]
    assert signal_of(group(SOLVED, SOLVED), config) is Signal.TASK
    assert signal_of(group(ODD, FAILED), config) is Signal.NONE
    assert not any(token_advantages([SOLVED, ODD], config, 1)), "no penalty for form either"


def test_best_of_group_keeps_the_solved_sessions_with_the_highest_total_reward() -> None:
    config = RlConfig(algorithm="best_of_group")
    dear = Played(1.0, extra_price=0.3)
    assert weigh_group(group(dear, SOLVED, FAILED, SOLVED), config).advantages.tolist() == [0, 1, 0, 1]
    ruinous = Played(1.0, extra_price=2.0)
    assert weigh_group(group(FAILED, ruinous), config).advantages.tolist() == [0, 1], "failures are not kept"
    assert signal_of(group(ODD, FAILED), config) is Signal.NONE


_KINDS = st.lists(st.sampled_from([FINE, MALFORMED, TOOL_ERROR]), min_size=1, max_size=5).map(tuple)
_PLAYED = st.builds(
    Played, st.sampled_from([0.0, 0.0, 0.25, 1.0]), _KINDS, st.booleans(), st.sampled_from([0.0, 0.3])
)
_BASELINES = st.sampled_from(["group_mean", "group_mean_std", "leave_one_out"])


@settings(max_examples=40)
@given(st.lists(_PLAYED, min_size=2, max_size=6), _BASELINES, st.data())
def test_neither_giving_up_nor_padding_pays(
    played: list[Played], baseline: Baseline, data: st.DataObject
) -> None:
    """A failed session that ends earlier, and any session with more well-formed calls in it, has no token
    with a higher advantage than before."""
    config = RlConfig(baseline=baseline)
    place = data.draw(st.integers(0, len(played) - 1))
    one = played[place]
    at = data.draw(st.integers(0, len(one.kinds)))
    if one.task < 1 and at and data.draw(st.booleans()):
        limit = data.draw(st.booleans())
        changed = replace(one, kinds=one.kinds[:at], limit=limit, extra_price=0.0)
        kept = slice(0, 1 + TURN * at)
    else:
        more = data.draw(st.lists(st.sampled_from([FINE, TOOL_ERROR]), min_size=1, max_size=3))
        changed = replace(one, kinds=(*one.kinds[:at], *more, *one.kinds[at:]))
        kept = slice(0, 1 + TURN * at)
    before = token_advantages(played, config, place)
    after = token_advantages([*played[:place], changed, *played[place + 1 :]], config, place)
    assert (np.array(after[kept]) <= np.array(before[kept]) + 1e-6).all()
    assert max(after) <= max(before) + 1e-6
