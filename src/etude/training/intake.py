"""Converts graded groups to training sequences: data that cannot be trained on is refused, or skipped.

Faults that would recur in every step are refused with ConfigError, before anything has changed: another
vocabulary, another sampling distribution, routes that are missing or belong to another model. Trajectories
with faults of their own are skipped and counted. One skipped for its tokens keeps its reward in the group's
baseline, since it is a real outcome; one skipped for its reward is left out of the baseline too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.algorithms.signal import GroupSignal, Signal, weigh_group
from etude.config import RlConfig
from etude.errors import ConfigError, RouteReplayError
from etude.model.loading import AnyModel
from etude.records import (
    UNKNOWN_FORMAT,
    BlobRef,
    Group,
    PolicyVersion,
    Relation,
    Segment,
    Status,
    Trajectory,
)
from etude.training.batches import UNKNOWN_LAG, TrainingGroup, TrainingSequence

RouteFetcher = Callable[[BlobRef], NDArray[np.generic]]

_LOGPROB_ROUNDING = 1e-3
"""By how much log-probabilities may exceed 0: engines round."""


class Skipped(StrEnum):
    """Why a trajectory, group or segment was not trained on. Metrics count them as `skipped_<reason>`."""

    INFRASTRUCTURE = "infrastructure"
    """A trajectory that ended with an infrastructure failure."""
    UNGRADED = "ungraded"
    """A trajectory without a reward."""
    REWARD = "reward"
    """A trajectory whose reward is not a finite number."""
    EMPTY_GROUP = "empty_group"
    """A group without any graded member."""
    NO_VARIANCE = "no_variance"
    """A group without a learning signal: see `etude.algorithms.signal`."""
    TOO_LONG = "too_long"
    """A segment longer than the model's window."""
    LOGPROBS = "logprobs"
    """A segment whose sampled tokens lack log-probabilities: not finite, or above 0."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits that a model sets on its training sequences."""

    vocab_size: int
    max_positions: int
    routes: tuple[int, int] | None = None
    """(layers that route, experts per token); None if no routes are replayed."""
    num_experts: int = 0

    @staticmethod
    def of(model: AnyModel) -> ModelLimits:
        """The limits of `model`."""
        routes = model.routes_shape if model.num_experts else None
        return ModelLimits(model.vocab_size, model.max_positions, routes, model.num_experts)


def prepare_groups(
    groups: Sequence[Group],
    config: RlConfig,
    limits: ModelLimits,
    version: PolicyVersion,
    fetch_routes: RouteFetcher,
    published: Mapping[int, str] | None = None,
) -> tuple[list[TrainingGroup], Counter[Skipped]]:
    """Checks and converts the groups of one step of a trainer at `version`; also counts what was skipped.
    `published`: digests by step of the earlier versions of this lineage. A version of such a step with
    another digest was lost when the run was killed: its lag is unknown.

    Raises ConfigError for groups that cannot be trained on, RouteReplayError for a segment that occurs twice.
    """
    reader = _Reader(config, limits, version, fetch_routes, published or {})
    return [read for group in groups if (read := reader.read(group)) is not None], reader.skipped


