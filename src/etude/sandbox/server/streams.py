"""Bodies of requests: one frame or JSON, streams of frames; and answers that take long."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Request

from etude.errors import UserError
from etude.sandbox.inside.frames import FrameError, Header, Unpacker, pack
from etude.sandbox.wire_types import ERROR_SHAPE
from etude.serving import application
from etude.serving.errors import shorten
from etude.serving.json_bodies import MOST_LEVELS, check_values, is_too_deep
from etude.serving.long_answers import LongAnswer

_PATH_BYTES = 4096
_SIZES_BYTES = 8
"""Of a frame's two lengths, the header's first."""

long_answer = partial(LongAnswer, pack=pack, errors=ERROR_SHAPE)


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
            check_header(header)
            yield header, piece


def check_header(header: object) -> None:
    """Raises UserError unless it is an object, whose `path`, if it has one, can be a file's."""
    path = header.get("path", "") if isinstance(header, dict) else None
    try:
        is_path = isinstance(path, str) and "\0" not in path and len(os.fsencode(path)) < _PATH_BYTES
    except UnicodeEncodeError:
        is_path = False
    if not is_path:
        raise UserError("the body holds no frames of files", field="body", fix="send frames of files")


def query(request: Request) -> dict[str, str]:
    """The query's fields. File names of any bytes come through, lone surrogates too. Raises UserError."""
    text = request.scope["query_string"].decode("latin-1")
    try:
        return dict(parse_qsl(text, keep_blank_values=True, errors="surrogatepass"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"is no UTF-8: {error.reason}", field="query", received=shorten(text), fix="encode it so"
        ) from error
