from dataclasses import replace

import numpy as np

from etude.records import Group, PolicyVersion, VersionSpan
from etude.rollout.buffer import mask_stale
from tests.store.builders import make_trajectory


def two_versions():
    """A trajectory whose second message is of step 3, the first of step 1."""
    trajectory = make_trajectory(step=1)
    (segment,) = trajectory.segments
    first, second = segment.version_spans
    spans = (first, VersionSpan(second.start, second.end, PolicyVersion("run", 3, "d" * 64)))
    return replace(trajectory, segments=(replace(segment, version_spans=spans),))


def test_tokens_of_old_versions_become_context_and_the_rest_stays() -> None:
    trajectory = two_versions()
    (before,) = trajectory.segments
    masked = mask_stale(Group("g", "task", 1, (trajectory,)), min_step=2)
    (after,) = masked.members[0].segments
    old = before.version_spans[0]
    assert before.sampled[old.start : old.end].all()
    assert not after.sampled[old.start : old.end].any()
    assert np.array_equal(after.sampled[old.end :], before.sampled[old.end :])
    assert np.array_equal(after.tokens, before.tokens)
    assert np.array_equal(after.logprobs[after.sampled], before.logprobs[after.sampled])
    assert [span.version.step for span in after.version_spans] == [3]
    assert trajectory.segments[0].sampled[old.start], "what is stored is not changed"


def test_a_group_that_is_young_enough_stays_as_it_is() -> None:
    group = Group("g", "task", 1, (two_versions(),))
    masked = mask_stale(group, min_step=1)
    assert masked.members[0].segments[0] is group.members[0].segments[0]
