from dataclasses import replace

import numpy as np
import torch

from etude.config import RlConfig
from etude.environment.fork_groups import branch_of
from etude.model import LanguageModel
from etude.model.scoring import PackedSequences, packed_logprobs, score_sequences
from etude.records import (
    Group,
    GroupOrigin,
    PolicyVersion,
    Trajectory,
)
from etude.training.batches import split_updates
from etude.training.intake import ModelLimits, prepare_groups
from etude.training.loss import Rows, policy_loss
from tests.model.builders import fresh_routes, random_tokens, small_model
from tests.training.builders import Rollouts, rl_config

OFFSET = 12
"""Tokens that the forked session and its sibling share."""


def forked_and_siblings(rollouts: Rollouts) -> tuple[Group, Group]:
    """A task's group, and that of a fork of its first session: one of two siblings solved the task."""
    forked, *others = rollouts.member(0.0, 24), rollouts.member(1.0, 20), rollouts.member(1.0, 18)
    (segment,) = forked.segments
    siblings: list[Trajectory] = []
    for index, reward in enumerate((1.0, 0.0)):
        tokens = np.concatenate([segment.tokens[:OFFSET], random_tokens(14, 77 + index)])
        sampled = np.concatenate([segment.sampled[:OFFSET], np.ones(14, dtype=np.bool_)])
        (scores,) = score_sequences(rollouts.model, [tokens])
        sibling = rollouts.member(
            reward,
            len(tokens),
            tokens=tokens,
            sampled=sampled,
            logprobs=np.where(sampled, scores, 0.0).astype(np.float32),
            routes=rollouts.blobs.put(fresh_routes(rollouts.model, tokens)),
        )
        origin = GroupOrigin(sibling.segments[0].id, OFFSET, "")
        siblings.append(branch_of(sibling, origin, replace(forked.id, index=8 + index), {}))
    task = Group("g", "task", 3, (forked, *others))
    return task, Group("g+fork", "fork", 2, tuple(siblings), GroupOrigin(segment.id, OFFSET, ""))


def step_gradient(model: LanguageModel, config: RlConfig, groups: tuple[Group, ...], rollouts: Rollouts):
    """The gradient of a step's loss, by the trainer's own parts."""
    version = PolicyVersion("run", 0)
    prepared, _ = prepare_groups(groups, config, ModelLimits.of(model), version, rollouts.blobs.get)
    (update,) = split_updates(prepared, config.loss, 1)
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


def test_a_forked_session_is_trained_whole_with_its_task_s_and_siblings_from_the_fork_on() -> None:
    """Rewards 0, 1, 1 among the task's sessions; 1, 0 among the siblings. The forked session's own end is no
    member of the fork's group, also where an older log has it there."""
    rollouts = Rollouts(small_model(0))
    task, fork = forked_and_siblings(rollouts)
    model, config = small_model(0), rl_config()
    advantages = [-2 / 3, 1 / 3, 1 / 3, 1 / 2, -1 / 2]
    segments = [member.segments[0] for member in (*task.members, *fork.members)]
    assert not any(one.sampled[:OFFSET].any() for one in segments[3:])
    trained = sum(one.num_sampled_tokens for one in segments)
    expected = gradient_of(
        model,
        [
            (one.tokens, (one.sampled * advantage / trained).astype(np.float32))
            for one, advantage in zip(segments, advantages, strict=True)
        ],
    )
    found = step_gradient(model, config, (task, fork), rollouts)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
