"""The bounded buffer between rollouts and training: decides when groups begin and which a step trains on.

    num_may_begin ── begin ── (under way) ── put ── (waiting) ── pop_step ── trained
                                               └─ without signal: dropped  └─ too old: stale

A group that begins while version v samples must be trained at step v + bound at the latest (step k turns
version k into version k + 1). Each step trains `groups_per_step` groups, so the number of open groups is
limited to what the steps up to there can train: then the oldest can always be trained in time, by waiting for
it if need be, and nothing is sampled in vain. While new weights are being published fewer may be open. Groups
whose members have equal verdicts do not count towards a step, with or without a signal, so the limit rises
with their recent share.

Where a session of a group was forked, the group and the group of the fork share a task number and are one
unit: under way, waiting and trained together.

A state machine without I/O or clock: the collector does the waiting.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from etude.algorithms.signal import Signal
from etude.records import Group, Segment


def mask_stale(group: Group, min_step: int) -> Group:
    """The group with every token of a policy version before `min_step` turned into context.

    Tokens, log-probabilities and rewards stay as they are: only the loss mask changes. The log stores the
    unmasked group.
    """
    members = (
        replace(member, segments=tuple(_mask_segment(s, min_step) for s in member.segments))
        for member in group.members
    )
    return replace(group, members=tuple(members))


def _mask_segment(segment: Segment, min_step: int) -> Segment:
    old = [span for span in segment.version_spans if span.version.step < min_step]
    if not old:
        return segment
    sampled = segment.sampled.copy()
    for span in old:
        sampled[span.start : span.end] = False
    kept = tuple(span for span in segment.version_spans if span.version.step >= min_step)
    logprobs = np.where(sampled, segment.logprobs, np.float32(0.0)).astype(np.float32)
    return replace(segment, sampled=sampled, logprobs=logprobs, version_spans=kept)


@dataclass(frozen=True, slots=True)
class FinishedGroups:
    """The finished group of one task number, and its fork's group, not trained on yet."""

    number: int
    group: Group
    signal: Signal
    oldest_step: int
    """Step of the oldest policy version that sampled a token of it."""
    fork: Group | None = None
    """Group of the siblings of a forked session, if a fork was made."""
    fork_signal: Signal = Signal.NONE

    @property
    def groups(self) -> tuple[tuple[Group, Signal], ...]:
        """One or two groups, each with its signal."""
        own = ((self.group, self.signal),)
        return own if self.fork is None else (*own, (self.fork, self.fork_signal))

    @property
    def num_task(self) -> int:
        """Number of groups whose verdicts differ: only these count towards `groups_per_step`."""
        return sum(signal is Signal.TASK for _, signal in self.groups)

    @property
    def num_sampled_tokens(self) -> int:
        """Sum over all sessions."""
        return sum(member.num_sampled_tokens for group, _ in self.groups for member in group.members)

    @property
    def is_trained(self) -> bool:
        """Whether any of the groups carries a signal."""
        return any(signal is not Signal.NONE for _, signal in self.groups)


@dataclass(slots=True)
class StepGroups:
    """The groups of one step, and those that left the buffer untrained since the last one; in task order."""

    trained: list[FinishedGroups] = field(default_factory=list[FinishedGroups])
    """With a signal."""
    dropped: list[FinishedGroups] = field(default_factory=list[FinishedGroups])
    stale: list[FinishedGroups] = field(default_factory=list[FinishedGroups])
    """Older than the bound. Where old tokens are masked instead, only groups without a younger token."""
    masked_tokens: int = 0


