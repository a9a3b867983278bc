"""Every error of a server as one shape of answer, those of the web framework itself included."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from etude.errors import EtudeError, SandboxError, UserError
from etude.sandbox.server.streams import Json
from etude.sandbox.wire_types import encode_error, status_of

_log = logging.getLogger("etude.sandbox.server")

NoteError = Callable[[Request, Exception], None]
"""Told of every error before it is answered, to be counted."""


def answer_errors(app: FastAPI, note: NoteError, statuses: Mapping[type[Exception], int]) -> None:
    """Registers what answers the errors of `app`'s routes.

    `statuses`: HTTP status by class of error, where it is not `status_of`'s.
    """

    def answer(request: Request, error: Exception, status: int | None = None) -> Response:
        note(request, error)
        own = (given for kind, given in statuses.items() if isinstance(error, kind))
        return Json({"error": encode_error(error)}, status or next(own, None) or status_of(error))

    async def on_error(request: Request, error: Exception) -> Response:
        return answer(request, error)

    async def on_refusal(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "it is registered for these"
        response = answer(request, _refusal(request, error), error.status_code)
        response.headers.update(error.headers or {})
        return response

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError), "it is registered for these"
        return answer(request, _invalid(error))

    app.add_exception_handler(EtudeError, on_error)
    app.add_exception_handler(TimeoutError, on_error)
    app.add_exception_handler(ClientDisconnect, _on_departure)
    app.add_exception_handler(HTTPException, on_refusal)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(Exception, on_error)


async def _on_departure(request: Request, error: Exception) -> Response:
    """A client that left while it sent its request; nobody reads this."""
    _log.info("a client left while it sent its request")
    return Json({"error": encode_error(SandboxError("the request was cut off", field="body"))}, 400)


def _refusal(request: Request, error: HTTPException) -> UserError:
    """No such route, or not with this method."""
    asked = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        headers = error.headers or {}
        allowed = headers.get("allow") or headers.get("Allow")
        return UserError("takes other methods", field="method", received=asked, fix=f"use {allowed}")
    fix = "GET /openapi.json describes every route"
    return UserError(str(error.detail), field="path", received=asked, fix=fix)


def _invalid(error: RequestValidationError) -> UserError:
    """A parameter of the path or the query that is missing or of another type."""
    first = error.errors()[0]
    where, *names = first["loc"]
    return UserError(
        str(first["msg"]),
        field=".".join(map(str, names)) or str(where),
        received=first.get("input"),
        fix=f"send it in the {where}",
    )
