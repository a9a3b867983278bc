"""What a recorded session is sampled with: the one thing of a request that training has a say in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etude.records import SamplingParams
from etude.tokens.chat.fields import number, unsupported


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a session's answers are sampled with."""

    fixed: SamplingParams | None = None
    """Whoever trains decides: what the client asks for does not count. None: the client decides."""
    max_tokens: int = 4096
    """Of one answer, where the client names no number."""


def sampling_params(
    body: Mapping[str, Any], max_tokens: int | None, max_temperature: float, defaults: SamplingDefaults
) -> SamplingParams:
    """What is sampled with. Raises BadRequestError for truncated sampling, which cannot be trained on here:
    the tokens that it kept are not recorded."""
    limit = max_tokens or defaults.max_tokens
    if defaults.fixed is not None:
        fixed = defaults.fixed
        return SamplingParams(fixed.temperature, max_tokens=min(limit, fixed.max_tokens))
    temperature = number(body, "temperature", 1.0, 0.0, max_temperature)
    for field, neutral in (("top_p", 1.0), ("top_k", 0.0), ("min_p", 0.0)):
        value = number(body, field, neutral, -1.0, 1e9)
        if value != neutral and not (field == "top_k" and value == -1):
            raise unsupported(
                field,
                value,
                "truncated sampling cannot be trained on: what it kept is not recorded",
                f"leave it out, or fix the session's sampling ({field} is then ignored)",
            )
    return SamplingParams(temperature, max_tokens=limit)