class GroupBuffer:
    """Groups under way and groups waiting to be trained on, by task number."""

    def __init__(
        self,
        bound: int,
        groups_per_step: int,
        first_step: int,
        num_steps: int,
        most_finished: int,
        mask: bool,
    ) -> None:
        """`bound`: most steps from the oldest token to the step that trains it. `first_step`: the step that
        is trained next; its weights are in service. `num_steps`: where training ends. `most_finished`: when
        so many groups have finished, a step is taken however few carry a signal. `mask`: tokens that are too
        old are masked, and no step waits for an old group."""
        self.step = first_step
        """The step whose groups `pop_step` returns next."""
        self.serving = first_step
        """Step of the policy version in service. Set by the caller."""
        self.under_way: OrderedDict[int, int] = OrderedDict()
        """Number of a group that is being sampled -> `serving` when it began, in order of beginning."""
        self._waiting: dict[int, FinishedGroups] = {}
        self._next = StepGroups()
        self._bound = bound
        self._wanted = groups_per_step
        self._num_steps = num_steps
        self._most_finished = most_finished
        self._num_finished = 0
        """Groups that finished since the last step."""
        self._mask = mask

    def num_may_begin(self, useful_each: float) -> int:
        """How many more task numbers may begin. `useful_each`: groups with a signal expected of each."""
        return self._num_may_begin(useful_each, self.serving)

    def _num_may_begin(self, useful_each: float, serving: int) -> int:
        """The same, for the case that policy version `serving` is in service."""
        steps = min(self._bound + 1 - (self.step - serving), self._num_steps - self.step)
        places = math.ceil(max(0, steps) * self._wanted / useful_each)
        return max(
            0, places - len(self.under_way) - sum(unit.num_task > 0 for unit in self._waiting.values())
        )

    def begin(self, number: int) -> None:
        """Marks a group as under way."""
        self.under_way[number] = self.serving

    def put(
        self,
        number: int,
        group: Group,
        signal: Signal,
        fork: Group | None = None,
        fork_signal: Signal = Signal.NONE,
    ) -> None:
        """Adds a finished group and its fork's; replaces an earlier version if a late member has joined."""
        if number in self.under_way:
            self._num_finished += 1 if fork is None else 2
            fallback = self.under_way.pop(number)
        else:
            fallback = self._waiting.pop(number).oldest_step
        members = group.members if fork is None else (*group.members, *fork.members)
        steps = [version.step for m in members if (version := m.oldest_version) is not None]
        finished = FinishedGroups(number, group, signal, min(steps, default=fallback), fork, fork_signal)
        if finished.is_trained:
            self._waiting[number] = finished
        else:
            self._next.dropped.append(finished)

    def is_waiting(self, number: int) -> bool:
        """Whether the group of this number waits to be trained on."""
        return number in self._waiting

    @property
    def is_empty(self) -> bool:
        """Whether nothing is under way and nothing waits."""
        return not self.under_way and not self._waiting

    @property
    def waits_for_oldest(self) -> bool:
        """Whether the next step must wait for a group under way that later steps would find too old."""
        if self._mask or not self.under_way:
            return False
        return next(iter(self.under_way.values())) + self._bound <= self.step

    @property
    def lacks_only_oldest(self) -> bool:
        """Whether the next step has enough groups and waits only for the oldest one."""
        return self._has_enough and self.waits_for_oldest

    @property
    def _has_enough(self) -> bool:
        if self._num_finished >= self._most_finished:
            return True
        if 2 * len(self._waiting) < self._wanted:  # called whenever a session ends: mostly this decides
            return False
        usable = (unit for unit in self._waiting.values() if self._mask or not self._is_too_old(unit))
        return sum(unit.num_task for unit in usable) >= self._wanted

    def is_ready(self, useful_each: float, more_tasks: bool = True) -> bool:
        """Whether the next step can be taken. `more_tasks`: whether there is a task for another group."""
        if self.waits_for_oldest:
            return False
        if self._has_enough:
            return True
        # Nothing is under way and nothing will begin, not even once the newest weights, which may still be
        # being published, are in service: the step is taken with fewer groups.
        return not self.under_way and not (more_tasks and self._num_may_begin(useful_each, self.step))

    def pop_step(self) -> StepGroups:
        """Removes and returns the groups of the next step, chosen oldest first, with those beyond
        `groups_per_step` that no later step could train. Advances `step`."""
        popped, self._next = self._next, StepGroups()
        waiting = sorted(self._waiting.values(), key=lambda unit: (unit.oldest_step, unit.number))
        num_task = 0
        for unit in waiting:
            if self._is_too_old(unit):
                num_task += unit.num_task if self._remove_too_old(unit, popped) else 0
            elif not unit.num_task or num_task < self._wanted or self._is_due(unit):
                num_task += unit.num_task
                popped.trained.append(unit)
                del self._waiting[unit.number]
        popped.trained.sort(key=lambda unit: (not unit.num_task, unit.number))
        for part in (popped.dropped, popped.stale):
            part.sort(key=lambda unit: unit.number)
        self.step += 1
        self._num_finished = 0
        return popped

    def _is_due(self, unit: FinishedGroups) -> bool:
        return unit.oldest_step + self._bound <= self.step

    def _is_too_old(self, unit: FinishedGroups) -> bool:
        return unit.oldest_step + self._bound < self.step

    def _remove_too_old(self, unit: FinishedGroups, popped: StepGroups) -> bool:
        """Removes a group that is past the bound: to be trained on with its old tokens masked, if that is
        allowed and leaves any, else as stale. Returns whether it is trained on."""
        del self._waiting[unit.number]
        if self._mask:
            masked = self._masked(unit)
            if num_left := masked.num_sampled_tokens:
                popped.masked_tokens += unit.num_sampled_tokens - num_left
                popped.trained.append(masked)
                return True
        popped.stale.append(unit)
        return False

    def _masked(self, unit: FinishedGroups) -> FinishedGroups:
        """The unit with every token that is too old turned into context."""
        oldest = self.step - self._bound
        fork = unit.fork and mask_stale(unit.fork, oldest)
        return replace(unit, group=mask_stale(unit.group, oldest), oldest_step=oldest, fork=fork)


def trained_groups(popped: StepGroups) -> tuple[Group, ...]:
    """Groups that a step trains on: first those whose verdicts differ, then those of equal verdicts."""
    groups = [pair for unit in popped.trained for pair in unit.groups]
    trained = [signal for signal in Signal if signal is not Signal.NONE]
    return tuple(g for wanted in trained for g, signal in groups if signal is wanted)


def dropped_groups(popped: StepGroups) -> tuple[Group, ...]:
    """Groups without a signal, including those whose fork, or whose forked group, has one."""
    partners = (group for unit in popped.trained for group, signal in unit.groups if signal is Signal.NONE)
    return (*all_groups(popped.dropped), *partners)


def all_groups(units: Sequence[FinishedGroups]) -> tuple[Group, ...]:
    """Task groups and fork groups in one sequence."""
    return tuple(group for unit in units for group, _ in unit.groups)
