from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.config import RlConfig
from etude.environment.fork_records import ForkPoint, branch_of
from etude.model import LanguageModel
from etude.model.scoring import PackedSequences, packed_logprobs, score_sequences
from etude.records import (
    Group,
    GroupOrigin,
    PolicyVersion,
    Relation,
    RewardBreakdown,
    SamplingParams,
    Segment,
    Status,
    Trajectory,
    TrajectoryId,
    VersionSpan,
)
from etude.training.batches import split_updates
from etude.training.forks import training_view
from etude.training.intake import ModelLimits, take_groups
from etude.training.loss import Rows, policy_loss
from tests.model.builders import fresh_routes, random_tokens, small_model
from tests.training.builders import Rollouts, rl_config, trainer_of

VERSION = PolicyVersion("run", 3)


def new_segment(name: str, length: int, parent: tuple[str, int] | None, seed: int) -> Segment:
    noise = np.random.default_rng(seed)
    sampled = noise.random(length) < 0.6
    sampled[0] = False
    logprobs = np.where(sampled, -noise.random(length), 0.0).astype(np.float32)
    spans = (VersionSpan(0, length, VERSION),)
    return Segment(
        id=name,
        trajectory_id=name.partition("#")[0],
        tokens=noise.integers(0, 50, length).astype(np.int32),
        sampled=sampled,
        logprobs=logprobs,
        version_spans=spans,
        kv_oldest_spans=spans,
        turn_spans=(),
        sampling=SamplingParams(),
        tokenizer_digest="t",
        template_digest="t",
        parent=parent,
        relation=Relation.SUMMARY if parent else Relation.ROOT,
    )


def new_session(index: int, lengths: list[int]) -> Trajectory:
    identity = TrajectoryId("run", "task", 0, 0, index)
    segments: list[Segment] = []
    for number, length in enumerate(lengths):
        parent = (segments[-1].id, len(segments[-1].tokens)) if segments else None
        segments.append(new_segment(f"{identity}#{number}", length, parent, 10 * index + number))
    return Trajectory(identity, tuple(segments), (), Status.DONE, reward=RewardBreakdown(float(index % 2)))


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(2, 30), min_size=1, max_size=3), data=st.data())
def test_every_sampled_token_is_trained_once_under_one_advantage(
    lengths: list[int], data: st.DataObject
) -> None:
    parent, other = new_session(0, lengths), new_session(1, [12])
    context = data.draw(st.integers(0, len(lengths) - 1))
    offset = data.draw(st.integers(1, lengths[context] - 1))
    point = ForkPoint(1, parent.segments[context].id, offset)
    own = branch_of(parent, point, replace(parent.id, index=8), {"continues": str(parent.id)})
    task = Group("g", "task", 2, (parent, other))
    fork = Group("g+fork", "fork", 2, (own,), GroupOrigin(point.segment_id, offset, ""))
    viewed_task, viewed_fork = training_view((task, fork))
    assert viewed_fork is fork
    assert viewed_task.members[1] is other
    for number, segment in enumerate(parent.segments):
        kept = viewed_task.members[0].segments[number]
        branched = np.zeros(len(segment.tokens), dtype=np.int64)
        if number >= context:
            branched += own.segments[number - context].sampled
        times = kept.sampled.astype(np.int64) + branched
        assert times.tolist() == segment.sampled.astype(np.int64).tolist()
        if number < context:
            assert kept is segment
        elif number == context:
            assert not branched[:offset].any()
            assert not kept.sampled[offset:].any()
        trained = kept.sampled | (branched > 0)
        logprobs = kept.logprobs + (own.segments[number - context].logprobs if number >= context else 0)
        assert logprobs[trained].tolist() == segment.logprobs[trained].tolist()
        assert kept.tokens is segment.tokens
        assert kept.version_spans == segment.version_spans
    assert all(one.trajectory_id == str(own.id) for one in own.segments)
    assert [one.parent for one in own.segments[1:]] == [
        (f"{own.id}#{context + n}", lengths[context + n]) for n in range(len(own.segments) - 1)
    ]


def test_a_session_whose_fork_is_not_trained_stays_whole() -> None:
    task = Group("g", "task", 2, (new_session(0, [20]), new_session(1, [20])))
    assert training_view((task,)) == (task,)
    elsewhere = Group("h+fork", "fork", 2, (new_session(7, [9]),), GroupOrigin("another#0", 4, ""))
    viewed, _ = training_view((task, elsewhere))
    assert [m.segments[0].sampled.tolist() for m in viewed.members] == [
        m.segments[0].sampled.tolist() for m in task.members
    ]


def test_a_step_of_the_trainer_leaves_to_the_fork_what_is_the_forks() -> None:
    rollouts = Rollouts(small_model(0))
    parent, other, sibling = (rollouts.member(reward, 24) for reward in (0.0, 1.0, 1.0))
    (segment,) = parent.segments
    point = ForkPoint(0, segment.id, 12)
    own = branch_of(parent, point, replace(parent.id, index=8), {})
    task = Group("g", "task", 2, (parent, other))
    fork = Group("g+fork", "fork", 2, (own, sibling), GroupOrigin(segment.id, point.offset, ""))
    unrelated = replace(fork, origin=GroupOrigin("another#0", 12, ""))

    def weights_after(groups: tuple[Group, ...]) -> list[torch.Tensor]:
        trainer = trainer_of(rl_config(), rollouts)
        trainer.step(groups)
        return [parameter.detach() for parameter in trainer.model.parameters()]

    def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
        return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))

    stepped = weights_after((task, fork))
    assert equal(stepped, weights_after((training_view((task, fork))[0], unrelated)))
    assert not equal(stepped, weights_after((task, unrelated)))


