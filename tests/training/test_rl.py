"""The RL step: the gradient of the formula, on exactly the tokens that were sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.algorithms.divergence import k3
from etude.config import RlConfig
from etude.errors import ConfigError
from etude.model import LanguageModel
from etude.model.scoring import PackedSequences, packed_logprobs, score_sequences
from etude.records import (
    UNKNOWN_FORMAT,
    Group,
    PolicyVersion,
    RewardBreakdown,
    SamplingParams,
    Status,
    Trajectory,
    VersionSpan,
)
from etude.training import RlTrainer
from etude.weights import MemoryWeights
from tests.model.builders import small_model
from tests.training.builders import Rollouts, as_group, rl_config, trainer_of

FOREIGN = PolicyVersion("endpoint:other", 0, format=UNKNOWN_FORMAT)

Gradients = dict[str, Tensor]


def gradients_of_step(trainer: RlTrainer, groups: Sequence[Group]) -> Gradients:
    """What one step's backward passes leave, before clipping."""
    caught: Gradients = {}

    def catch(name: str) -> Callable[[Tensor], None]:
        def keep(parameter: Tensor) -> None:
            assert parameter.grad is not None
            caught[name] = parameter.grad.clone()

        return keep

    handles = [
        parameter.register_post_accumulate_grad_hook(catch(name))
        for name, parameter in trainer.model.named_parameters()
    ]
    trainer.step(groups)
    for handle in handles:
        handle.remove()
    return caught


def assert_equal_gradients(ours: Gradients, theirs: Gradients) -> None:
    assert ours.keys() == theirs.keys()
    scale = max(float(gradient.abs().max()) for gradient in theirs.values())
    assert scale > 1e-3, "a test of nothing"
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5 * scale, msg=name)


def written_out(
    model: LanguageModel, rollouts: Rollouts, members: Sequence[Trajectory], config: RlConfig
) -> Any:
    """The loss of one group, sequence by sequence, token by token."""
    rewards = [member.reward.total for member in members if member.reward is not None]
    mean = sum(rewards) / len(rewards)
    reference = small_model(5)
    num_tokens = sum(member.num_sampled_tokens for member in members)
    total = torch.zeros(())
    for member, reward in zip(members, rewards, strict=True):
        (segment,) = member.segments
        assert segment.routes is not None
        batch = PackedSequences.pack([segment.tokens])
        routes = torch.from_numpy(rollouts.blobs.get(segment.routes).copy())
        targets = torch.from_numpy(segment.sampled.nonzero()[0])
        new, _ = packed_logprobs(model, batch, targets, routes=routes)
        with torch.no_grad():
            anchor, _ = packed_logprobs(reference, batch, targets)  # its own router chooses
        old = torch.from_numpy(segment.logprobs)[targets]
        ratio = (new.detach() - old).exp()
        weight = ratio.clamp(max=config.loss.cispo_cap)
        loss = -weight * (reward - mean) * new + config.loss.kl_weight * ratio * k3(new, anchor)
        if config.loss.normalizer == "tokens":
            total = total + loss.sum() / num_tokens
        elif config.loss.normalizer == "sequences":
            total = total + loss.mean() / len(members)
        else:
            total = total + loss.sum() / (len(members) * config.loss.constant_tokens)
    return total


@pytest.mark.parametrize("normalizer", ["tokens", "sequences", "group_constant"])
@pytest.mark.parametrize("kl_weight", [0.0, 0.5])
def test_the_gradient_is_that_of_the_loss_written_out(normalizer: str, kl_weight: float) -> None:
    """Rollouts of another policy, so that ratios and divergences are not trivial."""
    rollouts = Rollouts(small_model(9))
    config = rl_config({"normalizer": normalizer, "kl_weight": kl_weight, "constant_tokens": 9})
    group = rollouts.group([1.0, 0.0, 0.0, 1.0, 0.25])
    trainer = trainer_of(config, rollouts, 5)
    if kl_weight:
        with torch.no_grad():
            trainer.model.load_state_dict(small_model(6).state_dict())
    model = small_model(6 if kl_weight else 5)
    written_out(model, rollouts, group.members, config).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_equal_gradients(gradients_of_step(trainer, [group]), expected)


