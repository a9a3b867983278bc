"""Training on a durable queue: trajectories in the order of their storage, each prompt once.

    log part 0 | part 1 | part 2 ...      written by any process, at any time
               ^ cursor: part and group, prompts trained so far
               next_groups(n): the next n groups with a signal -> step -> checkpoint that includes the cursor

Recorded sessions arrive one by one: a member of a group waits for the others with its group's id.

The cursor is saved with the weights, in one atomic checkpoint. So a process that is killed resumes at the
position of its weights: no group is trained on twice, and none is left out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import xxhash

from etude.algorithms.signal import Signal, is_surplus, signal_of
from etude.config import RlConfig
from etude.errors import CheckpointError
from etude.records import Group
from etude.store.trajectories import TrajectoryLog

_POLL_S = 0.2


class PassedOver(StrEnum):
    """Why a group of the log was skipped. Metrics count them as `passed_<reason>`."""

    VERSION = "version"
    """Its oldest policy version is outside the bounds, or it has none."""
    REPEATED = "repeated"
    """Its prompt was trained on already."""
    NO_SIGNAL = "no_signal"
    """It has no learning signal: the run that recorded it dropped it, too."""
    SURPLUS = "surplus"
    """The run that recorded it already had all groups of its step."""


class RecordedStream:
    """The groups of a trajectory log that are to be trained on, in the order of their storage.

    Deterministic: a function of the log, the configuration and the cursor. Single consumer.
    """

    def __init__(self, log: TrajectoryLog, config: RlConfig, state: Mapping[str, Any] | None = None) -> None:
        """`state`: a `state_dict` to resume from. Raises CheckpointError if it is invalid."""
        self._log = log
        self._config = config
        self.passed: Counter[str] = Counter()
        """Groups skipped so far, by reason."""
        self.num_taken = 0
        """Groups returned so far."""
        self._part = ""
        self._group = 0
        self._prompts: set[str] = set()
        self._loaded: tuple[str, list[Group]] = ("", [])
        self._incomplete: dict[str, list[tuple[str, int, Group]]] = {}
        """Incomplete groups by tenant and id: the members so far, each with its part and index there."""
        self._quiet_since_s: float | None = None
        """Time, by the monotonic clock, since when no new group has been found in the log."""
        if state is not None:
            self._restore(state)

    def next_groups(self, num_groups: int, stop: Callable[[], bool] = lambda: False) -> list[Group]:
        """The groups of the next step: `num_groups` whose verdicts differ, fewer only at the log's end, and
        the groups with equal verdicts before the next such group.

        At the log's end it waits until nothing has been added for `rl.stream.wait_s`; incomplete groups are
        then returned as they are. If `stop` returns True while it waits, the cursor is reset and nothing is
        returned. Raises StoreError, naming the part, on damage.
        """
        chosen: list[Group] = []
        before = self.state_dict()
        num_task = 0
        while True:
            mark = self._part, self._group, dict(self._incomplete)
            group = self._next_group()
            if mark[:2] != (self._part, self._group):
                self._quiet_since_s = None
            if group is None:
                if num_task == num_groups:
                    break
                now_s = time.monotonic()  # after reading, which also takes time
                self._quiet_since_s = now_s if self._quiet_since_s is None else self._quiet_since_s
                if now_s < self._quiet_since_s + self._config.stream.wait_s:
                    if stop():
                        self._restore(before)
                        return []
                    time.sleep(_POLL_S)
                    continue
                if not self._incomplete:
                    break
                group = _merge_groups(self._incomplete.pop(next(iter(self._incomplete))))
            reason = self._skip_reason(group)
            if reason is not None:
                self.passed[reason] += 1
                continue
            if signal_of(group, self._config) is Signal.TASK:
                if num_task == num_groups:
                    self._part, self._group, self._incomplete = mark
                    break
                num_task += 1
            self._prompts.add(prompt_digest(group))
            self.num_taken += 1
            chosen.append(group)
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """The cursor as plain values, to be saved with the weights trained so far."""
        return {
            "part": self._part,
            "group": self._group,
            "waiting": [[part, place] for members in self._incomplete.values() for part, place, _ in members],
            "prompts": sorted(self._prompts),
            "passed": {str(reason): count for reason, count in self.passed.items()},
            "num_taken": self.num_taken,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        try:
            self._part, self._group = str(state["part"]), int(state["group"])
            self._prompts = set(state["prompts"])
            self.passed = Counter(state["passed"])
            self.num_taken = int(state["num_taken"])
            waiting = [(str(part), int(place)) for part, place in state.get("waiting", [])]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"has no cursor: {error!r}", field="stream") from error
        if self._part and self._part not in self._log.part_names():
            raise CheckpointError(
                "the log lacks the part that the run had reached",
                field="rl.stream.source",
                received=self._part,
                fix="resume with the log that the run started with",
            )
        self._incomplete = {}
        for part, place in waiting:
            group = self._log.read_part(part)[place]
            self._incomplete.setdefault(_group_key(group), []).append((part, place, group))

    def _next_group(self) -> Group | None:
        """The group at the cursor, which advances; None at the log's end. Members that were stored one by one
        are returned as a group when the last one is read."""
        while True:
            groups = self._groups_of(self._part) if self._part else []
            if self._group < len(groups):
                group = groups[self._group]
                self._group += 1
                if len(group.members) != 1 or group.expected == 1:
                    return group
                members = [*self._incomplete.pop(_group_key(group), []), (self._part, self._group - 1, group)]
                if len(members) == group.expected:
                    return _merge_groups(members)
                self._incomplete[_group_key(group)] = members
                continue
            following = [name for name in self._log.part_names() if name > self._part]
            if not following:
                return None
            self._part, self._group = following[0], 0

    def _groups_of(self, part: str) -> list[Group]:
        if self._loaded[0] != part:
            self._loaded = (part, self._log.read_part(part))
        return self._loaded[1]

    def _skip_reason(self, group: Group) -> PassedOver | None:
        """Why the group is skipped; None if it is trained on."""
        stream = self._config.stream
        steps = [version.step for m in group.members if (version := m.oldest_version) is not None]
        newest = float("inf") if stream.max_step is None else stream.max_step
        if not steps or not stream.min_step <= min(steps) <= newest:
            return PassedOver.VERSION
        if signal_of(group, self._config) is Signal.NONE:
            return PassedOver.NO_SIGNAL
        if is_surplus(group):
            return PassedOver.SURPLUS
        if not stream.repeat_prompts and prompt_digest(group) in self._prompts:
            return PassedOver.REPEATED
        return None


def _group_key(group: Group) -> str:
    """Key of the group to which a separately stored member belongs; ids are unique only within a tenant."""
    return f"{group.members[0].tenant}\n{group.id}"


def _merge_groups(stored: Sequence[tuple[str, int, Group]]) -> Group:
    """Merges groups of one id, each with its part and index there, into one with its members in order."""
    members = sorted((m for _, _, group in stored for m in group.members), key=lambda member: member.id.index)
    return replace(stored[0][2], members=tuple(members))


def prompt_digest(group: Group) -> str:
    """xxh3-128 hex digest of the members' common prompt: the tokens before the first sampled one, and for a
    fork the state that it started from."""
    digest = xxhash.xxh3_128()
    for member in group.members:
        if member.segments:
            first = member.segments[0]
            end = int(first.sampled.argmax()) if first.sampled.any() else len(first.tokens)
            digest.update(first.tokens[:end].tobytes())
            break
    if group.origin is not None:
        digest.update(f"{group.origin.segment_id}@{group.origin.offset}".encode())
    return digest.hexdigest()
