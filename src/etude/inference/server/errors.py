"""What the server refuses, as OpenAI's error object: with the field, the value and the fix."""

from __future__ import annotations

from typing import Any

from etude.errors import EtudeError, InfrastructureError, UserError
from etude.serving.access import AccessError
from etude.serving.errors import BodyTooLargeError, OpenAIErrors
from etude.tokens.chat.errors import ContextLengthError


class RefusedKeyError(UserError):
    """A key that is missing or unknown."""


class ForbiddenError(UserError):
    """A key that does not open this door."""


class NoSuchModelError(UserError):
    """A model that is not served here."""


class NoSuchAnswerError(UserError):
    """An answer whose side channel is not held, or not for this key."""


class VersionNotServedError(UserError):
    """A request pinned to a policy version that is not in service, or was replaced during the answer."""


class LoanOverError(UserError):
    """What a borrower asks of a loan that has ended, or never was."""


class LoanConflictError(UserError):
    """What a loan does not allow as things stand: a second one, tokens before its first version."""


class _LaterError(EtudeError):
    """Something that may go well after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0, **details: Any) -> None:
        super().__init__(message, **details)
        self.retry_after_s = retry_after_s


class RateLimitError(_LaterError, UserError):
    """A limit of the key's: later, or after something has ended."""


class UnavailableError(_LaterError, InfrastructureError):
    """The server answers no requests now: it is about to end, or has no weights yet."""


ERRORS = OpenAIErrors(
    (
        (ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
        (AccessError, 401, "authentication_error", "foreign_name"),
        (RefusedKeyError, 401, "authentication_error", "invalid_api_key"),
        (ForbiddenError, 403, "permission_error", "forbidden"),
        (NoSuchModelError, 404, "invalid_request_error", "model_not_found"),
        (NoSuchAnswerError, 404, "invalid_request_error", "answer_not_found"),
        (VersionNotServedError, 409, "invalid_request_error", "version_not_served"),
        (LoanConflictError, 409, "invalid_request_error", "lent"),
        (LoanOverError, 410, "invalid_request_error", "loan_over"),
        (BodyTooLargeError, 413, "invalid_request_error", "request_too_large"),
        (RateLimitError, 429, "rate_limit_error", "rate_limit_exceeded"),
        (UserError, 400, "invalid_request_error", None),
        (UnavailableError, 503, "server_error", "unavailable"),
        (InfrastructureError, 503, "server_error", "engine_failed"),
    )
)
