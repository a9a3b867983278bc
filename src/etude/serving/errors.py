"""HTTP answers for errors, in the two formats of our servers: our own, and OpenAI's.

A format maps an error to a status, a JSON document and headers, by a table of error types; an error in no
table is a defect of the server, answered with 500 and no details.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Protocol

import etude.errors
from etude.errors import AgentError, EtudeError, InfrastructureError, UserError
from etude.serving.access import AccessError

RETRY_S = 1.0
"""Default `retry-after` of errors that ask the client to retry."""
_SHOWN_CHARACTERS = 1000

ErrorAnswer = tuple[int, dict[str, Any], Mapping[str, str]]
"""HTTP status, document and headers."""


class BodyTooLargeError(UserError):
    """A request body over the limit."""


class RouteError(UserError):
    """No such path, or the path does not support this method."""

    status = 404


class ErrorShape(Protocol):
    """A format in which a server answers errors."""

    def describe(self, error: BaseException) -> ErrorAnswer:
        """Status, document and headers for an error."""
        ...

    def responses(self) -> dict[int | str, dict[str, Any]]:
        """The OpenAPI descriptions of the errors that every route may answer, by status."""
        ...


_OWN: tuple[tuple[type[BaseException], int], ...] = (
    (AccessError, 401),
    (AgentError, 422),
    (UserError, 400),
    (InfrastructureError, 502),
    (TimeoutError, 408),
)


class OwnErrors:
    """`{"error": {"kind", "message", "field", "received", "fix"}}`. Implements `ErrorShape`."""

    def __init__(
        self,
        statuses: Mapping[type[BaseException], int],
        encode: Callable[[BaseException], dict[str, Any]] | None = None,
    ) -> None:
        """`statuses`: by error type; the first match counts, before the default table. `encode`: encodes an
        error as an object; default `encode_error`."""
        self._statuses = [*statuses.items(), *_OWN]
        self._encode = encode or encode_error

    def describe(self, error: BaseException) -> ErrorAnswer:
        own = error.status if isinstance(error, RouteError) else None
        status = own or next((status for kind, status in self._statuses if isinstance(error, kind)), 500)
        return status, {"error": self._encode(error)}, _headers(error, status)

    def responses(self) -> dict[int | str, dict[str, Any]]:
        fields = dict.fromkeys(("kind", "message", "field", "fix"), "string") | {"received": "any"}
        return _responses(self._statuses, fields)


OpenAIKinds = Sequence[tuple[type[EtudeError], int, str, str | None]]
"""Type of error, HTTP status, OpenAI's `type` and `code`; the first match counts."""


class OpenAIErrors:
    """OpenAI's error object: `{"error": {"message", "type", "param", "code"}}`. Implements `ErrorShape`."""

    def __init__(self, kinds: OpenAIKinds) -> None:
        """`kinds`: the last one usually matches every EtudeError."""
        self._kinds = kinds

    def describe(self, error: BaseException) -> ErrorAnswer:
        if isinstance(error, RouteError):
            words = f"{error.message}: {error.received}"
            document = openai_document(shorten(words), "invalid_request_error")
            return error.status, document, _headers(error, error.status)
        for kind, status, name, code in self._kinds:
            if isinstance(error, kind):
                document = openai_document(_words_of(error), name, _field_of(error), code)
                return status, document, _headers(error, status)
        return 500, openai_document("the server failed", "server_error", None, "internal_error"), {}

    def responses(self) -> dict[int | str, dict[str, Any]]:
        fields: dict[str, str] = dict.fromkeys(("message", "type", "param", "code"), "string")
        return _responses(((kind, status) for kind, status, _, _ in self._kinds), fields)


def openai_document(
    message: str, kind: str = "server_error", param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


KINDS: Mapping[str, type[EtudeError]] = {
    name: kind
    for name, kind in vars(etude.errors).items()
    if isinstance(kind, type) and issubclass(kind, EtudeError)
}
"""The default error types that are encoded under their own names."""


def encode_error(error: BaseException, known: Container[str] = KINDS) -> dict[str, Any]:
    """`kind`, `message`, `field`, `received` and `fix` of an error, for our own format.

    `known`: names of the types that clients know; others are encoded as their nearest base. An exception that
    is neither an EtudeError nor a TimeoutError is encoded as a failure of the server.
    """
    if isinstance(error, TimeoutError):
        return {"kind": "TimeoutError", "message": str(error), "field": None, "received": None, "fix": None}
    if not isinstance(error, EtudeError):
        error = InfrastructureError(f"the server failed: {type(error).__name__}: {error}", field="server")
    names = (base.__name__ for base in type(error).__mro__)
    return {
        "kind": next((name for name in names if name in known), "EtudeError"),
        "message": error.message,
        "field": _field_of(error),
        "received": plain(error.received),
        "fix": error.fix,
    }


def decode_error(
    raw: object,
    known: Mapping[str, type[EtudeError]] = KINDS,
    otherwise: type[EtudeError] = InfrastructureError,
) -> EtudeError | TimeoutError:
    """The typed error that `encode_error` encoded; `otherwise`: the type for unknown or unreadable ones."""
    if not isinstance(raw, dict) or not isinstance(raw.get("message"), str):
        return otherwise("the server sent an unreadable error", field="server", received=plain(raw))
    if raw.get("kind") == "TimeoutError":
        return TimeoutError(raw["message"])
    kind = known.get(str(raw.get("kind")), otherwise)
    return kind(raw["message"], field=raw.get("field"), received=raw.get("received"), fix=raw.get("fix"))


def plain(value: object) -> object:
    """A value as JSON represents it; if that is impossible or long, the beginning of its repr."""
    try:
        text = json.dumps(value)
        if len(text) <= _SHOWN_CHARACTERS:
            return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        pass
    return shorten(value if isinstance(value, str) else repr(value))


def shorten(text: str) -> str:
    """Truncates a text from a request to the length that an answer may echo."""
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _words_of(error: EtudeError) -> str:
    received = shorten(error.received) if isinstance(error.received, str) else error.received
    return str(EtudeError(error.message, field=_field_of(error), received=received, fix=error.fix))


def _field_of(error: EtudeError) -> str | None:
    """The error's field, shortened: a client may have chosen its name."""
    return None if error.field is None else shorten(error.field)


def _headers(error: BaseException, status: int) -> Mapping[str, str]:
    """`retry-after` for an error with a waiting time, and for every 503."""
    seconds = getattr(error, "retry_after_s", RETRY_S if status == 503 else None)
    return {} if seconds is None else {"retry-after": str(max(1, math.ceil(seconds)))}


def _responses(
    kinds: Iterable[tuple[type[BaseException], int]], fields: Mapping[str, str]
) -> dict[int | str, dict[str, Any]]:
    names: dict[int, list[str]] = {404: [RouteError.__name__], 405: [RouteError.__name__]}
    for kind, status in kinds:
        names.setdefault(status, []).append(kind.__name__)
    properties = {name: {} if kind == "any" else {"type": [kind, "null"]} for name, kind in fields.items()}
    error = {"type": "object", "properties": {"error": {"type": "object", "properties": properties}}}
    content = {"application/json": {"schema": error}}
    return {
        status: {"description": ", ".join(found), "content": content}
        for status, found in sorted(names.items())
    }
