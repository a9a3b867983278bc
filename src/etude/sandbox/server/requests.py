"""Code shared by the routes: dependencies for state and sandbox, and the parsing of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request

from etude.errors import UserError
from etude.sandbox.errors import SandboxLostError, fault_error
from etude.sandbox.inside import faults
from etude.sandbox.inside.frames import FrameError, Header, Unpacker, pack
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.server.state import ServedSandbox, ServerState
from etude.sandbox.template import Template
from etude.sandbox.types import Network, Resources
from etude.sandbox.wire_types import ERROR_SHAPE, encode, receive_file
from etude.serving import application
from etude.serving.application import pieces
from etude.serving.json_bodies import MOST_LEVELS, check_values, is_too_deep
from etude.serving.long_answers import LongAnswer, OutputBuffer, Work
from etude.serving.messages import FRAMES, Encoded, Fields, check_fields, check_strings

_NONE = type(None)
_SIZES_BYTES = 8
"""Size of a frame's two lengths, of which the header's comes first."""
_MOST = 1 << 62
"""Upper bound of numbers, as kernels use 64 bits."""
CREATE: Fields = {
    "backend": (str, _NONE),
    "template": (str, dict, _NONE),
    "resources": (dict, _NONE),
    "network": (dict, _NONE),
    "timeout_s": (float, _NONE),
    "snapshot": (str, _NONE),
    "metadata": (dict, _NONE),
}
TIMEOUT: Fields = {"timeout_s": (float, _NONE)}
PAUSE: Fields = {"mode": (str, _NONE)}
SNAPSHOT: Fields = {"kind": (str, _NONE), "name": (str, _NONE)}
FORK: Fields = {"count": (int, _NONE)}
MIGRATE: Fields = {"url": (str,), "token": (str, _NONE), "backend": (str, _NONE)}
_RESOURCES: Fields = {
    name: (float if name == "cpus" else int, _NONE) for name in Resources.__dataclass_fields__
}


class TornUploadError(SandboxLostError):
    """An uploaded file without its end: the sender disconnected, or sent something else."""


def state_of(request: Request) -> ServerState:
    """The state of the server that received the request."""
    return request.app.state.sandboxes


State = Annotated[ServerState, Depends(state_of)]


async def _named(state: State, backend: str | None = None) -> tuple[str, SandboxBackend]:
    return state.backend(backend)


Named = Annotated[tuple[str, SandboxBackend], Depends(_named)]
"""The backend that `?backend=` names, with its name; by default the first."""


async def _served(sandbox_id: str, state: State) -> ServedSandbox:
    return await state.find(sandbox_id)


Served = Annotated[ServedSandbox, Depends(_served)]
"""The sandbox that the path names. A paused one is not resumed."""


async def read_request(request: Request, limit_bytes: int) -> tuple[Any, bytes]:
    """A request's header and payload, from one frame or from JSON. Raises UserError for anything else."""
    return await application.read_request(request, limit_bytes, _unpack)


def _unpack(body: bytes) -> list[tuple[Header, bytes]]:
    """Decodes the frames of a body, and checks the size of the first header before. Raises FrameError."""
    check_values(body[_SIZES_BYTES : _SIZES_BYTES + int.from_bytes(body[:4], "little")])
    frames = Unpacker().feed(body)
    if any(is_too_deep(header) for header, _ in frames):
        raise UserError("is nested too deeply", field="body", fix=f"nest at most {MOST_LEVELS} levels")
    return frames


async def frames_of(chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[Header, bytes]]:
    """Decodes the frames of a byte stream. Raises UserError for invalid ones."""
    unpacker = Unpacker()
    async for chunk in chunks:
        try:
            frames = unpacker.feed(chunk)
        except FrameError as error:
            raise UserError(f"the body is not framed: {error}", field="body", fix="send frames") from error
        for header, piece in frames:
            if not isinstance(header, dict):
                raise UserError(
                    "the header of a frame is not a JSON object", field="body", fix="send an object"
                )
            yield header, piece