@pytest.mark.parametrize("kind", ["cispo", "clip"])
def test_micro_batches_of_any_size_give_the_same_gradient(kind: str) -> None:
    rollouts = Rollouts(small_model(9))
    groups = [rollouts.group([1.0, 0.0, 1.0, 0.0]), rollouts.group([1.0, 0.0], [33, 18])]
    whole, single, few = (
        gradients_of_step(trainer_of(rl_config({"kind": kind}, micro_batch_tokens=tokens), rollouts), groups)
        for tokens in (10_000, 1, 45)
    )
    assert_equal_gradients(single, whole)
    assert_equal_gradients(few, whole)


def test_micro_batches_do_not_multiply_the_balance_loss() -> None:
    """Micro-batches of equal content have equal statistics: then the gradients must be equal too."""
    rollouts = Rollouts(small_model(0))
    member = rollouts.member(1.0, 24)
    group = as_group([_again(member, number, reward) for number, reward in enumerate([1.0, 0.0] * 2)])
    whole, single = (
        gradients_of_step(
            trainer_of(rl_config({"balance_weight": 10.0}, micro_batch_tokens=tokens), rollouts), [group]
        )
        for tokens in (10_000, 24)
    )
    assert_equal_gradients(single, whole)


def _again(member: Trajectory, number: int, reward: float) -> Trajectory:
    """The same session under another id."""
    segments = tuple(replace(segment, id=f"{segment.id}~{number}") for segment in member.segments)
    return replace(member, segments=segments, reward=RewardBreakdown(reward))


def test_a_step_raises_what_was_good_and_lowers_what_was_bad() -> None:
    rollouts = Rollouts(small_model(0))
    group = rollouts.group([1.0, 0.0, 1.0, 0.0])
    trainer = trainer_of(rl_config(optimizer={"learning_rate": 1e-3}), rollouts)
    before = _probabilities(trainer.model, group)
    metrics = trainer.step([group])
    change = _probabilities(trainer.model, group) - before
    assert change[0] > 0.01
    assert change[2] > 0.01
    assert change[1] < -0.01
    assert change[3] < -0.01
    assert trainer.version == PolicyVersion("run", 1)
    assert metrics["parity_max"] < 1e-5
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train_tokens"] == sum(len(member.segments[0].tokens) for member in group.members)


def _probabilities(model: LanguageModel, group: Group) -> np.ndarray:
    """Summed log-probability of the sampled tokens, per member."""
    segments = [member.segments[0] for member in group.members]
    scores = score_sequences(model, [segment.tokens for segment in segments])
    return np.array([s[segment.sampled].sum() for s, segment in zip(scores, segments, strict=True)])


def test_prompts_and_observations_get_no_gradient() -> None:
    """What is stored there as log-probability, and which tokens come after the last sampled one, is moot."""
    rollouts = Rollouts(small_model(0))
    members = rollouts.group([1.0, 0.0]).members
    changed: list[Trajectory] = []
    for member in members:
        (segment,) = member.segments
        logprobs = np.where(segment.sampled, segment.logprobs, -50.0).astype(np.float32)
        changed.append(replace(member, segments=(replace(segment, logprobs=logprobs),)))
    expected = gradients_of_step(trainer_of(rl_config(), rollouts), [as_group(members)])
    ours = gradients_of_step(trainer_of(rl_config(), rollouts), [as_group(changed)])
    assert_equal_gradients(ours, expected)
    with_tail, other_tail = ([_ending_in(member, token) for member in members] for token in (3, 40))
    assert_equal_gradients(
        gradients_of_step(trainer_of(rl_config(), rollouts), [as_group(with_tail)]),
        gradients_of_step(trainer_of(rl_config(), rollouts), [as_group(other_tail)]),
    )