OFFSET = 12
"""Tokens that the forked session and its sibling share."""


def forked_and_siblings(rollouts: Rollouts) -> tuple[Group, Group, Trajectory]:
    """A task's group whose first session failed, the group of its fork, whose sibling did not, and the
    sibling as it was sampled."""
    forked, other = rollouts.member(0.0, 24), rollouts.member(1.0, 20)
    (segment,) = forked.segments
    tokens = np.concatenate([segment.tokens[:OFFSET], random_tokens(14, 77)])
    sampled = np.concatenate([segment.sampled[:OFFSET], np.ones(14, dtype=np.bool_)])
    (scores,) = score_sequences(rollouts.model, [tokens])
    sibling = rollouts.member(
        1.0,
        len(tokens),
        tokens=tokens,
        sampled=sampled,
        logprobs=np.where(sampled, scores, 0.0).astype(np.float32),
        routes=rollouts.blobs.put(fresh_routes(rollouts.model, tokens)),
    )
    point = ForkPoint(1, segment.id, OFFSET)
    own = branch_of(forked, point, replace(forked.id, index=8), {})
    branch = branch_of(
        sibling, replace(point, segment_id=sibling.segments[0].id), replace(forked.id, index=9), {}
    )
    task = Group("g", "task", 2, (forked, other))
    return task, Group("g+fork", "fork", 2, (own, branch), GroupOrigin(segment.id, OFFSET, "")), sibling


def step_gradient(model: LanguageModel, config: RlConfig, groups: tuple[Group, ...], rollouts: Rollouts):
    """The gradient of a step's loss, by the trainer's own parts."""
    version = PolicyVersion("run", 0)
    intake = take_groups(training_view(groups), config, ModelLimits.of(model), version, rollouts.blobs.get)
    (update,) = split_updates(intake.groups, config.loss, 1)
    batch = PackedSequences.pack([one.tokens for one in update], torch.device("cpu"))
    rows, targets = Rows.of(update, batch)
    logprobs, _ = packed_logprobs(model, batch, targets)
    return torch.autograd.grad(policy_loss(config, logprobs, rows).total, list(model.parameters()))


def gradient_of(model: LanguageModel, sessions: list[tuple[np.ndarray, np.ndarray]]):
    """The gradient of minus the sum over tokens of coefficient * log-probability."""
    batch = PackedSequences.pack([tokens for tokens, _ in sessions], torch.device("cpu"))
    coefficients = batch.pack_rows([coefficient for _, coefficient in sessions])
    targets = (coefficients != 0).nonzero().flatten()
    logprobs, _ = packed_logprobs(model, batch, targets)
    return torch.autograd.grad(-(coefficients[targets] * logprobs).sum(), list(model.parameters()))


def test_the_gradient_has_the_prefix_under_the_task_s_advantage_and_suffixes_under_the_siblings() -> None:
    """Rewards 0 and 1 among the task's sessions, 0 and 1 among the siblings: advantages -1/2 and 1/2 in
    both. A third session of the task makes them differ."""
    rollouts = Rollouts(small_model(0))
    task, fork, sibling = forked_and_siblings(rollouts)
    third = rollouts.member(1.0, 18)
    task = replace(task, expected=3, members=(*task.members, third))
    model, config = small_model(0), rl_config()

    forked, other = task.members[0].segments[0], task.members[1].segments[0]
    left, last = sibling.segments[0], third.segments[0]
    by_task, by_fork = -2 / 3, -1 / 2
    where = np.arange(len(forked.tokens)) < OFFSET
    coefficients = [
        (forked.tokens, np.where(where, by_task, by_fork) * forked.sampled),
        (other.tokens, other.sampled / 3),
        (last.tokens, last.sampled / 3),
        (left.tokens, (np.arange(len(left.tokens)) >= OFFSET) * left.sampled / 2),
    ]
    trained = sum(int((values != 0).sum()) for _, values in coefficients)
    expected = gradient_of(
        model, [(tokens, (values / trained).astype(np.float32)) for tokens, values in coefficients]
    )
    found = step_gradient(model, config, (task, fork), rollouts)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    whole = step_gradient(model, config, (task,), rollouts)
    assert any(not torch.allclose(one, other) for one, other in zip(whole, expected, strict=True))


def test_the_tokens_of_a_sibling_before_the_fork_have_no_gradient_at_all() -> None:
    """What is sampled before it could be anything: nothing of it is in the loss but as context."""
    rollouts = Rollouts(small_model(0))
    task, fork, _ = forked_and_siblings(rollouts)
    model = small_model(0)
    (update,) = split_updates(
        take_groups(
            training_view((task, fork)),
            rl_config(),
            ModelLimits.of(model),
            PolicyVersion("run", 0),
            rollouts.blobs.get,
        ).groups,
        rl_config().loss,
        1,
    )
    masks = {one.segment_id: one.sampled for one in update}
    assert not masks[fork.members[0].segments[0].id][:OFFSET].any()
    assert not masks[fork.members[1].segments[0].id][:OFFSET].any()
    assert not masks[task.members[0].segments[0].id][OFFSET:].any()
    assert masks[task.members[0].segments[0].id][:OFFSET].any()
