"""The connection to a sandbox server: requests, streams of frames, and the conversion of errors.

Only idempotent requests are retried (`again`): reads, and creations, which carry a key. Nothing waits without
a deadline: a quick call has `QUICK_S`, a long one must receive a frame every `SILENCE_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

from etude.errors import EtudeError, SandboxError
from etude.kit.retry import Backoff, retry_async
from etude.kit.tasks import end_tasks
from etude.sandbox.calls import too_large_error
from etude.sandbox.errors import SandboxLostError
from etude.sandbox.inside.frames import FrameError, Header, Unpacker, pack
from etude.sandbox.types import OnOutput
from etude.sandbox.wire_types import API, decode_error
from etude.serving.client import (
    ONCE,
    Answer,
    Client,
    NoAnswerError,
    Request,
    SyncClient,
    Transport,
    check_address,
    error_in,
)
from etude.serving.messages import BEAT_S, FRAMES, Encoded

QUICK_S = 90.0
"""Time limit of a quick call; the server itself gives its sandbox a minute."""
SILENCE_S = 4 * BEAT_S
"""A server that sends nothing for so long during a long call is lost."""
CONNECT_S = 10.0
BATCH_BYTES = 16 << 20
RETRY = Backoff(base_s=0.1, factor=5.0, most_s=2.0, attempts=4)
"""The retries of requests."""

Result = TypeVar("Result")
OnFrame = Callable[[Header, bytes], Any]
Exchange = Callable[[Header, bytes, OnOutput, OnFrame], Awaitable[object]]
_LAST_OUTPUT_S = 30.0
"""How long to wait for the rest of a command's output once the command has ended."""


class Connection:
    """A connection to one server, for one event loop. Any number of calls may be in flight."""

    def __init__(
        self,
        url: str,
        token: str | None,
        transport: Transport | None,
        backoff: Backoff = RETRY,
        server: str = "sandbox",
    ) -> None:
        """`server`: the kind of server, for messages."""
        self._server, self._field = server, f"{server}.server"
        check_address(url, self._field)
        self.url, self._token = url.rstrip("/"), token
        self._http = Client(
            url,
            token,
            transport=transport,
            backoff=backoff,
            within_s=QUICK_S,
            connect_s=CONNECT_S,
            refusal=self._refusal,
        )
        self.batch_bytes = BATCH_BYTES
        """Most bytes of files in one request."""

    async def call(
        self,
        method: str,
        path: str,
        params: Mapping[str, object] | None = None,
        header: object = None,
        body: bytes | None = None,
        again: bool = False,
    ) -> Any:
        """Makes a quick call, with the JSON `header` or the frame `body`; its JSON answer. Raises the typed
        error that the server sent."""
        request: Request = {"params": params or {}}
        if body is not None:
            request |= {"content": body, "headers": {"content-type": FRAMES}}
        elif header is not None:
            request["json"] = header
        with self._errors_converted():
            answer = await self._http.request(method, _route(path), again=again, **request)
        return self.decode_with(json.loads, answer.content) if answer.content else None

    def call_now(self, path: str, params: Mapping[str, object] | None = None) -> Any:
        """A `call` that blocks the thread, for functions that are not coroutines."""
        client = SyncClient(self.url, self._token, within_s=CONNECT_S, refusal=self._refusal)
        with self._errors_converted(), client:
            answer = client.request("GET", _route(path), params=params or {})
            return self.decode_with(json.loads, answer.content)

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
        """Makes a call that may take long; its result. Raises the typed error, SandboxLostError for a torn
        answer. `on_frame` receives every other frame, such as `dropped` for lost output, and may be a
        coroutine function."""
        try:
            body = payload if isinstance(payload, AsyncIterator) else pack(header, payload)  # type: ignore[arg-type]
        except FrameError as error:
            raise too_large_error(error) from error

        async def once() -> Encoded:
            async with self._http.stream(
                method,
                _route(path),
                params=params or {},
                content=body,
                headers={"content-type": FRAMES, "accept": FRAMES, **(headers or {})},
                within_s=SILENCE_S,
            ) as answer:
                return await self._result(answer, on_output, on_frame)

        with self._errors_converted():
            backoff = self._http.backoff if again else ONCE
            return await retry_async(once, (NoAnswerError, FrameError), backoff)

    async def close(self) -> None:
        """Closes the connection; a later call opens it again."""
        await self._http.close()

    def decode_with(self, decode: Callable[[Any], Result], raw: Any) -> Result:
        """Decodes an answer. Raises SandboxError if `decode` fails."""
        try:
            return decode(raw)
        except EtudeError:
            raise
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            raise SandboxError(
                f"the server's answer cannot be read: {type(error).__name__}: {error}",
                field=self._field,
                received=self.url,
                fix="use the same version of Étude on both sides",
            ) from error

    def lost_error(self, reason: str) -> SandboxLostError:
        """The error for a connection that failed."""
        return SandboxLostError(
            f"the connection to the {self._server} server failed: {reason}",
            field=self._field,
            received=self.url,
            fix="check that the server runs and is reachable",
        )

    @contextlib.contextmanager
    def _errors_converted(self) -> Iterator[None]:
        """Converts errors of the transport into SandboxLostError, which names the server."""
        try:
            yield
        except NoAnswerError as error:
            raise self.lost_error(error.message) from error
        except FrameError as error:
            raise self.lost_error(str(error)) from error

    async def _result(self, answer: Answer, on_output: OnOutput | None, on_frame: OnFrame | None) -> Encoded:
        unpacker = Unpacker()
        async for chunk in answer.aiter_raw():
            for header, payload in unpacker.feed(chunk):
                event = header.get("event")
                if event == "result":
                    return header.get("value"), payload
                if event == "error":
                    raise decode_error(header.get("error"))
                if event == "output" and on_output is not None:
                    on_output(int(header["fd"]), payload)
                elif event != "beat" and on_frame is not None:
                    pending = on_frame(header, payload)
                    if pending is not None:
                        await pending
        raise NoAnswerError("the answer is incomplete")

    def _refusal(self, answer: Answer) -> Exception:
        if error := error_in(answer):
            return decode_error(error)
        return SandboxError(
            f"this is not a {self._server} server: it answered with status {answer.status_code}",
            field=self._field,
            received=self.url,
            fix="check the address",
        )


