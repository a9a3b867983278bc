"""What the trainer says of a recorded session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.records import SamplingParams, TrajectoryId
from etude.tokens.chat.fields import unsupported
from etude.tokens.chat.requests import Sampling

RECORDED_ROUTES = "blobs"
"""Directory of the experts' routes, in a store's."""

_IGNORED = frozenset(("temperature", "top_p", "top_k", "min_p"))


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a session's answers are sampled with: the one thing of a request that training has a say in."""

    fixed: SamplingParams | None = None
    """The trainer decides: what the client asks for does not count. None: the client decides."""
    max_tokens: int = 4096
    """Of one answer, where the client names no number."""
    own_noise: bool = False
    """Whether the client's `seed` is ignored too."""

    def that_count(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """A request's body without what is ignored, whatever its value."""
        ignored = _IGNORED if self.fixed is not None else frozenset[str]()
        if self.own_noise:
            ignored |= {"seed"}
        return {k: v for k, v in body.items() if k not in ignored}

    def params(self, asked: Sampling) -> SamplingParams:
        """What is sampled with. Raises BadRequestError for what cannot be trained on here: several answers,
        and truncated sampling, of which the tokens that it kept are not recorded."""
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
    """What the trainer says of a session when it begins."""

    trajectory_id: TrajectoryId
    group_size: int = 0
    """Sessions that are compared with each other, the members of the group `trajectory_id` names. 0: as many
    as come."""
    consent: str = "synthetic"
    keep_thinking: bool = True
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
