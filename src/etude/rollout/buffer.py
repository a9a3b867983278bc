"""The bounded buffer between rollouts and training: which groups may begin, wait, and are trained together.

    room ── begin ── (under way) ── put ── (waiting) ── take ── trained
                                      └─ without signal: dropped      └─ too old: stale

A group that begins while version v samples must be trained at step v + bound at the latest (step k makes
version k + 1 of version k). Each step takes `groups_per_step` groups, so as many may be open as the steps up
to there take: then the oldest can always be trained in time, by waiting for it if need be, and nothing is
sampled to be thrown away. While new weights are on their way into service fewer may be open. Groups of one
verdict take no place in a step, with or without a signal, so more may be open by the share that they had
lately.

A number's two groups, where one of its sessions was forked, are one unit: under way, waiting and taken
together.

A state machine without I/O or clock: its driver waits.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from etude.algorithms.signal import Signal
from etude.records import Group, Segment, Trajectory


def mask_stale(group: Group, min_step: int) -> Group:
    """The group with every token of a policy version before `min_step` turned into context.

    Tokens, log-probabilities and rewards stay as they are: only the loss mask changes. What is stored is the
    unmasked group.
    """
    return replace(group, members=tuple(_mask_trajectory(member, min_step) for member in group.members))


def _mask_trajectory(trajectory: Trajectory, min_step: int) -> Trajectory:
    return replace(trajectory, segments=tuple(_mask_segment(one, min_step) for one in trajectory.segments))


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
class Waiting:
    """What a number gave, whole and not trained on yet."""

    number: int
    group: Group
    """Of its task."""
    signal: Signal
    oldest_step: int
    """Step of the oldest policy version in it."""
    fork: Group | None = None
    """Of the fork of one of the group's sessions, if one was made."""
    fork_signal: Signal = Signal.NONE

    @property
    def groups(self) -> tuple[tuple[Group, Signal], ...]:
        """One or two, each with what its members differ in."""
        own = ((self.group, self.signal),)
        return own if self.fork is None else (*own, (self.fork, self.fork_signal))

    @property
    def num_task(self) -> int:
        """Groups of which verdicts differ: what a step counts."""
        return sum(signal is Signal.TASK for _, signal in self.groups)

    @property
    def num_sampled_tokens(self) -> int:
        """Of all sessions."""
        return sum(member.num_sampled_tokens for group, _ in self.groups for member in group.members)

    @property
    def is_trained(self) -> bool:
        """Whether there is anything to learn from it."""
        return any(signal is not Signal.NONE for _, signal in self.groups)


@dataclass(slots=True)
class Taken:
    """What one step gets, and what left the buffer besides since the last one; each in task order."""

    trained: list[Waiting] = field(default_factory=list[Waiting])
    """With a signal."""
    dropped: list[Waiting] = field(default_factory=list[Waiting])
    stale: list[Waiting] = field(default_factory=list[Waiting])
    """Older than the bound; none where tokens are masked instead, but for groups that are too old as a
    whole."""
    masked_tokens: int = 0