async def fields_of(request: Request, state: ServerState, fields: Fields) -> dict[str, Any]:
    """The validated fields of a request, without those that are null."""
    raw, _ = await read_request(request, state.limits.body_bytes)
    named = {name: value for name, value in check_fields(raw, fields).items() if value is not None}
    check_strings([*named.get("metadata", {}).values()], "metadata")
    check_numbers(named, "timeout_s", "count")
    return named


def check_numbers(named: dict[str, Any], *names: str) -> None:
    """Raises UserError for fields that are negative, or too large for a kernel."""
    for name in names:
        if not 0 <= named.get(name, 0) < _MOST:
            raise UserError(
                f"must be from 0 to {_MOST - 1}", field=name, received=named[name], fix="correct the request"
            )


def check_choice(named: dict[str, Any], name: str, *values: str) -> None:
    """Raises UserError if a field is set to none of the values."""
    if name in named and named[name] not in values:
        raise UserError("unknown value", field=name, received=named[name], fix="one of " + ", ".join(values))


def resources_of(raw: dict[str, Any] | None) -> Resources | None:
    """Parses the resources of a request; omitted ones have their defaults."""
    if raw is None:
        return None
    named = {name: value for name, value in check_fields(raw, _RESOURCES).items() if value is not None}
    for name, value in named.items():
        if not 0 < value < _MOST:
            raise UserError(
                "must be above 0 and within the limits of a machine",
                field=f"resources.{name}",
                received=value,
                fix="correct the request",
            )
    return Resources(**named)


def network_of(raw: dict[str, Any] | None) -> Network | None:
    """Parses the network of a request."""
    if raw is None:
        return None
    return Network(tuple(check_strings(check_fields(raw, {"allow": (list,)})["allow"], "network.allow")))


def inline_template(raw: dict[str, Any]) -> Template:
    """Parses a template that is part of the request: a name and text files."""
    named = check_fields(raw, {"name": (str, _NONE), "files": (dict, _NONE)})
    files = named.get("files") or {}
    check_strings([*files.values()], "template.files")
    try:
        return Template(files, named.get("name") or "template")
    except UnicodeEncodeError as error:
        raise UserError(
            f"is not valid Unicode: {error.reason}", field="template.files", fix="send UTF-8 text"
        ) from error


def pack_answer(header: Header, payload: bytes = b"") -> bytes:
    """Encodes an answer as a frame; one that is too large, which the agent can cause, as an error."""
    try:
        return pack(header, payload)
    except FrameError:
        return pack({"event": "error", **ERROR_SHAPE.describe(fault_error(faults.ANSWER_TOO_LARGE))[1]})


long_answer = partial(LongAnswer, pack=pack_answer, errors=ERROR_SHAPE)


def is_plain(request: Request, output: OutputBuffer | None = None) -> bool:
    """Whether the answer is JSON: the client does not accept frames, and no output is streamed."""
    return output is None and FRAMES not in request.headers.get("accept", "*/*")


def long(
    request: Request,
    state: ServerState,
    work: Work,
    output: OutputBuffer | None = None,
    finish: Callable[[asyncio.Task[Encoded]], object] | None = None,
    cleanup: Callable[[], Awaitable[None]] | None = None,
) -> LongAnswer:
    """The response of a call that may take long."""
    plain = is_plain(request, output)
    return long_answer(work, output, finish, plain=plain, cleanup=cleanup, on_error=state.count_error)


async def encoded(call: Awaitable[object]) -> Encoded:
    """Awaits a call; its encoded result."""
    return encode(await call), b""


async def receive_upload(request: Request, state: ServerState, target: Path) -> None:
    """Writes the file that a request streams to `target`. Raises TornUploadError if its end is missing."""
    with receive_file(target) as writer:
        async for header, piece in frames_of(pieces(request, state.limits.upload_bytes)):
            await asyncio.to_thread(writer.write_frame, header, piece)
        if not writer.is_whole:
            raise TornUploadError(
                "the upload is incomplete", field="body", received=writer.num_bytes, fix="send it again"
            )
