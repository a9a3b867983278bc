"""The line to a sandbox server: requests, streams of frames, and what their failures mean.

A request that fails on its way is sent again only if that can do no harm (`again`): reads, and creations,
which carry a key. Nothing waits without a deadline: a quick call has `QUICK_S`, a long one must show a
sign of life every `SILENCE_S`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import httpx

from etude.errors import ConfigError, EtudeError, SandboxError
from etude.sandbox.errors import SandboxLostError
from etude.sandbox.inside.frames import FrameError, Header, Unpacker, pack
from etude.sandbox.interface import OnOutput
from etude.sandbox.wire_types import API, BEAT_S, FRAMES, Encoded, decode_error

QUICK_S = 90.0
"""For the answer of a quick call; the server itself gives its sandbox a minute."""
SILENCE_S = 4 * BEAT_S
"""A server that says nothing for so long during a long call is lost."""
CONNECT_S = 10.0
BATCH_BYTES = 16 << 20
RETRY_S = (0.1, 0.5, 2.0)
"""Pauses before a request is sent again."""

Result = TypeVar("Result")
OnFrame = Callable[[Header, bytes], Any]


def check_address(url: str, field: str = "sandbox.server") -> None:
    """Raises ConfigError for what is no address of a server."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("http", "https") or not rest.strip("/"):
        name = (rest if separator else url).strip("/") or "127.0.0.1:8642"
        raise ConfigError(
            "an address of a server begins with http:// or https://",
            field=field,
            received=url,
            fix=f"http://{name}, or https://{name} if the server has a certificate",
        )


class Connection:
    """One server, for one event loop. Any number of calls may be in flight."""

    def __init__(
        self,
        url: str,
        token: str | None,
        transport: httpx.AsyncBaseTransport | None,
        retry_s: Sequence[float] = RETRY_S,
    ) -> None:
        check_address(url)
        self.url = url.rstrip("/")
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._transport = transport
        self._retry_s = retry_s
        self._client: httpx.AsyncClient | None = None
        self.batch_bytes = BATCH_BYTES
        """The most that one request carries of files; a larger file is streamed."""

    async def call(
        self,
        method: str,
        path: str,
        params: Mapping[str, object] | None = None,
        header: object = None,
        body: bytes | None = None,
        again: bool = False,
    ) -> Any:
        """A quick call; its JSON answer. Raises the typed error that the server names."""
        data = await self.fetch(method, path, params, header, body, again)
        return self.decoded(json.loads, data) if data else None

    async def fetch(
        self,
        method: str,
        path: str,
        params: Mapping[str, object] | None = None,
        header: object = None,
        body: bytes | None = None,
        again: bool = False,
        kind: str = "application/octet-stream",
    ) -> bytes:
        """As `call`; the bytes of the answer. `kind`: media type of the body."""
        content = body if header is None else json.dumps(header).encode()
        kind = kind if header is None else "application/json"

        async def once() -> bytes:
            response = await self._open().request(
                method,
                _target(path, params),
                content=content,
                headers={"content-type": kind},
                timeout=httpx.Timeout(QUICK_S, connect=CONNECT_S),
            )
            if response.status_code >= 300:
                raise self._refusal(response.status_code, response.content)
            return response.content

        return await self._tried(once, again)

    async def long(
        self,
        method: str,
        path: str,
        params: Mapping[str, object] | None = None,
        header: object = None,
        payload: bytes | AsyncIterator[bytes] = b"",
        on_output: OnOutput | None = None,
        on_frame: OnFrame | None = None,
        headers: Mapping[str, str] | None = None,
        again: bool = False,
    ) -> Encoded:
        """A call that may take long; its result. Raises the typed error, SandboxLostError for a torn answer.

        `on_frame` gets every other frame, and may be a coroutine function. Output that was dropped on its
        way is told as a frame `dropped`.
        """

        async def once() -> Encoded:
            body = payload if isinstance(payload, AsyncIterator) else pack(header, payload)  # type: ignore[arg-type]
            async with self._open().stream(
                method,
                _target(path, params),
                content=body,
                headers={"content-type": FRAMES, "accept": FRAMES, **(headers or {})},
                timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S, write=QUICK_S),
            ) as response:
                if response.status_code >= 300:
                    raise self._refusal(response.status_code, await response.aread())
                return await self._result(response, on_output, on_frame)

        return await self._tried(once, again)

    async def close(self) -> None:
        """Closes it; a later call opens it again."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def decoded(self, decode: Callable[[Any], Result], raw: Any) -> Result:
        """What a decoder makes of an answer. Raises SandboxError for an answer that it cannot read."""
        try:
            return decode(raw)
        except EtudeError:
            raise
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            raise SandboxError(
                f"the server's answer cannot be read: {type(error).__name__}: {error}",
                field="sandbox.server",
                received=self.url,
                fix="use the same version of Étude on both sides",
            ) from error

    def lost(self, error: Exception) -> SandboxLostError:
        """The error for a connection that failed."""
        reason = str(error) or type(error).__name__
        return SandboxLostError(
            f"the connection to the sandbox server failed: {reason}",
            field="sandbox.server",
            received=self.url,
            fix="see whether the server runs and can be reached",
        )

    def open_sync(self) -> httpx.Client:
        """A client for the few calls that may not be awaited."""
        return httpx.Client(base_url=self.url, headers=self._headers, timeout=CONNECT_S, trust_env=False)

    def checked(self, response: httpx.Response) -> Any:
        """The JSON of a quick answer. Raises the typed error that the server names."""
        if response.status_code >= 300:
            raise self._refusal(response.status_code, response.content)
        return self.decoded(json.loads, response.content)

    async def _result(
        self, response: httpx.Response, on_output: OnOutput | None, on_frame: OnFrame | None
    ) -> Encoded:
        unpacker = Unpacker()
        async for chunk in response.aiter_raw():
            for header, payload in unpacker.feed(chunk):
                event = header.get("event")
                if event == "result":
                    return header.get("value"), payload
                if event == "error":
                    raise decode_error(header.get("error"))
                if event == "output" and on_output is not None:
                    on_output(int(header["fd"]), payload)
                elif event != "beat" and on_frame is not None:
                    taken = on_frame(header, payload)
                    if taken is not None:
                        await taken
        raise httpx.RemoteProtocolError("the answer ended in its middle")

    async def _tried(self, once: Callable[[], Any], again: bool) -> Any:
        pauses_s = iter(self._retry_s if again else ())
        while True:
            try:
                return await once()
            except (httpx.HTTPError, FrameError) as error:
                pause_s = next(pauses_s, None)
                if pause_s is None:
                    raise self.lost(error) from error
            await asyncio.sleep(pause_s)

    def _refusal(self, status: int, content: bytes) -> Exception:
        try:
            raw = json.loads(content)["error"]
        except (ValueError, TypeError, KeyError):
            return SandboxError(
                f"this is no sandbox server: it answered with status {status}",
                field="sandbox.server",
                received=self.url,
                fix="check the address",
            )
        return decode_error(raw)

    def _open(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(
                base_url=self.url,
                headers=self._headers,
                transport=self._transport,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                # Proxies of the environment are for the outside; sandbox servers are not.
                trust_env=False,
            )
        return self._client


def _target(path: str, params: Mapping[str, object] | None) -> str:
    """Path and query. File names of any bytes pass, lone surrogates too."""
    given = {name: str(value) for name, value in (params or {}).items() if value is not None}
    where = path if path.startswith("/") else f"{API}/{path}"
    return f"{where}?{urlencode(given, errors='surrogatepass', quote_via=quote)}" if given else where
