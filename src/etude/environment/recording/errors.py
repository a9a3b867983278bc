"""What a recording endpoint refuses, so that each API can say it in its own words."""

from __future__ import annotations

from etude.errors import InfrastructureError, UserError

__all__ = [
    "BadRequestError",
    "BodyTooLargeError",
    "BusyError",
    "ContextLengthError",
    "DrainingError",
    "NoSuchSessionError",
    "RefusedKeyError",
    "SessionEndedError",
]


class BadRequestError(UserError):
    """A request that breaks its API's format, or asks for what cannot be recorded."""


class BodyTooLargeError(UserError):
    """A request body over the limit."""


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


class ContextLengthError(UserError):
    """A history that leaves no room for an answer. Units: tokens."""

    def __init__(self, num_tokens: int, max_tokens: int) -> None:
        super().__init__(
            "the history leaves no room for an answer",
            field="messages",
            received=num_tokens,
            fix=f"stay under {max_tokens} tokens",
        )
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles whole."""
        return type(self), (self.num_tokens, self.max_tokens)
