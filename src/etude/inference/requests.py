"""Checks of requests that all engines share, with the same error messages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from etude.errors import SamplerError
from etude.records import PolicyVersion


def check_tokens(tokens: NDArray[np.integer], vocab_size: int, field: str = "suffix") -> None:
    """Raises SamplerError if one of `tokens` is outside the vocabulary. `field`: as named in the error."""
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        raise SamplerError(f"tokens must be in 0..{vocab_size - 1}", field=field, received=int(outside[0]))


def check_length(num_tokens: int, longest: int, limit: str = "the engine's limit") -> None:
    """Raises SamplerError unless a session of `num_tokens` can be continued in a context of `longest`.
    `limit`: what the message calls that limit."""
    if not num_tokens:
        raise SamplerError("nothing to continue", field="suffix", received=0, fix="send at least one token")
    if num_tokens >= longest:
        raise SamplerError(
            "session is too long",
            field="suffix",
            received=num_tokens,
            fix=f"stay under {longest} tokens, or raise {limit}",
        )


def already_open(session_id: str) -> SamplerError:
    """The error for a session that is opened twice."""
    return SamplerError("session is open already", field="session_id", received=session_id)


def not_open(session_id: str) -> SamplerError:
    """The error for a request of a session that is not open, or is busy."""
    return SamplerError(
        "session is not open or has a request in flight",
        field="session_id",
        received=session_id,
        fix="call open() first, and wait for the last answer",
    )


def not_served(wanted: PolicyVersion, serving: PolicyVersion | None) -> SamplerError:
    """The error for a request of another version than the one in service."""
    return SamplerError("version is not served", field="version", received=f"{wanted}; serving {serving}")


def serves(current: PolicyVersion | None, wanted: PolicyVersion, wanted_is_minimum: bool) -> bool:
    """Whether `current` answers a request for exactly `wanted`, or for that or a later one of its lineage.

    A wanted version without a digest matches any weights of its lineage and step.
    """
    if current is None or current.lineage != wanted.lineage:
        return False
    if current.step == wanted.step:
        return wanted.digest in ("", current.digest)
    return wanted_is_minimum and current.step > wanted.step
