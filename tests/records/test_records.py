import dataclasses
from typing import Any

import numpy as np
import pytest

from etude.records import (
    BlobRef,
    PolicyVersion,
    RewardBreakdown,
    SamplingParams,
    Status,
    TrajectoryId,
    VersionSpan,
)
from tests.store.builders import make_group, make_trajectory

SEGMENT = make_trajectory(num_tokens=40).segments[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1), ("min_p", 1.0), ("max_tokens", 0)],
)
def test_impossible_sampling_parameters_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"SamplingParams.{field}"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("change", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_truncated_sampling_says_so(change: dict[str, Any]) -> None:
    assert SamplingParams(**change).truncated
    assert not SamplingParams(temperature=0.7).truncated


@pytest.mark.parametrize("field", ["sampled", "logprobs"])
def test_arrays_of_a_segment_must_cover_its_tokens(field: str) -> None:
    with pytest.raises(ValueError, match=f"Segment.{field}: must have 40 entries"):
        dataclasses.replace(SEGMENT, **{field: getattr(SEGMENT, field)[:-1]})


def test_routes_must_cover_every_position() -> None:
    with pytest.raises(ValueError, match=r"Segment\.routes: must cover 40"):
        dataclasses.replace(SEGMENT, routes=BlobRef("memory:0", "", "uint8", (39, 3, 2)))


def test_every_sampled_token_carries_a_policy_version() -> None:
    with pytest.raises(ValueError, match=r"Segment\.version_spans"):
        dataclasses.replace(SEGMENT, version_spans=SEGMENT.version_spans[1:])
    unsampled = np.zeros(40, dtype=np.bool_)
    assert dataclasses.replace(SEGMENT, version_spans=(), sampled=unsampled).num_sampled_tokens == 0


def test_staleness_counts_from_the_oldest_version_of_any_token() -> None:
    first, second = SEGMENT.version_spans
    spans = (first, VersionSpan(second.start, second.end, PolicyVersion("run", 7)))
    segment = dataclasses.replace(SEGMENT, version_spans=spans)
    oldest = make_trajectory(segments=(segment,)).oldest_version
    assert oldest is not None
    assert oldest.step == 0
    assert make_trajectory(segments=(), turns=()).oldest_version is None


def test_a_policy_version_has_no_negative_step_and_sorts_by_step() -> None:
    with pytest.raises(ValueError, match="step"):
        PolicyVersion("run", -1)
    assert PolicyVersion("run", 2) < PolicyVersion("run", 10)
    assert str(PolicyVersion("run", 3, adapter="a")) == "run@3+a"


def test_a_reward_is_the_sum_of_its_parts() -> None:
    assert RewardBreakdown(1.0, {"malformed": -0.05, "limit": -0.1}).total == pytest.approx(0.85)


def test_trajectory_ids_are_hashable_ordered_and_readable() -> None:
    ids = {TrajectoryId("r", "t", 0, 1, index) for index in (2, 0, 1, 0)}
    assert [identity.index for identity in sorted(ids)] == [0, 1, 2]
    assert str(TrajectoryId("r", "t", 0, 1, 2)) == "r/t/e0/g1/2"


def test_a_group_is_complete_with_all_it_asked_for() -> None:
    group = make_group(size=4)
    assert group.complete
    assert not dataclasses.replace(group, expected=5).complete


def test_status_is_plain_text() -> None:
    assert str(Status.LIMIT) == "limit"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_is_finite_if_each_of_its_terms_is(value: float) -> None:
    assert RewardBreakdown(1.0, {"length": -0.5}).is_finite
    assert not RewardBreakdown(value).is_finite
    assert not RewardBreakdown(1.0, {"length": value, "tools": -value}).is_finite
