"""Leaving tokens that are too old out of the loss, while the rest of their trajectory is trained on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

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