class OutputStream:
    """Reads the output of a background command in a task of its own."""

    def __init__(self, exchange: Exchange, header: Header, on_output: OnOutput) -> None:
        """`exchange`: makes the call that starts the command."""
        self._started: asyncio.Future[Header] = asyncio.get_running_loop().create_future()
        self.num_dropped_bytes = 0
        self._task = asyncio.ensure_future(self._read(exchange, header, on_output))

    async def wait_started(self) -> Header:
        """The answer to the start of the command. Raises the error that prevented it."""
        try:
            return await asyncio.shield(self._started)
        except asyncio.CancelledError:
            await self.stop()
            raise

    async def drain(self) -> None:
        """Waits for the remaining output of a command that has ended."""
        await asyncio.wait({self._task}, timeout=_LAST_OUTPUT_S)
        await self.stop()

    async def stop(self) -> None:
        """Stops reading."""
        await end_tasks(self._task)

    def on_frame(self, frame: Header, payload: bytes) -> None:
        """Handles a frame other than output."""
        if frame.get("event") == "started" and not self._started.done():
            self._started.set_result(frame["value"])
        elif frame.get("event") == "dropped":
            self.num_dropped_bytes += int(frame["num_bytes"])

    async def _read(self, exchange: Exchange, header: Header, on_output: OnOutput) -> None:
        try:
            await exchange(header, b"", on_output, self.on_frame)
        except EtudeError as error:
            # Once the command runs, `wait` raises the error of a lost server.
            if not self._started.done():
                self._started.set_exception(error)
        finally:
            self._started.cancel()


def _route(path: str) -> str:
    return path if path.startswith("/") else f"{API}/{path}"
