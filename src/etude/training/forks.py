"""Which tokens of a step's groups are trained on where some of them left a session in its middle.

    task group     prompt | A A A | B B B        forked session: A is trained here ...
    fork group     (prompt  A A A)| B B B        ... what came after the fork in the fork's group,
                   (prompt  A A A)| C C          beside its siblings; brackets: context only

So every sampled token is trained once: what the siblings share under the advantage among the task's
sessions, what they do not share under the advantage among the siblings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from etude.records import Group, Segment, Trajectory


def training_view(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The groups with the tokens of forked sessions masked that a fork's group among them trains.

    What is stored are the groups as they came. A session whose fork's group is not among them stays whole.
    """
    forked = {
        group.origin.segment_id: group.origin.offset
        for group in groups
        if group.kind == "fork" and group.origin is not None
    }
    if not forked:
        return tuple(groups)
    return tuple(
        group
        if group.kind == "fork"
        else replace(group, members=tuple(_until_fork(member, forked) for member in group.members))
        for group in groups
    )


def _until_fork(member: Trajectory, forked: Mapping[str, int]) -> Trajectory:
    """The session with everything after its fork as context."""
    first = next((n for n, segment in enumerate(member.segments) if segment.id in forked), None)
    if first is None:
        return member
    before, at, after = member.segments[:first], member.segments[first], member.segments[first + 1 :]
    masked = [_from(at, forked[at.id]), *(_from(segment, 0) for segment in after)]
    return replace(member, segments=(*before, *masked))


def _from(segment: Segment, offset: int) -> Segment:
    sampled = segment.sampled.copy()
    sampled[offset:] = False
    logprobs = np.where(sampled, segment.logprobs, np.float32(0.0)).astype(np.float32)
    return replace(segment, sampled=sampled, logprobs=logprobs)