def _ending_in(member: Trajectory, token: int) -> Trajectory:
    """The last four tokens are an observation of `token`."""
    (segment,) = member.segments
    tokens, sampled = segment.tokens.copy(), segment.sampled.copy()
    tokens[-4:], sampled[-4:] = token, False
    return replace(member, segments=(replace(segment, tokens=tokens, sampled=sampled),))


def test_infrastructure_failures_are_left_out_of_everything() -> None:
    rollouts = Rollouts(small_model(0))
    members = rollouts.group([1.0, 0.0, 0.0]).members
    failures = [
        rollouts.member(None, 30, Status.INFRASTRUCTURE),
        rollouts.member(1.0, 30, Status.INFRASTRUCTURE),
        rollouts.member(None, 30, Status.DONE),
    ]
    without = gradients_of_step(trainer_of(rl_config(), rollouts), [as_group(members)])
    mixed = as_group([failures[0], *members, *failures[1:]])
    assert_equal_gradients(gradients_of_step(trainer_of(rl_config(), rollouts), [mixed]), without)
    trainer = trainer_of(rl_config(), rollouts)
    assert gradients_of_step(trainer, [as_group(failures)]) == {}
    assert trainer.version.step == 1


@pytest.mark.parametrize("status", [Status.LIMIT, Status.AGENT_ERROR])
def test_what_the_agent_did_wrong_stays_in_the_batch(status: Status) -> None:
    rollouts = Rollouts(small_model(0))
    members = rollouts.group([1.0, 0.0, 0.0]).members
    plain = gradients_of_step(trainer_of(rl_config(), rollouts), [as_group(members)])
    marked = as_group([members[0], replace(members[1], status=status), members[2]])
    assert_equal_gradients(gradients_of_step(trainer_of(rl_config(), rollouts), [marked]), plain)


def test_a_group_without_variance_changes_no_weight() -> None:
    rollouts = Rollouts(small_model(0))
    trainer = trainer_of(rl_config(), rollouts)
    metrics = trainer.step([rollouts.group([1.0, 1.0, 1.0]), rollouts.group([0.0, 0.0])])
    assert_same_weights(trainer.model, small_model(0))
    assert metrics.keys() == {"train_s", "train_tokens", "skipped_updates", "skipped_no_variance"}
    assert metrics["skipped_no_variance"] == 2


def test_sessions_that_ended_before_the_first_sampled_token_carry_no_gradient() -> None:
    rollouts = Rollouts(small_model(0))
    silent = rollouts.member(
        0.0, 20, Status.LIMIT, sampled=np.zeros(20, dtype=np.bool_), logprobs=np.zeros(20, dtype=np.float32)
    )
    for normalizer in ("tokens", "sequences"):
        trainer = trainer_of(rl_config({"normalizer": normalizer, "kl_weight": 0.1}), rollouts)
        metrics = trainer.step([as_group([silent, rollouts.member(1.0)])])
        assert metrics["skipped_updates"] == 0
        assert np.isfinite(list(metrics.values())).all()
    trainer = trainer_of(rl_config(), rollouts)
    trainer.step([as_group([silent, _again(silent, 1, 1.0)])])
    assert_same_weights(trainer.model, small_model(0))


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted() -> None:
    rollouts = Rollouts(small_model(0))
    good = rollouts.group([1.0, 0.0])
    trainer = trainer_of(rl_config(), rollouts)
    with torch.no_grad():
        trainer.model.final_norm[0] = float("inf")
    metrics = trainer.step([rollouts.group([1.0, 0.0])])
    assert metrics["skipped_updates"] == 1
    assert not np.isfinite(metrics["grad_norm"])
    with torch.no_grad():
        trainer.model.final_norm[0] = small_model(0).final_norm[0]
    assert_same_weights(trainer.model, small_model(0))
    fresh = trainer_of(rl_config(), rollouts)
    assert trainer.step([good])["skipped_updates"] == 1
    fresh.step([good])
    assert_same_weights(trainer.model, fresh.model)