@dataclass(frozen=True, slots=True)
class _Reader:
    """Converts the groups of one step."""

    config: RlConfig
    limits: ModelLimits
    version: PolicyVersion
    fetch_routes: RouteFetcher
    published: Mapping[int, str]
    skipped: Counter[Skipped] = field(default_factory=Counter[Skipped])
    seen: set[str] = field(default_factory=set[str])
    """Segments so far."""

    def read(self, group: Group) -> TrainingGroup | None:
        """The group's graded members; None if there are none.

        Of a group that failed as a whole, only malformed calls are trained on, in the members with any.
        """
        self.skipped.update(reason for member in group.members if (reason := _ungraded(member)))
        signal = weigh_group(group, self.config)
        if not signal.members:
            self.skipped[Skipped.EMPTY_GROUP] += 1
            return None
        if signal.kind is Signal.NONE:
            self.skipped[Skipped.NO_VARIANCE] += 1
        chains = tuple(self._chain(signal, number) for number in range(len(signal.members)))
        if signal.kind is Signal.FORM:
            chains = tuple(chain for chain in chains if any(sequence.num_trained for sequence in chain))
        return TrainingGroup(chains)

    def _chain(self, signal: GroupSignal, number: int) -> tuple[TrainingSequence, ...]:
        segments = signal.members[number][0].segments
        read: list[TrainingSequence | None] = []
        for segment, mask in zip(segments, _trained(segments, self.config.train_summaries), strict=True):
            advantages = signal.token_advantages(number, segment)
            trained = mask & (advantages != 0) if signal.kind is Signal.FORM else mask
            read.append(self._sequence(segment, trained, advantages))
        return tuple(sequence for sequence in read if sequence is not None)

    def _sequence(
        self, segment: Segment, trained: NDArray[np.bool_], advantages: NDArray[np.float32]
    ) -> TrainingSequence | None:
        replays = self.config.router_replay == "r3" and self.limits.routes is not None
        _check_sampling(segment, self.config)
        self._check_once(segment)
        _check_tokens(segment, self.limits)
        if len(segment.tokens) > self.limits.max_positions:
            self.skipped[Skipped.TOO_LONG] += 1
            return None
        logprobs = segment.logprobs[trained]
        if not bool((np.isfinite(logprobs) & (logprobs <= _LOGPROB_ROUNDING)).all()):
            self.skipped[Skipped.LOGPROBS] += 1
            return None
        return TrainingSequence(
            segment.tokens,
            trained,
            segment.logprobs,
            advantages,
            self._routes(segment) if replays else None,
            _lags(segment, self.version, self.published),
            segment.id,
        )

    def _check_once(self, segment: Segment) -> None:
        if segment.id in self.seen:
            raise RouteReplayError(
                "a segment occurs twice in one step: its routes can be used only once",
                field="segment",
                received=segment.id,
                fix="give every trajectory an id of its own",
            )
        self.seen.add(segment.id)

    def _routes(self, segment: Segment) -> NDArray[Any]:
        if segment.routes is None:
            raise ConfigError(
                "rl.router_replay = 'r3' needs recorded routes",
                field="routes",
                received=segment.id,
                fix="record routes, or set rl.router_replay to 'r2' or 'off'",
            )
        routes: NDArray[Any] = self.fetch_routes(segment.routes)
        if routes.dtype not in (np.uint8, np.uint16):  # a cast would name other experts
            raise ConfigError(
                "routes must be uint8 or uint16", field="routes", received=f"{segment.id}: {routes.dtype}"
            )
        expected = (len(segment.tokens), *(self.limits.routes or ()))
        following = routes + routes.dtype.type(1)  # the unknown-route marker becomes 0: one pass checks all
        if routes.shape != expected or following.max(initial=0) > self.limits.num_experts:
            raise ConfigError(
                "the routes belong to another model",
                field="routes",
                received=f"{segment.id}: {routes.shape}, experts up to {int(following.max(initial=1)) - 1}",
                fix=f"train the model that sampled: this has {self.limits.num_experts} experts, {expected}",
            )
        return routes


def _ungraded(member: Trajectory) -> Skipped | None:
    """Why a trajectory is not graded; None if it is."""
    if member.status is Status.INFRASTRUCTURE:
        return Skipped.INFRASTRUCTURE
    if member.reward is None:
        return Skipped.UNGRADED
    return None if member.reward.is_finite else Skipped.REWARD


def _trained(segments: Sequence[Segment], summaries: bool) -> list[NDArray[np.bool_]]:
    """Which tokens of each segment are trained on: those sampled, with or without summaries.

    A segment's summary is its last message, if another segment continues from there.
    """
    ends = {segment.parent for segment in segments if segment.relation is Relation.SUMMARY}
    masks: list[NDArray[np.bool_]] = []
    for segment in segments:
        mask = segment.sampled
        if not summaries and (segment.id, len(segment.tokens)) in ends:
            mask = mask.copy()
            mask[segment.turn_spans[-1].start :] = False
        masks.append(mask)
    return masks


def _lags(segment: Segment, version: PolicyVersion, published: Mapping[int, str]) -> NDArray[np.int32]:
    """[T] steps from a token's version to `version`; UNKNOWN_LAG for another lineage, a later version, or one
    whose digest differs from the one `published` at its step. An unknown digest equals any."""
    lags = np.zeros(len(segment.tokens), dtype=np.int32)
    for span in segment.version_spans:
        lag = version.step - span.version.step
        digests = {span.version.digest, published.get(span.version.step, "")} - {""}
        known = span.version.lineage == version.lineage and lag >= 0 and len(digests) < 2
        lags[span.start : span.end] = lag if known else UNKNOWN_LAG
    return lags


def _check_tokens(segment: Segment, limits: ModelLimits) -> None:
    if segment.sampled[:1].any():
        raise ConfigError("the first token cannot be a sampled one", field="segment", received=segment.id)
    tokens = segment.tokens
    if len(tokens) == 0 or (int(tokens.min()) >= 0 and int(tokens.max()) < limits.vocab_size):
        return
    raise ConfigError(
        f"tokens must be in 0..{limits.vocab_size - 1}: they are of another tokenizer",
        field="tokens",
        received=f"{segment.id}: {int(tokens.min())}..{int(tokens.max())}",
        fix="train with the model and tokenizer that sampled the tokens",
    )


def _check_sampling(segment: Segment, config: RlConfig) -> None:
    if any(span.version.format == UNKNOWN_FORMAT for span in segment.version_spans):
        raise ConfigError(
            "tokens that another engine sampled cannot be trained on: their logprobs are not known",
            field="version_spans",
            received=segment.id,
            fix="train on sessions that Étude's engine sampled",
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
