"""Groups in the trajectory log that a resumed run has not trained on yet."""

from __future__ import annotations

from dataclasses import dataclass, replace

from etude.records import Group
from etude.rollout.curriculum import CollectorState
from etude.store.trajectories import TrajectoryLog


@dataclass(slots=True)
class StoredGroups:
    """The stored groups of one task number."""

    task: Group
    fork: Group | None = None
    """Group of the siblings of a forked session."""


def read_stored_groups(log: TrajectoryLog, state: CollectorState, min_step: int) -> dict[int, StoredGroups]:
    """Stored groups by task number, of the numbers that `state` has as neither trained on nor dropped.

    Groups are stored in the order in which they finished: once all of a part was sampled by versions before
    `min_step`, earlier parts are too old to be trained on and are not read. Members of one group that were
    stored one by one are joined; a fork's group is returned with its task's, in whose part it is stored.
    Raises StoreError on damage.
    """
    pending = set(state.pending)
    tasks: dict[int, Group] = {}
    forks: dict[int, Group] = {}
    for name in reversed(log.part_names()):
        groups = [group for group in log.read_part(name) if group.members]
        steps = [step for group in groups for step in _steps(group)]
        if steps and max(steps) < min_step:  # a part without sampled tokens has no age
            break
        for group in groups:
            number = group.members[0].id.group
            if number in pending or number >= state.next_task:
                found = forks if group.kind == "fork" else tasks
                later = found[number].members if number in found else ()
                members = sorted((*group.members, *later), key=lambda member: member.id.index)
                found[number] = replace(group, members=tuple(members))
    return {number: StoredGroups(group, forks.get(number)) for number, group in tasks.items()}


def _steps(group: Group) -> list[int]:
    """Steps of all policy versions that sampled the group."""
    spans = (span for m in group.members for segment in m.segments for span in segment.version_spans)
    return [span.version.step for span in spans]