def test_updates_of_one_step_train_on_their_own_groups_and_drift() -> None:
    rollouts = Rollouts(small_model(0))
    groups = [rollouts.group([1.0, 0.0]) for _ in range(4)]
    config = rl_config(updates_per_step=2, groups_per_step=4)
    trainer = trainer_of(config, rollouts)
    metrics = trainer.step(groups)
    assert metrics["parity_max"] < 1e-5, "parity looks at the first update only"
    assert metrics["ratio_max"] > 1.01, "the second update's policy has moved"
    one = trainer_of(config, rollouts)
    one.step(groups[::2])
    assert one.version.step == 1


def test_rejection_sampling_raises_solved_trajectories_and_ignores_the_rest() -> None:
    rollouts = Rollouts(small_model(0))
    members = rollouts.group([1.0, 0.0, 0.5]).members
    config = rl_config(algorithm="rejection_sampling")
    model = small_model(0)
    (segment,) = members[0].segments
    batch = PackedSequences.pack([segment.tokens])
    logprobs, _ = packed_logprobs(model, batch, torch.from_numpy(segment.sampled.nonzero()[0]))
    (-logprobs.sum() / sum(member.num_sampled_tokens for member in members)).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_equal_gradients(
        gradients_of_step(trainer_of(config, rollouts), [as_group(members)]),
        expected,
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"routes": None}, "routes"),
        ({"sampling": SamplingParams(top_p=0.9)}, "sampling"),
        ({"sampling": SamplingParams(top_k=5)}, "sampling"),
        ({"sampling": SamplingParams(min_p=0.1)}, "sampling"),
        ({"sampling": SamplingParams(temperature=0.5)}, "sampling.temperature"),
        ({"sampling": SamplingParams(temperature=0.0)}, "sampling.temperature"),
        ({"sampled": np.ones(20, dtype=np.bool_)}, "segment"),
        ({"version_spans": (VersionSpan(0, 20, FOREIGN),)}, "version_spans"),
    ],
)
def test_what_cannot_be_trained_on_exactly_is_refused(changes: dict[str, Any], field: str) -> None:
    rollouts = Rollouts(small_model(0))
    trainer = trainer_of(rl_config(), rollouts)
    group = as_group([rollouts.member(1.0), rollouts.member(0.0, **changes)])
    with pytest.raises(ConfigError) as caught:
        trainer.step([group])
    assert caught.value.field == field
    assert trainer.version.step == 0
    assert_same_weights(trainer.model, small_model(0))


def test_routes_are_replayed_and_only_with_router_replay() -> None:
    rollouts = Rollouts(small_model(9))
    members = rollouts.group([1.0, 0.0]).members
    unrouted = [replace(member, segments=(replace(member.segments[0], routes=None),)) for member in members]
    replayed = gradients_of_step(trainer_of(rl_config(), rollouts), [as_group(members)])
    native = gradients_of_step(trainer_of(rl_config(router_replay="off"), rollouts), [as_group(unrouted)])
    name = "blocks.0.experts.down"
    assert (replayed[name] - native[name]).abs().max() > 1e-4, "another policy's routes are others"


def test_publishing_names_the_weights_and_later_steps_do_not_reach_them() -> None:
    rollouts = Rollouts(small_model(0))
    weights = MemoryWeights()
    trainer = RlTrainer(small_model(0), rl_config(), "run", weights, rollouts.blobs.get)
    manifest = trainer.publish()
    assert trainer.version == manifest.version
    assert manifest.version.digest
    trainer.step([rollouts.group([1.0, 0.0])])
    fetched = weights.fetch(manifest)
    for name, parameter in small_model(0).named_parameters():
        assert torch.equal(fetched[name], parameter), name
    assert trainer.publish().version.digest != manifest.version.digest


def test_scores_are_the_models_and_carry_the_version() -> None:
    rollouts = Rollouts(small_model(0))
    trainer = trainer_of(rl_config(), rollouts)
    tokens = rollouts.segment(15).tokens
    (scores,) = trainer.score([tokens])
    np.testing.assert_array_equal(scores.logprobs, score_sequences(trainer.model, [tokens])[0])
    assert scores.version == trainer.version


def assert_same_weights(a: LanguageModel, b: LanguageModel) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name
