"""Training on a durable queue: trajectories in the order of their storage, each prompt once.

    log part 0 | part 1 | part 2 ...      written by any process, at any time
               ^ cursor: part and group, prompts trained so far
               take(n): the next n groups that pass -> step -> checkpoint with the cursor in it

Recorded sessions come one by one: a member of a group waits for the others that have its group's id.

The cursor is saved with the weights, in one atomic checkpoint. So a process that is killed goes on from where
its weights are: what they were trained on is never given again, and what they were not is never left out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, Protocol

import xxhash

from etude.algorithms.signal import Signal, is_surplus, signal_of
from etude.config import RlConfig
from etude.errors import CheckpointError
from etude.records import Group

_POLL_S = 0.2


class PartLog(Protocol):
    """What a stream reads: parts that never change, new ones behind the old. TrajectoryLog is one."""

    def part_names(self) -> list[str]:
        """Names of the parts there are now, in order."""
        ...

    def read_part(self, name: str) -> list[Group]:
        """The groups of one part. Raises StoreError on damage."""
        ...


class Passed(StrEnum):
    """Why a group of the log was passed over. Metrics count them as `passed_<reason>`."""

    VERSION = "version"
    """Its oldest policy version is outside the bounds, or it has none."""
    REPEATED = "repeated"
    """Its prompt was trained on already."""
    NO_SIGNAL = "no_signal"
    """It teaches nothing: the run that recorded it dropped it, too."""
    SURPLUS = "surplus"
    """The run that recorded it had as many as its step wanted."""


class RecordedStream:
    """The groups of a trajectory log that are to be trained on, in the order of their storage.

    Deterministic: a function of the log, the configuration and the cursor. One consumer.
    """

    def __init__(self, log: PartLog, config: RlConfig, state: Mapping[str, Any] | None = None) -> None:
        """`state`: what `state_dict` gave, to go on from there. Raises CheckpointError if it is none."""
        self._log = log
        self._config = config
        self.passed: Counter[str] = Counter()
        """Groups passed over so far, by reason."""
        self.num_taken = 0
        """Groups given out so far."""
        self._part = ""
        self._group = 0
        self._prompts: set[str] = set()
        self._loaded: tuple[str, list[Group]] = ("", [])
        self._waiting: dict[str, list[tuple[str, int, Group]]] = {}
        """By tenant and group: its members so far, each with its part and place there."""
        self._quiet_since_s: float | None = None
        """Since when the log has been seen to end where it does; monotonic."""
        if state is not None:
            self._restore(state)

    def take(self, num_groups: int, stop: Callable[[], bool] = lambda: False) -> list[Group]:
        """The next groups, as a step of a run has them: `num_groups` whose verdicts differ, fewer only at the
        log's end, and those of one verdict that lie before the next such group.

        There it waits until nothing has been added for `rl.stream.wait_s`; groups of which members are
        missing then come as they are. If `stop` holds while it waits, nothing is taken: what was found comes
        again. Raises StoreError, naming the part, on damage.
        """
        taken: list[Group] = []
        before = self.state_dict()
        num_task = 0
        while True:
            mark = self._part, self._group, dict(self._waiting)
            group = self._next()
            if mark[:2] != (self._part, self._group):
                self._quiet_since_s = None
            if group is None:
                if num_task == num_groups:
                    break
                now_s = time.monotonic()  # what was read up to here took time, too
                self._quiet_since_s = now_s if self._quiet_since_s is None else self._quiet_since_s
                if now_s < self._quiet_since_s + self._config.stream.wait_s:
                    if stop():
                        self._restore(before)
                        return []
                    time.sleep(_POLL_S)
                    continue
                if not self._waiting:
                    break
                group = _joined([one for _, _, one in self._waiting.pop(next(iter(self._waiting)))])
            reason = self._reason(group)
            if reason is not None:
                self.passed[reason] += 1
                continue
            if signal_of(group, self._config) is Signal.TASK:
                if num_task == num_groups:
                    self._part, self._group, self._waiting = mark
                    break
                num_task += 1
            self._prompts.add(prompt_digest(group))
            self.num_taken += 1
            taken.append(group)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, as plain values: to be saved with the weights that were trained so far."""
        return {
            "part": self._part,
            "group": self._group,
            "waiting": [[part, place] for held in self._waiting.values() for part, place, _ in held],
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
                "the log does not hold the part that the run had come to",
                field="rl.stream.source",
                received=self._part,
                fix="resume with the log that the run began with",
            )
        self._waiting = {}
        for part, place in waiting:
            group = self._log.read_part(part)[place]
            self._waiting.setdefault(_joint(group), []).append((part, place, group))

    def _next(self) -> Group | None:
        """The group at the cursor, which moves on; None at the log's end. Members that were stored alone come
        with the last one of their group."""
        while True:
            groups = self._groups_of(self._part) if self._part else []
            if self._group < len(groups):
                group = groups[self._group]
                self._group += 1
                if len(group.members) != 1 or group.expected == 1:
                    return group
                held = [*self._waiting.pop(_joint(group), []), (self._part, self._group - 1, group)]
                if len(held) == group.expected:
                    return _joined([one for _, _, one in held])
                self._waiting[_joint(group)] = held
                continue
            following = [name for name in self._log.part_names() if name > self._part]
            if not following:
                return None
            self._part, self._group = following[0], 0

    def _groups_of(self, part: str) -> list[Group]:
        if self._loaded[0] != part:
            self._loaded = (part, self._log.read_part(part))
        return self._loaded[1]

    def _reason(self, group: Group) -> Passed | None:
        """Why the group is not trained on; None if it is."""
        stream = self._config.stream
        steps = [version.step for m in group.members if (version := m.oldest_version) is not None]
        newest = float("inf") if stream.max_step is None else stream.max_step
        if not steps or not stream.min_step <= min(steps) <= newest:
            return Passed.VERSION
        if signal_of(group, self._config) is Signal.NONE:
            return Passed.NO_SIGNAL
        if is_surplus(group):
            return Passed.SURPLUS
        if not stream.repeat_prompts and prompt_digest(group) in self._prompts:
            return Passed.REPEATED
        return None


def _joint(group: Group) -> str:
    """What the members of one group have in common that were stored alone: tenants choose ids freely."""
    return f"{group.members[0].tenant}\n{group.id}"


def _joined(groups: Sequence[Group]) -> Group:
    """Groups of one id as one, its members in order."""
    members = sorted((member for group in groups for member in group.members), key=lambda one: one.id.index)
    return replace(groups[0], members=tuple(members))


def prompt_digest(group: Group) -> str:
    """xxh3-128 hex digest of what the group's members have in common: the tokens before the first sampled
    one, and for a fork the state that it came from."""
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
