"""Bodies of requests: one frame or JSON, streams of frames; and answers that may take long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Request

from etude.errors import UserError
from etude.sandbox.errors import fault_error
from etude.sandbox.inside import faults
from etude.sandbox.inside.frames import FrameError, Header, Unpacker, pack
from etude.sandbox.wire_types import ERROR_SHAPE
from etude.serving import application
from etude.serving.errors import shorten
from etude.serving.json_bodies import MOST_LEVELS, check_values, is_too_deep
from etude.serving.long_answers import LongAnswer

_SIZES_BYTES = 8
"""Of a frame's two lengths, the header's first."""


def pack_answer(header: Header, payload: bytes = b"") -> bytes:
    """The frame of an answer; of one that no frame holds, the error that says so: names and lines are of the
    agent's making."""
    try:
        return pack(header, payload)
    except FrameError:
        return pack({"event": "error", **ERROR_SHAPE.describe(fault_error(faults.ANSWER_TOO_LARGE))[1]})


long_answer = partial(LongAnswer, pack=pack_answer, errors=ERROR_SHAPE)


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


def query(request: Request) -> dict[str, str]:
    """The query's fields. File names of any bytes come through, lone surrogates too. Raises UserError."""
    text = request.scope["query_string"].decode("latin-1")
    try:
        return dict(parse_qsl(text, keep_blank_values=True, errors="surrogatepass"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"is no UTF-8: {error.reason}", field="query", received=shorten(text), fix="encode it so"
        ) from error
