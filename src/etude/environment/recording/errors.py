"""What a recording endpoint refuses, so that each API can say it in its own words."""

from __future__ import annotations

from etude.errors import InfrastructureError, UserError
from etude.tokens.chat.errors import BadRequestError, ContextLengthError

__all__ = [
    "BadRequestError",
    "BusyError",
    "ContextLengthError",
    "DrainingError",
    "NoSuchSessionError",
    "RefusedKeyError",
    "SessionEndedError",
]


class RefusedKeyError(UserError):
    """A key that is missing, unknown, or of another tenant."""


class NoSuchSessionError(UserError):
    """A session that is not held here."""


class SessionEndedError(UserError):
    """A session that takes no more requests: it is finished, or is being finished."""


class BusyError(UserError):
    """A limit of the tenant's or the session's: later, or after something has ended."""


class DrainingError(InfrastructureError):
    """The server is about to end and takes no new sessions."""
