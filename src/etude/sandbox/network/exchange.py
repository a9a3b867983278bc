"""What happens on a connection to a server: a tunnel of bytes, or one HTTP request and its response.

Both directions run at once. What unblocks them: bytes, the end of either side, or `idle_s` without a byte
to or from the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from etude.kit.tasks import end_tasks
from etude.sandbox.network import tls
from etude.sandbox.network.messages import (
    MAX_HEAD_BYTES,
    Framing,
    Refusal,
    RequestHead,
    ResponseHead,
    client_head,
    parse_response_head,
    read_body,
    send_body,
    upstream_head,
)
from etude.sandbox.network.streams import CHUNK_BYTES, BufferedStream, Stream, UpstreamError, UpstreamStream

_MAX_INTERIM = 8
TUNNEL_OPEN = b"HTTP/1.1 200 Connection established\r\n\r\n"


class CutError(Exception):
    """The client has its response, or is gone: all that is left is to close. `reason` is for the log."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@asynccontextmanager
async def idle_deadline(upstream: UpstreamStream, idle_s: float) -> AsyncIterator[None]:
    """Raises TimeoutError in its body once nothing has moved to or from the server for `idle_s`."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(idle_s) as deadline:

        def progress() -> None:
            if not deadline.expired():
                deadline.reschedule(loop.time() + idle_s)

        upstream.on_progress = progress
        try:
            yield
        finally:
            upstream.on_progress = None


class Tunnel:
    """The bytes behind a CONNECT, opaque but for the ClientHello with which TLS begins."""

    def __init__(self, client: BufferedStream, upstream: UpstreamStream, host: str, hello_s: float) -> None:
        """`host`: the canonical host of CONNECT; `hello_s`: how long a begun ClientHello may take."""
        self._client = client
        self._upstream = upstream
        self._host = host
        self._hello_s = hello_s

    async def run(self, idle_s: float) -> None:
        """Until both directions have ended. Raises CutError; a half-closed tunnel goes on."""
        await self._client.write(TUNNEL_OPEN)
        try:
            async with idle_deadline(self._upstream, idle_s):
                await run_both(self._upwards(), _pump(self._upstream, self._client))
        except TimeoutError as error:
            raise CutError("idle") from error
        except UpstreamError as error:
            raise CutError("upstream_failed") from error

    async def _upwards(self) -> None:
        """Client to server. The other direction does not wait: some servers speak first."""
        await self._upstream.write(await self._first_bytes())
        await _pump(self._client, self._upstream)

    async def _first_bytes(self) -> bytes:
        """The first bytes of the client; a whole ClientHello, checked, if that is what they begin."""
        data = await self._client.read(CHUNK_BYTES)
        if data[:1] != bytes([tls.HANDSHAKE]):
            return data
        try:
            async with asyncio.timeout(self._hello_s):
                while (hello := tls.parse_client_hello(data)) is None:
                    more = await self._client.read(CHUNK_BYTES)
                    if not more:
                        raise CutError("tls_incomplete")
                    data += more
            tls.check_server_name(hello, self._host)
        except TimeoutError as error:
            raise CutError("tls_timeout") from error
        except Refusal as refusal:
            await self._client.write(tls.UNRECOGNIZED_NAME)
            raise CutError(refusal.reason) from refusal
        return data


class Forwarding:
    """One plain request to its server and the response back."""

    def __init__(self, client: BufferedStream, upstream: UpstreamStream, request: RequestHead) -> None:
        self._client = client
        self._upstream = BufferedStream(upstream)
        self._counted = upstream
        self._request = request
        self._uploaded = False
        self.status = 0
        """Of the response that the client has begun to get; 0: none yet."""

    async def run(self, idle_s: float) -> bool:
        """Whether the client's connection can carry another request. Raises Refusal, CutError."""
        try:
            async with idle_deadline(self._counted, idle_s):
                return await run_both(self._upload(), self._respond(), enough=True)
        except TimeoutError as error:
            raise self._failure(Refusal(504, "idle", "the server did not answer in time")) from error
        except UpstreamError as error:
            raise self._failure(Refusal(502, "upstream_failed", "the server's connection broke")) from error
        except Refusal as refusal:
            raise self._failure(refusal) from refusal

    def _failure(self, refusal: Refusal) -> Refusal | CutError:
        """A response that has begun cannot become another one."""
        return CutError(refusal.reason) if self.status else refusal

    async def _upload(self) -> None:
        framing = self._request.framing
        try:
            await self._upstream.write(upstream_head(self._request))
            await send_body(read_body(self._client, framing), self._upstream, framing.kind == "chunked")
        except UpstreamError:
            # A server may answer and close before it has read all; what it said is still to be read.
            return
        self._uploaded = True

    async def _respond(self) -> bool:
        response = await self._final_head()
        framing = response.framing
        if framing.kind == "close" and self._request.minor_version == 1:
            framing = Framing("chunked")
        elif framing.kind == "chunked" and self._request.minor_version == 0:
            framing = Framing("close")
        keep = self._request.keep_alive and self._uploaded
        self.status = response.status
        await self._client.write(client_head(response, framing, keep))
        try:
            body = read_body(self._upstream, response.framing)
            await send_body(body, self._client, framing.kind == "chunked")
        except Refusal as refusal:
            raise CutError("upstream_" + refusal.reason) from refusal
        return keep

    async def _final_head(self) -> ResponseHead:
        """The response's head, after interim ones (1xx) have been passed on."""
        for _ in range(_MAX_INTERIM):
            try:
                data = await self._upstream.read_head(MAX_HEAD_BYTES)
            except EOFError as error:
                raise Refusal(502, "upstream_ended", "the server ended the connection") from error
            if data is None:
                raise Refusal(502, "bad_response", "the server's answer has a head of more than 32 KiB")
            response = parse_response_head(data, self._request.method)
            if response.status >= 200:
                return response
            if response.status == 101:
                raise Refusal(502, "bad_response", "the server changed to a protocol that nobody asked for")
            if self._request.minor_version == 1:
                await self._client.write(client_head(response, Framing("none"), True))
        raise Refusal(502, "bad_response", "the server sent too many interim answers")


async def run_both(
    upwards: Coroutine[Any, Any, None], downwards: Coroutine[Any, Any, Any], enough: bool = False
) -> Any:
    """Runs both at once; the result of `downwards`, and neither is left running.

    The first exception of either ends the other. `enough`: so does the end of `downwards`.
    """
    up, down = asyncio.ensure_future(upwards), asyncio.ensure_future(downwards)
    try:
        await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        if up.done():
            up.result()
            return await down
        result = down.result()
        if not enough:
            await up
        return result
    finally:
        await end_tasks(up, down)


async def _pump(source: Stream, target: Stream) -> None:
    while data := await source.read(CHUNK_BYTES):
        await target.write(data)
    await target.write_eof()
