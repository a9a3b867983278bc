"""What the routes share: the server's state, the sandbox of a path, the fields of each request."""

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
from etude.sandbox.server.state import Held, ServerState
from etude.sandbox.template import Template
from etude.sandbox.types import Network, Resources
from etude.sandbox.wire_types import ERROR_SHAPE, encode, receive_file
from etude.serving import application
from etude.serving.application import pieces
from etude.serving.json_bodies import MOST_LEVELS, check_values, is_too_deep
from etude.serving.long_answers import LongAnswer, OutputBuffer, Work
from etude.serving.messages import FRAMES, Encoded, Fields, checked, strings

_NONE = type(None)
_SIZES_BYTES = 8
"""Of a frame's two lengths, the header's first."""
_MOST = 1 << 62
"""Kernels count in 64 bits."""
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
    """A stream of files whose end is missing: its sender has left, or sends something else."""


def state_of(request: Request) -> ServerState:
    """The state of the server that got the request."""
    return request.app.state.sandboxes


State = Annotated[ServerState, Depends(state_of)]


async def _named(state: State, backend: str | None = None) -> tuple[str, SandboxBackend]:
    return state.backend(backend)


Named = Annotated[tuple[str, SandboxBackend], Depends(_named)]
"""The backend of the query, `?backend=`, with its name; without one, the first."""


async def _held(sandbox_id: str, state: State) -> Held:
    return await state.find(sandbox_id)


Box = Annotated[Held, Depends(_held)]
"""The sandbox of the path. One that sleeps is not woken."""


async def read_request(request: Request, limit_bytes: int) -> tuple[Any, bytes]:
    """A request's header and payload: one frame, or JSON alone. Raises UserError for anything else."""
    return await application.read_request(request, limit_bytes, _unpack)


def _unpack(body: bytes) -> list[tuple[Header, bytes]]:
    """The frames of a body whose header is looked at before it is read. Raises FrameError."""
    check_values(body[_SIZES_BYTES : _SIZES_BYTES + int.from_bytes(body[:4], "little")])
    frames = Unpacker().feed(body)
    if any(is_too_deep(header) for header, _ in frames):
        raise UserError("is nested too deeply", field="body", fix=f"at most {MOST_LEVELS} levels")
    return frames


async def frames_of(chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[Header, bytes]]:
    """The frames in a stream of bytes. Raises UserError for what is none."""
    unpacker = Unpacker()
    async for chunk in chunks:
        try:
            frames = unpacker.feed(chunk)
        except FrameError as error:
            raise UserError(f"the body holds no frames: {error}", field="body", fix="send frames") from error
        for header, piece in frames:
            if not isinstance(header, dict):
                raise UserError(
                    "the body holds no frames of a file", field="body", fix="send frames of a file"
                )
            yield header, piece


async def fields_of(request: Request, state: ServerState, fields: Fields) -> dict[str, Any]:
    """The checked fields of a request, those that are null left out."""
    raw, _ = await read_request(request, state.limits.body_bytes)
    named = {name: value for name, value in checked(raw, fields).items() if value is not None}
    strings([*named.get("metadata", {}).values()], "metadata")
    check_numbers(named, "timeout_s", "count")
    return named


def check_numbers(named: dict[str, Any], *names: str) -> None:
    """Raises UserError for fields that are negative, or beyond what a kernel counts."""
    for name in names:
        if not 0 <= named.get(name, 0) < _MOST:
            raise UserError(
                f"must be from 0 to {_MOST - 1}", field=name, received=named[name], fix="correct the request"
            )


def one_of(named: dict[str, Any], name: str, *values: str) -> None:
    """Raises UserError if a field that is there has none of the values."""
    if name in named and named[name] not in values:
        raise UserError("unknown value", field=name, received=named[name], fix="one of " + ", ".join(values))


def resources_of(raw: dict[str, Any] | None) -> Resources | None:
    """Resources as a request names them; what it leaves out has its default."""
    if raw is None:
        return None
    named = {name: value for name, value in checked(raw, _RESOURCES).items() if value is not None}
    for name, value in named.items():
        if not 0 < value < _MOST:
            raise UserError(
                "must be above 0, and what a machine may have",
                field=f"resources.{name}",
                received=value,
                fix="correct the request",
            )
    return Resources(**named)


def network_of(raw: dict[str, Any] | None) -> Network | None:
    """A network as a request names it."""
    if raw is None:
        return None
    return Network(tuple(strings(checked(raw, {"allow": (list,)})["allow"], "network.allow")))


def inline_template(raw: dict[str, Any]) -> Template:
    """A template that is written in the request itself: a name and text files."""
    named = checked(raw, {"name": (str, _NONE), "files": (dict, _NONE)})
    files = named.get("files") or {}
    strings([*files.values()], "template.files")
    try:
        return Template(files, named.get("name") or "template")
    except UnicodeEncodeError as error:
        raise UserError(
            f"holds half a character: {error.reason}", field="template.files", fix="send UTF-8 text"
        ) from error


def pack_answer(header: Header, payload: bytes = b"") -> bytes:
    """The frame of an answer; of one that no frame holds, the error that says so: names and lines are of the
    agent's making."""
    try:
        return pack(header, payload)
    except FrameError:
        return pack({"event": "error", **ERROR_SHAPE.describe(fault_error(faults.ANSWER_TOO_LARGE))[1]})


long_answer = partial(LongAnswer, pack=pack_answer, errors=ERROR_SHAPE)


def is_plain(request: Request, output: OutputBuffer | None = None) -> bool:
    """Whether the answer is JSON alone: the client accepts no frames, and nothing streams."""
    return output is None and FRAMES not in request.headers.get("accept", "*/*")


def long(
    request: Request,
    state: ServerState,
    work: Work,
    output: OutputBuffer | None = None,
    finish: Callable[[asyncio.Task[Encoded]], object] | None = None,
    cleanup: Callable[[], Awaitable[None]] | None = None,
) -> LongAnswer:
    """The answer of a call that may take long."""
    plain = is_plain(request, output)
    return long_answer(work, output, finish, plain=plain, cleanup=cleanup, on_error=state.note_error)


async def encoded(call: Awaitable[object]) -> Encoded:
    """The encoded result of a call."""
    return encode(await call), b""


async def receive_upload(request: Request, state: ServerState, target: Path) -> None:
    """Writes the file that a request streams to `target`.

    Raises TornUploadError for a stream without an end: then nothing of it may be used.
    """
    with receive_file(target) as writer:
        async for header, piece in frames_of(pieces(request, state.limits.upload_bytes)):
            await asyncio.to_thread(writer.take, header, piece)
        if not writer.is_whole:
            raise TornUploadError(
                "the upload ended in its middle", field="body", received=writer.num_bytes, fix="send it again"
            )