class GroupBuffer:
    """Groups under way and groups waiting, by number."""

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
        is trained next; its weights are in service. `num_steps`: where training ends. `most_finished`: after
        so many groups a step goes on with however few carry a signal. `mask`: what is too old is masked, and
        nobody waits for it."""
        self.step = first_step
        """The step that `take` is for next."""
        self.serving = first_step
        """Steps of the weights in service."""
        self.under_way: OrderedDict[int, int] = OrderedDict()
        """Number of a group that is being sampled -> `serving` when it began: the oldest first."""
        self._waiting: dict[int, Waiting] = {}
        self._next = Taken()
        self._bound = bound
        self._wanted = groups_per_step
        self._num_steps = num_steps
        self._most_finished = most_finished
        self._num_finished = 0
        """Groups that became whole since the last step."""
        self._mask = mask

    def room(self, useful_each: float) -> int:
        """How many more numbers may begin, where each is expected to give so many groups with a signal."""
        return self._room(useful_each, self.serving)

    def _room(self, useful_each: float, serving: int) -> int:
        """The same, where the weights after `serving` steps are in service."""
        steps = min(self._bound + 1 - (self.step - serving), self._num_steps - self.step)
        places = math.ceil(max(0, steps) * self._wanted / useful_each)
        return max(0, places - len(self.under_way) - sum(one.num_task > 0 for one in self._waiting.values()))

    def begin(self, number: int) -> None:
        """A group is sampled from now on."""
        self.under_way[number] = self.serving

    def put(
        self,
        number: int,
        group: Group,
        signal: Signal,
        fork: Group | None = None,
        fork_signal: Signal = Signal.NONE,
    ) -> None:
        """A group is whole, and the one of its fork. What was put before is replaced: a late member has
        joined it."""
        began = self.under_way.pop(number, None)
        if began is not None:
            self._num_finished += 1 if fork is None else 2
            fallback = began
        else:
            fallback = self._waiting[number].oldest_step
        oldest = oldest_step(_joined(group, fork), fallback)
        waiting = Waiting(number, group, signal, oldest, fork, fork_signal)
        if not waiting.is_trained:
            self._waiting.pop(number, None)
            self._next.dropped.append(waiting)
        else:
            self._waiting[number] = waiting

    def holds(self, number: int) -> bool:
        """Whether a group waits to be trained on."""
        return number in self._waiting

    @property
    def is_empty(self) -> bool:
        """Whether nothing is under way and nothing waits."""
        return not self.under_way and not self._waiting

    @property
    def waits_for_oldest(self) -> bool:
        """Whether the next step must wait for a group under way, which a later step could not train."""
        if self._mask or not self.under_way:
            return False
        return next(iter(self.under_way.values())) + self._bound <= self.step

    @property
    def lacks_only_oldest(self) -> bool:
        """Whether the next step has enough groups, and waits all the same."""
        return self._has_enough and self.waits_for_oldest

    @property
    def _has_enough(self) -> bool:
        if self._num_finished >= self._most_finished:
            return True
        if 2 * len(self._waiting) < self._wanted:  # asked for whenever a session ends: mostly this is all
            return False
        usable = (one for one in self._waiting.values() if self._mask or not self._too_old(one))
        return sum(one.num_task for one in usable) >= self._wanted

    def is_ready(self, useful_each: float, more_tasks: bool = True) -> bool:
        """Whether the next step has its groups. `more_tasks`: whether there is a task for another group."""
        if self.waits_for_oldest:
            return False
        if self._has_enough:
            return True
        # Nothing is under way and nothing will begin, not even when the newest weights are in service, which
        # may still be on their way: the step goes on with what there is.
        return not self.under_way and not (more_tasks and self._room(useful_each, self.step))

    def take(self) -> Taken:
        """The groups of the next step, the oldest first; those beyond `groups_per_step` that no later step
        could train come with them."""
        taken, self._next = self._next, Taken()
        waiting = sorted(self._waiting.values(), key=lambda one: (one.oldest_step, one.number))
        num_task = 0
        for one in waiting:
            if self._too_old(one):
                num_task += one.num_task if self._pass_bound(one, taken) else 0
            elif not one.num_task or num_task < self._wanted or self._is_due(one):
                num_task += one.num_task
                taken.trained.append(one)
                del self._waiting[one.number]
        taken.trained.sort(key=lambda one: (not one.num_task, one.number))
        for part in (taken.dropped, taken.stale):
            part.sort(key=lambda one: one.number)
        self.step += 1
        self._num_finished = 0
        return taken

    def _is_due(self, one: Waiting) -> bool:
        return one.oldest_step + self._bound <= self.step

    def _too_old(self, one: Waiting) -> bool:
        return one.oldest_step + self._bound < self.step

    def _pass_bound(self, one: Waiting, taken: Taken) -> bool:
        """Takes out a group that is past the bound: masked as far as it is, or given up. Whether it is
        trained on."""
        del self._waiting[one.number]
        if self._mask:
            young = self._masked(one)
            if left := young.num_sampled_tokens:
                taken.masked_tokens += one.num_sampled_tokens - left
                taken.trained.append(young)
                return True
        taken.stale.append(one)
        return False

    def _masked(self, one: Waiting) -> Waiting:
        """With every token that is too old as context."""
        oldest = self.step - self._bound
        fork = one.fork and mask_stale(one.fork, oldest)
        return replace(one, group=mask_stale(one.group, oldest), oldest_step=oldest, fork=fork)


def oldest_step(group: Group, otherwise: int) -> int:
    """Step of the oldest policy version that sampled a token in any member; `otherwise` if none did."""
    versions = [version.step for m in group.members if (version := m.oldest_version) is not None]
    return min(versions, default=otherwise)


def trained_groups(taken: Taken) -> tuple[Group, ...]:
    """What a step trains on: first the groups whose verdicts differ, then those of one verdict."""
    groups = [pair for one in taken.trained for pair in one.groups]
    trained = [signal for signal in Signal if signal is not Signal.NONE]
    return tuple(g for wanted in trained for g, signal in groups if signal is wanted)


def dropped_groups(taken: Taken) -> tuple[Group, ...]:
    """Groups without a signal, those beside one that has some included."""
    beside = (group for one in taken.trained for group, signal in one.groups if signal is Signal.NONE)
    return (*groups_of(taken.dropped), *beside)


def groups_of(waiting: Sequence[Waiting]) -> tuple[Group, ...]:
    """All of the groups."""
    return tuple(group for one in waiting for group, _ in one.groups)


def _joined(group: Group, fork: Group | None) -> Group:
    """All sessions of both, where ages are asked for."""
    return group if fork is None else replace(group, members=(*group.members, *fork.members))
