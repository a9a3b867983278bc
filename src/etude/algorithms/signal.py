"""The training signal of a group. The collector, the trainer and recorded streams all use `weigh_group`.

    verdicts differ    TASK    value against the group's baseline; a solved session has 1 minus its price
    all solved         PRICE   the same: prices alone differ. Never divided by their deviation
    all failed         FORM    no baseline: only the tokens of malformed calls, each with a negative advantage

The value of a failed session is its verdict alone, and its malformed calls are penalised on their own tokens
only, in every group. So nothing that it leaves out, and nothing well-formed that it adds, changes any
advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from etude.algorithms.advantages import ROUNDING, member_value, value_advantages
from etude.config import RlConfig
from etude.records import Group, RewardBreakdown, Segment, Status, Trajectory


class Signal(StrEnum):
    """What the members of a group can be distinguished by."""

    TASK = "task"
    """The verdict."""
    PRICE = "price"
    """All solved the task, some at a higher price than others."""
    FORM = "form"
    """All failed, some with malformed calls."""
    NONE = "none"
    """Nothing: the group is dropped and replaced (Yu et al. 2025, dynamic sampling)."""


_SURPLUS = "surplus"
"""Fact of the sessions of a group that a run left out although it has a signal."""


def _nothing() -> NDArray[np.float32]:
    return np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class GroupSignal:
    """The graded members of a group with their advantages."""

    kind: Signal
    members: tuple[tuple[Trajectory, RewardBreakdown], ...] = ()
    advantages: NDArray[np.float32] = field(default_factory=_nothing)
    """[members]"""
    form_penalty: float = 0.0
    """Subtracted from the advantage of each token of a failed member's malformed calls."""

    def token_advantages(self, number: int, segment: Segment) -> NDArray[np.float32]:
        """[T] advantages of the tokens of one segment of member `number`."""
        member, reward = self.members[number]
        advantages = np.full(len(segment.tokens), self.advantages[number], dtype=np.float32)
        if self.form_penalty and reward.task < 1.0:
            for turn in member.turns:
                for start, end in turn.malformed if turn.segment_id == segment.id else ():
                    advantages[start:end] -= self.form_penalty
        return advantages


def graded_members(group: Group) -> tuple[tuple[Trajectory, RewardBreakdown], ...]:
    """The members with a reward, without infrastructure failures and rewards that are not finite."""
    return tuple(
        (member, member.reward)
        for member in group.members
        if member.status is not Status.INFRASTRUCTURE
        and member.reward is not None
        and member.reward.is_finite
    )


def weigh_group(group: Group, config: RlConfig) -> GroupSignal:
    """The signal and the advantages of a group under this configuration."""
    members = graded_members(group)
    verdicts = [reward.task for _, reward in members]
    solved = np.array(verdicts, dtype=np.float64) >= 1.0
    if config.algorithm != "policy_gradient":
        kept = solved & _is_best(members, solved) if config.algorithm == "best_of_group" else solved
        return GroupSignal(Signal.TASK if kept.any() else Signal.NONE, members, kept.astype(np.float32))
    penalty = config.reward.malformed_penalty
    nothing = np.zeros(len(members), dtype=np.float32)
    if len(members) < config.min_graded:
        return GroupSignal(Signal.NONE, members, nothing)
    values = [member_value(reward, config.reward.most_price, group.price_weight) for _, reward in members]
    if len(set(verdicts)) > 1:
        return GroupSignal(Signal.TASK, members, value_advantages(values, config.baseline), penalty)
    if solved.all():
        unscaled = "group_mean" if config.baseline == "group_mean_std" else config.baseline
        advantages = value_advantages(values, unscaled)
        return GroupSignal(Signal.PRICE if advantages.any() else Signal.NONE, members, advantages)
    has_faults = penalty > 0 and any(_has_sampled_fault(member) for member, _ in members)
    return GroupSignal(Signal.FORM if has_faults else Signal.NONE, members, nothing, penalty)


def signal_of(group: Group, config: RlConfig) -> Signal:
    """The kind of signal that the group carries."""
    return weigh_group(group, config).kind


def _is_best(
    members: Sequence[tuple[Trajectory, RewardBreakdown]], solved: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """[members] whose total reward no solved member exceeds."""
    totals = np.array([reward.total for _, reward in members], dtype=np.float64)
    return totals >= totals[solved].max(initial=-np.inf) - ROUNDING


def _has_sampled_fault(member: Trajectory) -> bool:
    """Whether a token of a malformed call was sampled here: in a fork's sibling, after the fork."""
    sampled = {segment.id: segment.sampled for segment in member.segments}
    return any(
        turn.segment_id in sampled and bool(sampled[turn.segment_id][start:end].any())
        for turn in member.turns
        for start, end in turn.malformed
    )


def as_surplus(group: Group) -> Group:
    """The group marked, for the log, as one that has a signal and that the run leaves out."""
    members = (replace(one, facts={**one.facts, _SURPLUS: True}) for one in group.members)
    return replace(group, members=tuple(members))


def is_surplus(group: Group) -> bool:
    """Whether the run that recorded the group left it out although it has a signal."""
    return any(one.facts.get(_SURPLUS) for one in group.members)
