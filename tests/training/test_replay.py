"""Router replay over a whole step, and the policy from which a step's updates start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from etude.errors import ConfigError, RouteReplayError
from etude.model import LanguageModel
from etude.model.scoring import PackedSequences, packed_logprobs
from etude.records import Group
from etude.training import RlTrainer
from etude.weights import MemoryWeights
from tests.model.builders import VOCAB, small_model
from tests.model.transformers_builders import tiny_model
from tests.training.builders import Rollouts, as_group, rl_config, trainer_of
from tests.training.test_rl import Gradients, assert_equal_gradients, assert_same_weights, gradients_of_step

TWO: dict[str, Any] = {"updates_per_step": 2, "groups_per_step": 2}


def _groups(rollouts: Rollouts) -> list[Group]:
    return [rollouts.group([1.0, 0.0, 1.0]), rollouts.group([0.0, 1.0])]


def _weights(trainer: RlTrainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def test_r2_replays_what_the_policy_at_the_steps_start_chose() -> None:
    """Where the engine had the trainer's weights, its record is that: R2 and R3 then agree."""
    rollouts = Rollouts(small_model(0))
    groups = _groups(rollouts)
    trained = {}
    for replay in ("r3", "r2", "off"):
        config = rl_config(optimizer={"learning_rate": 0.05}, router_replay=replay, **TWO)
        trainer = trainer_of(config, rollouts)
        trainer.step(groups)
        trained[replay] = _weights(trainer)
    torch.testing.assert_close(trained["r2"], trained["r3"], rtol=0, atol=2e-4)
    assert (trained["off"] - trained["r3"]).abs().max() > 1e-2, "the first update moves the router"


def test_r2_needs_no_record_and_ignores_the_engines() -> None:
    rollouts = Rollouts(small_model(9))
    members = [rollouts.member(1.0, routes=None), rollouts.member(0.0, routes=None)]
    for replay in ("r2", "off"):
        trainer_of(rl_config(router_replay=replay), rollouts).step([as_group(members)])
    with pytest.raises(ConfigError, match="r3"):
        trainer_of(rl_config(), rollouts).step([as_group(members)])


def _with_routes(group: Group, rollouts: Rollouts, change: Callable[[Any], Any]) -> Group:
    """The same sessions with other records."""
    members = []
    for member in group.members:
        (segment,) = member.segments
        assert segment.routes is not None
        routes = rollouts.blobs.put(change(rollouts.blobs.get(segment.routes)))
        members.append(replace(member, segments=(replace(segment, routes=routes),)))
    return as_group(members)


def test_where_nothing_was_recorded_the_router_chooses() -> None:
    rollouts = Rollouts(small_model(0))
    group = rollouts.group([1.0, 0.0])
    unrecorded = _with_routes(group, rollouts, lambda routes: np.full_like(routes, 255))
    native = gradients_of_step(trainer_of(rl_config(router_replay="off"), rollouts), [group])
    assert_equal_gradients(gradients_of_step(trainer_of(rl_config(), rollouts), [unrecorded]), native)


@pytest.mark.parametrize("kind", ["glm4_moe", "gpt_oss", "qwen2_moe"])
def test_models_of_transformers_replay_what_was_recorded(kind: str) -> None:
    def fresh() -> LanguageModel:
        return cast(LanguageModel, tiny_model(kind, vocab_size=VOCAB))

    def gradients(group: Group, replay: str) -> Gradients:
        trainer = RlTrainer(
            fresh(), rl_config(router_replay=replay), "r", MemoryWeights(), rollouts.blobs.get
        )
        return gradients_of_step(trainer, [group])

    rollouts = Rollouts(fresh())
    group = rollouts.group([1.0, 0.0, 1.0])
    native = gradients(group, "off")
    assert_equal_gradients(gradients(group, "r3"), native)
    turned = _with_routes(group, rollouts, lambda routes: (routes + 1) % 4)
    assert_equal_gradients(gradients(turned, "off"), native)
    with pytest.raises(AssertionError):
        assert_equal_gradients(gradients(turned, "r3"), native)
    with pytest.raises(ConfigError, match="routes belong to another model"):
        gradients(_with_routes(group, rollouts, lambda routes: routes[:, :0]), "r3")


def _second_update(
    config: Any, rollouts: Rollouts, groups: list[Group]
) -> tuple[LanguageModel, LanguageModel]:
    """The model at the step's start, and after the first update alone."""
    first = trainer_of(config, rollouts)
    first.step(groups[:1])
    return small_model(0), first.model


