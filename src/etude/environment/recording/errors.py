"""What a recording endpoint refuses, in OpenAI's words; other dialects have theirs from these."""

from __future__ import annotations

from etude.errors import EtudeError, InfrastructureError, UserError
from etude.serving.access import AccessError
from etude.serving.errors import BodyTooLargeError, OpenAIErrors
from etude.tokens.chat.errors import ContextLengthError


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


ERRORS = OpenAIErrors(
    (
        (ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
        (AccessError, 401, "authentication_error", "foreign_name"),
        (RefusedKeyError, 401, "authentication_error", "invalid_api_key"),
        (NoSuchSessionError, 404, "invalid_request_error", "session_not_found"),
        (SessionEndedError, 410, "invalid_request_error", "session_ended"),
        (BodyTooLargeError, 413, "invalid_request_error", "request_too_large"),
        (BusyError, 429, "rate_limit_error", "rate_limit_exceeded"),
        (UserError, 400, "invalid_request_error", None),
        (EtudeError, 503, "server_error", None),
    )
)
