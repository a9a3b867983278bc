"""Bodies of requests: one frame or JSON, streams of frames; and answers that take long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Request

from etude.errors import UserError
from etude.sandbox.inside.frames import FrameError, Header, Unpacker, pack
from etude.sandbox.wire_types import ERROR_SHAPE
from etude.serving import application
from etude.serving.long_answers import LongAnswer

long_answer = partial(LongAnswer, pack=pack, errors=ERROR_SHAPE)


async def read_request(request: Request, limit_bytes: int) -> tuple[Any, bytes]:
    """A request's header and payload: one frame, or JSON alone. Raises UserError for anything else."""
    return await application.read_request(request, limit_bytes, Unpacker().feed)


async def frames_of(chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[Header, bytes]]:
    """The frames in a stream of bytes. Raises UserError for what is none."""
    unpacker = Unpacker()
    async for chunk in chunks:
        try:
            frames = unpacker.feed(chunk)
        except FrameError as error:
            raise UserError(f"the body holds no frames: {error}", field="body", fix="send frames") from error
        for frame in frames:
            yield frame


def query(request: Request) -> dict[str, str]:
    """The query's fields. File names of any bytes come through, lone surrogates too."""
    text = request.scope["query_string"].decode("latin-1")
    return dict(parse_qsl(text, keep_blank_values=True, errors="surrogatepass"))
