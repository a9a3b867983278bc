"""Errors of the server, and how they map to HTTP statuses and OpenAI error codes."""

from __future__ import annotations

from typing import Any

from etude.errors import EtudeError, InfrastructureError, UserError
from etude.serving.access import AccessError
from etude.serving.errors import BodyTooLargeError, OpenAIErrors
from etude.tokens.chat.errors import ContextLengthError


class RefusedKeyError(UserError):
    """The API key is missing or unknown."""


class ForbiddenError(UserError):
    """The key has no right to this route."""


class NoSuchModelError(UserError):
    """The requested model is not served here."""


class NoSuchAnswerError(UserError):
    """The side channel of this answer is not kept, or belongs to another key."""


class VersionNotServedError(UserError):
    """The pinned policy version is not in service, or was replaced during the answer."""


class LoanOverError(UserError):
    """A borrower's call under a loan that has ended, or never existed."""


class LoanConflictError(UserError):
    """A call that conflicts with the state of the loan: lending twice, sampling before the first version."""


class _LaterError(EtudeError):
    """An error that may succeed on retry after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0, **details: Any) -> None:
        super().__init__(message, **details)
        self.retry_after_s = retry_after_s


class RateLimitError(_LaterError, UserError):
    """A limit of the key is reached: retry later, or when running requests have ended."""


class UnavailableError(_LaterError, InfrastructureError):
    """The server cannot answer requests now: it is draining, full, lent, or has no weights yet."""


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
