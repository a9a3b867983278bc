"""Specification of a recorded session, given by the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.records import SamplingParams, TrajectoryId
from etude.tokens.chat.fields import unsupported
from etude.tokens.chat.requests import Sampling

RECORDED_ROUTES = "blobs"
"""Directory of expert routes, within a store's."""

_IGNORED = frozenset(("temperature", "top_p", "top_k", "min_p"))


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """How a session's answers are sampled: the only part of a request that the trainer may override."""

    fixed: SamplingParams | None = None
    """Set by the trainer: the client's parameters are ignored. None: the client decides."""
    max_tokens: int = 4096
    """Limit for one answer, if the client sets none."""
    own_noise: bool = False
    """Whether the client's `seed` is ignored too."""

    def without_ignored(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """A request's body without ignored fields, which may have any value."""
        ignored = _IGNORED if self.fixed is not None else frozenset[str]()
        if self.own_noise:
            ignored |= {"seed"}
        return {k: v for k, v in body.items() if k not in ignored}

    def params(self, asked: Sampling) -> SamplingParams:
        """The parameters to sample with. Raises BadRequestError for requests that cannot be trained on:
        several answers, and truncated sampling, as its support is not recorded."""
        if asked.num_samples > 1:
            raise unsupported("n", asked.num_samples, "one answer is recorded for each request")
        if asked.params.top_logprobs:
            raise unsupported("top_logprobs", asked.params.top_logprobs, "is not supported here")
        if self.fixed is not None:
            limit = min(asked.max_tokens or self.max_tokens, self.fixed.max_tokens)
            return SamplingParams(self.fixed.temperature, max_tokens=limit)
        for field_name, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            value = getattr(asked.params, field_name)
            if value != neutral:
                raise unsupported(
                    field_name,
                    value,
                    "truncated sampling cannot be trained on: what it kept is not recorded",
                    f"leave it out, or fix the session's sampling ({field_name} is then ignored)",
                )
        return SamplingParams(asked.params.temperature, max_tokens=asked.max_tokens or self.max_tokens)


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """The trainer's specification of a new session."""

    trajectory_id: TrajectoryId
    group_size: int = 0
    """Number of sessions in the group of `trajectory_id`, which are compared. 0: as many as there are."""
    consent: str = "synthetic"
    keep_thinking: bool = True
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
