"""Bodies of HTTP/1.1 messages: read by their framing, written in chunks or as they are."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from etude.sandbox.network.messages import Framing, Refusal, parse_headers
from etude.sandbox.network.streams import CHUNK_BYTES, BufferedStream, Stream

LAST_CHUNK = b"0\r\n\r\n"
_MAX_LINE_BYTES = 1 << 10
_MAX_TRAILER_BYTES = 8 << 10
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,12})[ \t]*(?:;[\x20-\x7e\t\x80-\xff]*)?\r\n")


async def read_body(source: BufferedStream, framing: Framing) -> AsyncIterator[bytes]:
    """The body in pieces as they come. Raises Refusal if it is cut short or badly chunked."""
    if framing.kind == "length":
        async for piece in _read_exactly(source, framing.length_bytes):
            yield piece
    elif framing.kind == "chunked":
        async for piece in _read_chunked(source):
            yield piece
    elif framing.kind == "close":
        while piece := await source.read(CHUNK_BYTES):
            yield piece


async def send_body(pieces: AsyncIterator[bytes], to: Stream, chunked: bool) -> None:
    """Writes the pieces on, each as one chunk if `chunked`."""
    async for piece in pieces:
        await to.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
    if chunked:
        await to.write(LAST_CHUNK)


async def _read_exactly(source: BufferedStream, num_bytes: int) -> AsyncIterator[bytes]:
    while num_bytes:
        piece = await source.read(min(num_bytes, CHUNK_BYTES))
        if not piece:
            raise Refusal(400, "incomplete", "the body ended before its announced length")
        num_bytes -= len(piece)
        yield piece


async def _read_chunked(source: BufferedStream) -> AsyncIterator[bytes]:
    while True:
        line = await source.read_line(_MAX_LINE_BYTES)
        match = _CHUNK_LINE.fullmatch(line or b"")
        if match is None:
            raise Refusal(400, "bad_chunk", "not the first line of a chunk")
        size = int(match[1], 16)
        if not size:
            break
        async for piece in _read_exactly(source, size):
            yield piece
        if await source.read_line(_MAX_LINE_BYTES) != b"\r\n":
            raise Refusal(400, "bad_chunk", "a chunk longer than its announced size")
    await _drop_trailers(source)


async def _drop_trailers(source: BufferedStream) -> None:
    """Reads the headers after the last chunk; they are checked and not passed on."""
    trailers = b""
    while (line := await source.read_line(_MAX_LINE_BYTES)) != b"\r\n":
        trailers += line or b""
        if line is None or len(trailers) > _MAX_TRAILER_BYTES:
            raise Refusal(400, "bad_chunk", "trailers that do not end")
    if trailers:
        parse_headers(trailers, 400)
