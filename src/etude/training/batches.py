"""From graded groups to the rows that an update trains on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.algorithms import group_advantages
from etude.config import RlConfig
from etude.errors import ConfigError
from etude.records import UNKNOWN_FORMAT, BlobRef, Group, Relation, Segment, Status

RouteFetcher = Callable[[BlobRef], NDArray[np.generic]]


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSequence:
    """One segment with its trajectory's advantage."""

    tokens: NDArray[np.int32]
    """[T]"""
    sampled: NDArray[np.bool_]
    """[T] True where the loss applies."""
    logprobs: NDArray[np.float32]
    """[T] as sampled."""
    advantage: float
    routes: NDArray[Any] | None
    """[T, layers, top_k] uint8, or uint16 where there are more than 255 experts; None where the router
    chooses."""


def training_sequences(
    groups: Sequence[Group], config: RlConfig, fetch_routes: RouteFetcher
) -> list[list[TrainingSequence]]:
    """Per group, the sequences of its graded members. Infrastructure failures are left out of everything."""
    result: list[list[TrainingSequence]] = []
    for group in groups:
        members = [m for m in group.members if m.status is not Status.INFRASTRUCTURE and m.reward is not None]
        rewards = [member.reward for member in members if member.reward is not None]
        if not rewards:
            result.append([])
            continue
        if config.algorithm == "rejection_sampling":
            advantages = np.array([float(reward.task == 1.0) for reward in rewards], dtype=np.float32)
        else:
            advantages = group_advantages(rewards, normalize_std=config.normalize_std)
        result.append(
            [
                _sequence(segment, trained, float(advantage), config, fetch_routes)
                for member, advantage in zip(members, advantages, strict=True)
                for segment, trained in zip(
                    member.segments, _trained(member.segments, config.train_summaries), strict=True
                )
            ]
        )
    return result


def _trained(segments: Sequence[Segment], summaries: bool) -> list[NDArray[np.bool_]]:
    """Which tokens of each segment are trained on: those sampled, with or without summaries.

    A segment's summary is the message at which another one left it.
    """
    ends = {one.parent for one in segments if one.relation is Relation.SUMMARY}
    masks: list[NDArray[np.bool_]] = []
    for segment in segments:
        mask = segment.sampled
        if not summaries and (segment.id, len(segment.tokens)) in ends:
            mask = mask.copy()
            mask[segment.turn_spans[-1].start :] = False
        masks.append(mask)
    return masks


def _sequence(
    segment: Segment,
    trained: NDArray[np.bool_],
    advantage: float,
    config: RlConfig,
    fetch_routes: RouteFetcher,
) -> TrainingSequence:
    if any(span.version.format == UNKNOWN_FORMAT for span in segment.version_spans):
        raise ConfigError(
            "tokens of a model that is not ours cannot be trained on: their logprobs are not known",
            field="version_spans",
            received=segment.id,
            fix="train on sessions that our own engine sampled",
        )
    if segment.sampling.truncated:
        raise ConfigError(
            "truncated sampling cannot be trained on: the loss is over the whole vocabulary",
            field="sampling",
            received=segment.sampling,
            fix="sample with top_p=1, top_k=0, min_p=0",
        )
    if segment.sampling.temperature != config.temperature:
        raise ConfigError(
            f"must be sampled at rl.temperature={config.temperature} to be trained on",
            field="sampling.temperature",
            received=segment.sampling.temperature,
            fix="sample rollouts at the temperature that they are trained at",
        )
    if segment.sampled[0]:
        raise ConfigError("the first token cannot be a sampled one", field="segment", received=segment.id)
    routes = None
    if config.router_replay:
        if segment.routes is None:
            raise ConfigError(
                "router replay needs recorded routes",
                field="routes",
                received=segment.id,
                fix="record routes, or set rl.router_replay=false",
            )
        routes = fetch_routes(segment.routes)
        if routes.dtype not in (np.uint8, np.uint16):  # a cast would name other experts
            raise ConfigError(
                "routes must be uint8 or uint16", field="routes", received=f"{segment.id}: {routes.dtype}"
            )
    return TrainingSequence(segment.tokens, trained, segment.logprobs, advantage, routes)


def split_updates(groups: Sequence[list[TrainingSequence]], num_updates: int) -> list[list[TrainingSequence]]:
    """Deals whole groups over the updates of one step, in turn."""
    updates: list[list[TrainingSequence]] = [[] for _ in range(num_updates)]
    for index, group in enumerate(groups):
        updates[index % num_updates].extend(group)
    return [update for update in updates if update]


def micro_batches(sequences: Sequence[TrainingSequence], max_tokens: int) -> list[list[TrainingSequence]]:
    """Cuts sequences of like length into batches of at most `max_tokens` (or one sequence)."""
    batches: list[list[TrainingSequence]] = []
    room = 0
    for sequence in sorted(sequences, key=lambda sequence: -len(sequence.tokens)):
        if not batches or len(sequence.tokens) > room:
            batches.append([])
            room = max_tokens
        batches[-1].append(sequence)
        room -= len(sequence.tokens)
    return batches
