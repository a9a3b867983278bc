"""Groups that a run had collected before it was resumed, and not trained on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from etude.records import Group
from etude.rollout.curriculum import CollectorState
from etude.store.trajectories import TrajectoryLog


@dataclass(slots=True)
class Kept:
    """What is stored of one number."""

    task: Group
    fork: Group | None = None
    """Of one of the task group's sessions."""


def read_kept(log: TrajectoryLog, state: CollectorState, min_step: int) -> dict[int, Kept]:
    """What is stored, by number, that `state` says is neither trained on nor dropped.

    Groups are stored in the order in which they became whole: where all of a part was sampled by versions
    before `min_step`, what came earlier is too old to be trained on, and not read. A group whose members were
    stored one after the other comes whole; a fork's comes with its task's, beside which it was stored. Raises
    StoreError on damage.
    """
    pending = set(state.pending)
    tasks: dict[int, Group] = {}
    forks: dict[int, Group] = {}
    for name in reversed(log.part_names()):
        groups = [group for group in log.read_part(name) if group.members]
        steps = [step for group in groups for step in _steps(group)]
        if steps and max(steps) < min_step:  # where nothing was sampled no age is reported
            break
        for group in groups:
            number = group.members[0].id.group
            if number in pending or number >= state.next_task:
                kept = forks if group.kind == "fork" else tasks
                later = kept[number].members if number in kept else ()
                members = sorted((*group.members, *later), key=lambda member: member.id.index)
                kept[number] = replace(group, members=tuple(members))
    return {number: Kept(group, forks.get(number)) for number, group in tasks.items()}


def _steps(group: Group) -> list[int]:
    """Of all policy versions that sampled it."""
    spans = (span for m in group.members for segment in m.segments for span in segment.version_spans)
    return [span.version.step for span in spans]