@pytest.mark.parametrize("kind", ["decoupled", "clip"])
def test_later_updates_are_bounded_from_the_steps_start(kind: str) -> None:
    rollouts = Rollouts(small_model(9))
    groups = _groups(rollouts)
    cap = 2.0 if kind == "clip" else 0.0
    config = rl_config({"kind": kind, "correction": {"tis_cap": cap}}, {"learning_rate": 1e-3}, **TWO)
    start, model = _second_update(config, rollouts, groups)
    num_tokens = sum(member.num_sampled_tokens for member in groups[1].members)
    total = torch.zeros(())
    for member in groups[1].members:
        (segment,) = member.segments
        assert member.reward is not None and segment.routes is not None
        batch = PackedSequences.pack([segment.tokens])
        targets = torch.from_numpy(segment.sampled.nonzero()[0])
        routes = torch.from_numpy(rollouts.blobs.get(segment.routes).copy())
        new, _ = packed_logprobs(model, batch, targets, routes=routes)
        with torch.no_grad():
            proximal, _ = packed_logprobs(start, batch, targets, routes=routes)
        weight = (proximal - torch.from_numpy(segment.logprobs)[targets]).exp()
        weight = weight.clamp(max=cap) if cap else weight
        ratio, advantage = (new - proximal).exp(), member.reward.total - 0.5
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        total = total - (weight * surrogate).sum() / num_tokens
    model.zero_grad()
    total.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_equal_gradients(gradients_of_step(trainer_of(config, rollouts), groups), expected)


def test_a_segment_that_comes_twice_is_refused_before_anything_changes() -> None:
    rollouts = Rollouts(small_model(0))
    group = rollouts.group([1.0, 0.0])
    trainer = trainer_of(rl_config(), rollouts)
    with pytest.raises(RouteReplayError, match="twice"):
        trainer.step([group, group])
    assert trainer.version.step == 0
    assert_same_weights(trainer.model, small_model(0))


@pytest.mark.parametrize(
    "routes",
    [
        np.zeros((20, 3, 2), dtype=np.uint8),
        np.zeros((20, 2, 1), dtype=np.uint8),
        np.zeros((20, 0, 0), dtype=np.uint8),
        np.full((20, 2, 2), 4, dtype=np.uint8),
        np.full((20, 2, 2), 255, dtype=np.uint16),
    ],
)
def test_routes_of_another_model_are_refused(routes: Any) -> None:
    rollouts = Rollouts(small_model(0))
    trainer = trainer_of(rl_config(), rollouts)
    group = as_group([rollouts.member(1.0), rollouts.member(0.0, routes=rollouts.blobs.put(routes))])
    with pytest.raises(ConfigError, match="another model"):
        trainer.step([group])
    assert_same_weights(trainer.model, small_model(0))


def test_a_dense_model_has_nothing_to_replay() -> None:
    rollouts = Rollouts(small_model(0))
    members, more = ([rollouts.member(1.0, routes=None), rollouts.member(0.0, routes=None)] for _ in range(2))
    model = small_model(0, architecture="qwen3", intermediate_size=32)
    for replay in ("r3", "r2"):
        config = rl_config({"kind": "decoupled"}, router_replay=replay, **TWO)
        trainer = RlTrainer(model, config, "run", MemoryWeights(), rollouts.blobs.get)
        metrics = trainer.step([as_group(members), as_group(more)])
        assert metrics["grad_norm"] > 0


def test_the_plausibility_filter_reaches_the_forward_pass() -> None:
    """With other experts recorded, and only the router's own plausible, the step is the unreplayed one."""
    rollouts = Rollouts(small_model(0))
    group = rollouts.group([1.0, 0.0])
    worst = _with_routes(group, rollouts, lambda routes: 3 - routes)
    native = gradients_of_step(trainer_of(rl_config(router_replay="off"), rollouts), [group])
    filtered = gradients_of_step(trainer_of(rl_config(replay_min_share=1.0), rollouts), [worst])
    replayed = gradients_of_step(trainer_of(rl_config(), rollouts), [worst])
    name = "blocks.0.experts.down"
    assert (replayed[name] - native[name]).abs().max() > 1e-3
    torch.testing.assert_close(filtered[name], native[name], rtol=1e-3, atol=1e-5)
