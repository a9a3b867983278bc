"""Bad input: refused before anything changes, or skipped with a counted reason."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from etude.errors import ConfigError
from etude.records import Group, PolicyVersion, RewardBreakdown, Status, ToolCall, Turn, VersionSpan
from etude.training.batches import UNKNOWN_LAG, TrainingGroup
from etude.training.intake import ModelLimits, Skipped, prepare_groups
from tests.model.builders import VOCAB, random_tokens, small_model
from tests.training.builders import Rollouts, as_group, rl_config, trainer_of
from tests.training.test_rl import assert_equal_gradients, assert_same_weights, gradients_of_step

LENGTH = 20


def _intake(
    rollouts: Rollouts, groups: list[Group], version: int = 0, **changes: Any
) -> tuple[list[TrainingGroup], Counter[Skipped]]:
    limits = ModelLimits.of(small_model(0))
    config = rl_config(**changes)
    return prepare_groups(groups, config, limits, PolicyVersion("run", version), rollouts.blobs.get)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["task", "terms"])
def test_a_reward_that_is_no_number_leaves_everything_else_as_it_was(bad: float, place: str) -> None:
    rollouts = Rollouts(small_model(0))
    members = rollouts.group([1.0, 0.0, 0.0]).members
    reward = RewardBreakdown(bad) if place == "task" else RewardBreakdown(1.0, {"malformed": bad})
    damaged = as_group([*members, rollouts.member(reward)])
    trainer = trainer_of(rl_config(), rollouts)
    ours = gradients_of_step(trainer, [damaged])
    assert_equal_gradients(ours, gradients_of_step(trainer_of(rl_config(), rollouts), [as_group(members)]))
    _, skipped = _intake(rollouts, [damaged])
    assert skipped == {Skipped.REWARD: 1}


def test_every_reason_is_counted_and_reported() -> None:
    rollouts = Rollouts(small_model(0, max_positions=256))
    no_logprobs = np.full(LENGTH, math.nan, dtype=np.float32)
    groups = [
        Group("empty", "task", 8, ()),
        as_group([rollouts.member(None, status=Status.INFRASTRUCTURE), rollouts.member(None)]),
        rollouts.group([1.0, 1.0]),
        as_group(
            [rollouts.member(1.0), rollouts.member(0.0, 129), rollouts.member(0.0, logprobs=no_logprobs)]
        ),
    ]
    trainer = trainer_of(rl_config(), rollouts)
    metrics = trainer.step(groups)
    counted = {key: value for key, value in metrics.items() if key.startswith("skipped_")}
    assert counted == {
        "skipped_updates": 0,
        "skipped_empty_group": 2,
        "skipped_infrastructure": 1,
        "skipped_ungraded": 1,
        "skipped_no_variance": 1,
        "skipped_too_long": 1,
        "skipped_logprobs": 1,
    }
    assert trainer.version.step == 1


def test_what_is_skipped_for_its_tokens_stays_in_the_baseline() -> None:
    rollouts = Rollouts(small_model(0, max_positions=256))
    group = as_group([rollouts.member(1.0), rollouts.member(0.0, 129), rollouts.member(0.0)])
    ((taken,), _) = _intake(rollouts, [group])
    assert [len(chain) for chain in taken.chains] == [1, 0, 1]
    assert taken.chains[0][0].advantages == pytest.approx(2 / 3)


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, 0.5])
def test_logprobs_count_as_missing_where_they_are_no_logarithms(value: float) -> None:
    rollouts = Rollouts(small_model(0))
    logprobs = np.full(LENGTH, -1.0, dtype=np.float32)
    logprobs[-1] = value
    group = as_group([rollouts.member(1.0), rollouts.member(0.0, logprobs=logprobs)])
    assert _intake(rollouts, [group])[1] == {Skipped.LOGPROBS: 1}
    logprobs[-1], logprobs[0] = -1.0, math.nan
    assert not _intake(rollouts, [group])[1], "where nothing was sampled there is nothing to miss"


@pytest.mark.parametrize("token", [-1, VOCAB, 2**30])
def test_another_vocabulary_is_refused_before_anything_changes(token: int) -> None:
    rollouts = Rollouts(small_model(0))
    tokens = random_tokens(LENGTH)
    member = rollouts.member(0.0)
    tokens[2] = token
    damaged = replace(member, segments=(replace(member.segments[0], tokens=tokens),))
    trainer = trainer_of(rl_config(), rollouts)
    with pytest.raises(ConfigError, match="another tokenizer") as caught:
        trainer.step([rollouts.group([1.0, 0.0]), as_group([rollouts.member(1.0), damaged])])
    assert caught.value.field == "tokens"
    assert trainer.version.step == 0
    assert_same_weights(trainer.model, small_model(0))


def test_a_chain_counts_once_in_the_baseline_and_its_segments_share_its_advantage() -> None:
    rollouts = Rollouts(small_model(0))
    first, second, third = (rollouts.member(reward) for reward in (1.0, 0.0, 0.0))
    chain = replace(first, segments=(*first.segments, rollouts.segment(18), rollouts.segment(15)))
    ((taken,), _) = _intake(rollouts, [as_group([chain, second, third])])
    assert [[float(s.advantages[-1]) for s in segments] for segments in taken.chains] == [
        pytest.approx([2 / 3] * 3),
        pytest.approx([-1 / 3]),
        pytest.approx([-1 / 3]),
    ]


def test_of_a_group_that_failed_only_malformed_calls_are_trained_on_and_only_their_members() -> None:
    rollouts = Rollouts(small_model(0))
    odd, fine = rollouts.member(0.0), rollouts.member(0.0)
    call = ToolCall("x", error="odd")
    odd = replace(odd, turns=(Turn(odd.segments[0].id, 5, 10, "", (call,), (), ((7, 12),)),))
    taken, skipped = _intake(rollouts, [as_group([fine, odd])])
    ((chain,),) = (group.chains for group in taken)
    assert np.flatnonzero(chain[0].sampled).tolist() == [7, 8, 9], "10 and 11 are the tool's"
    assert chain[0].advantages[chain[0].sampled] == pytest.approx(-0.05)
    mixed = _intake(rollouts, [as_group([rollouts.member(1.0), odd])])[0][0]
    (seen,) = mixed.chains[1]
    assert seen.advantages[[6, 7, 12]] == pytest.approx([-0.5, -0.55, -0.5])
    assert not skipped


def test_lags_count_trainer_steps_within_the_lineage() -> None:
    rollouts = Rollouts(small_model(0))
    spans = (
        VersionSpan(0, 8, PolicyVersion("run", 2)),
        VersionSpan(8, 14, PolicyVersion("run", 5)),
        VersionSpan(14, 17, PolicyVersion("other", 5)),
        VersionSpan(17, LENGTH, PolicyVersion("run", 9)),
    )
    group = as_group([rollouts.member(1.0, version_spans=spans), rollouts.member(0.0)])
    lags = _intake(rollouts, [group], version=5)[0][0].chains[0][0].lags
    assert lags is not None
    assert lags.tolist() == [3] * 8 + [0] * 6 + [UNKNOWN_LAG] * 6
