"""HTTP clients with a server's address and token, timeouts, typed errors and retries.

    request, ask ──> a whole answer         all raise NoAnswerError if it does not come whole, and what
    stream       ──> a streamed answer      `refusal` makes of a status beyond 299
    open, pieces ──> the same, closed by the caller

Only idempotent requests are retried (`again`). httpx's own exceptions never leave this module.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TypedDict, Unpack
from urllib.parse import quote, urlencode, urlsplit

import httpx

from etude.errors import ConfigError, EtudeError, InfrastructureError, UserError
from etude.kit.retry import Backoff, retry, retry_async
from etude.serving.errors import decode_error

Answer = httpx.Response
Transport = httpx.AsyncBaseTransport
RawHeaders = Sequence[tuple[bytes, bytes]]
"""Headers as received: names in lower case, values in any encoding."""
Refusal = Callable[[Answer], Exception]
"""Makes the error to raise for an answer whose status is beyond 299."""

ONCE = Backoff(attempts=1)
_WRITE_S = 90.0
"""Least write timeout: a busy server may stop reading a request for a while."""
_CHARACTERS = 300
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=256)
"""Unlimited connections, so that no request queues behind others that wait for their answers."""


class NoAnswerError(InfrastructureError):
    """No answer arrived, or it was incomplete or unreadable."""


class NobodyListensError(NoAnswerError):
    """The connection could not be established."""


class SilentServerError(NoAnswerError):
    """The server sent nothing for longer than the request allows."""


_KINDS: Mapping[type[httpx.HTTPError], type[NoAnswerError]] = {
    httpx.ConnectError: NobodyListensError,
    httpx.ReadTimeout: SilentServerError,
}


class Request(TypedDict, total=False):
    """The optional parts of a request, besides its method and path."""

    json: object
    """The body, encoded as JSON; None: no body."""
    content: bytes | AsyncIterator[bytes]
    """The body as raw bytes."""
    params: Mapping[str, object]
    """Query parameters. Those that are None are left out; file names of any bytes are allowed."""
    headers: Mapping[str, str] | RawHeaders
    within_s: float
    """How long the server may be silent, instead of the client's own limit; `math.inf`: no limit."""


def check_address(url: str, field: str = "url") -> None:
    """Raises ConfigError for a text that cannot be the URL of a server."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is no number
        is_address = False
    if not is_address:
        raise ConfigError(
            "is not a server address: it must begin with http:// or https://",
            field=field,
            received=url,
            fix="write http://HOST:PORT, or https://HOST:PORT for a server with a certificate",
        )


def error_in(answer: Answer) -> dict[str, Any]:
    """The error object of an answer, in our own format or OpenAI's; empty if there is none."""
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return error if isinstance(error, dict) else {}


def message_of(answer: Answer) -> str:
    """The human-readable message of an error answer."""
    return str(error_in(answer).get("message") or answer.text[:_CHARACTERS])


def answer_error(answer: Answer) -> EtudeError:
    """The typed error that an answer encodes, else an error with its status and the beginning of its text."""
    found = error_in(answer)
    if "kind" in found and isinstance(error := decode_error(found), EtudeError):
        return error
    kind = UserError if answer.status_code < 500 else InfrastructureError
    return kind(
        f"the server answered {answer.status_code}: {message_of(answer)}",
        field=found.get("param") or "server",
        received=str(answer.request.url),
    )


def read_json(answer: Answer) -> Any:
    """The JSON of an answer. Raises NoAnswerError if it is not JSON, as when a proxy has answered."""
    try:
        return answer.json()
    except (ValueError, RecursionError) as error:
        raise NoAnswerError(
            "the answer is not JSON", field="server", received=answer.text[:_CHARACTERS]
        ) from error


async def read_events(pieces: AsyncIterator[bytes], limit_bytes: float = math.inf) -> AsyncGenerator[str]:
    """The data of each server-sent event, one line each. Raises NoAnswerError for more than `limit_bytes`.

    Only a line feed ends a line: JSON may contain the other line separators of Unicode.
    """
    rest, size = b"", 0
    async for piece in pieces:
        size += len(piece)
        if size > limit_bytes:
            raise NoAnswerError("the answer is too long", field="stream", received=f"{size} bytes")
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode(errors="replace")
    if rest.startswith(b"data:"):
        yield rest[5:].strip().decode(errors="replace")


class Options(TypedDict, total=False):
    """Options of a client."""

    within_s: float
    """How long the server may be silent; default 30."""
    connect_s: float
    """Time limit for a connection; default 10."""
    backoff: Backoff
    """The retries of requests that are sent `again`."""
    refusal: Refusal | None
    """Makes the error of a status beyond 299; default `answer_error`; None: every status is an answer."""
    headers: Mapping[str, str]
    """Sent with every request."""
    outside: bool
    """Whether to use the proxies that the environment names."""


class _ClientBase:
    """The part that both clients share: arguments of requests and conversion of errors."""

    def __init__(self, url: str, token: str | None, options: Options) -> None:
        self.url = url.rstrip("/")
        self.backoff = options.get("backoff", ONCE)
        self._within_s, self._connect_s = options.get("within_s", 30.0), options.get("connect_s", 10.0)
        self._refusal = options.get("refusal", answer_error)
        headers = {**options.get("headers", {}), **({"authorization": f"Bearer {token}"} if token else {})}
        # The environment's proxies are for outside servers, not for our own.
        self._arguments = {"headers": headers, "trust_env": options.get("outside", False), "limits": _LIMITS}

    def _request_arguments(self, path: str, request: Request) -> dict[str, Any]:
        """httpx's arguments of a request."""
        content, headers = request.get("content"), list[tuple[str | bytes, str | bytes]]()
        if (document := request.get("json")) is not None:
            content = json.dumps(document).encode()
            headers.append(("content-type", "application/json"))
        given = request.get("headers", {})
        headers += given.items() if isinstance(given, Mapping) else given
        within_s = request.get("within_s", self._within_s)
        timeout = httpx.Timeout(
            _seconds(within_s),
            connect=_seconds(min(within_s, self._connect_s)),
            write=_seconds(max(within_s, _WRITE_S)),
        )
        url = self.url + path + _query(request.get("params", {}))
        return {"url": url, "content": content, "headers": headers, "timeout": timeout}

    @contextlib.contextmanager
    def _typed_errors(self) -> Iterator[None]:
        """Converts httpx's exceptions into our own errors."""
        try:
            yield
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
            raise UserError(f"cannot be sent: {error}", field="request", fix="correct the request") from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            kind = next((ours for theirs, ours in _KINDS.items() if isinstance(error, theirs)), NoAnswerError)
            words = f"{type(error).__name__}: {error}".rstrip(": ")
            fix = "check that the server runs and is reachable"
            raise kind(words, field="server", received=self.url or None, fix=fix) from error


class Client(_ClientBase):
    """An asynchronous client of one server, for one event loop; any number of requests may be in flight."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        transport: Transport | None = None,
        **options: Unpack[Options],
    ) -> None:
        """`url`: the base URL, to which paths are appended. `transport`: replaces httpx's own."""
        super().__init__(url, token, options)
        self._arguments |= {"transport": transport}
        self._http: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def is_open(self) -> bool:
        """Whether there may be open connections."""
        return self._http is not None

    async def close(self) -> None:
        """Closes all connections; a later request opens them again."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    async def request(
        self, method: str, path: str, *, again: bool = False, **request: Unpack[Request]
    ) -> Answer:
        """A whole answer."""

        async def once() -> Answer:
            async with self.stream(method, path, **request) as answer:
                await answer.aread()
                return answer

        return await retry_async(once, NoAnswerError, self.backoff if again else ONCE)

    async def ask(self, method: str, path: str, *, again: bool = False, **request: Unpack[Request]) -> Any:
        """The JSON of an answer."""
        return read_json(await self.request(method, path, again=again, **request))

    @contextlib.asynccontextmanager
    async def stream(self, method: str, path: str, **request: Unpack[Request]) -> AsyncIterator[Answer]:
        """An answer whose body the block reads as a stream."""
        answer = await self.open(method, path, **request)
        try:
            with self._typed_errors():
                yield answer
        finally:
            await answer.aclose()

    async def open(self, method: str, path: str, **request: Unpack[Request]) -> Answer:
        """An answer whose body is not read yet; see `pieces`. The caller closes it (`aclose`)."""
        if self._http is None:
            self._http = httpx.AsyncClient(**self._arguments)
        with self._typed_errors():
            built = self._http.build_request(method, **self._request_arguments(path, request))
            answer = await self._http.send(built, stream=True)
        try:
            if self._refusal is not None and not answer.is_success:
                with self._typed_errors():
                    await answer.aread()
                raise self._refusal(answer)
        except BaseException:
            await answer.aclose()
            raise
        return answer

    async def pieces(self, answer: Answer) -> AsyncIterator[bytes]:
        """Streams the body of an answer from `open`."""
        with self._typed_errors():
            async for piece in answer.aiter_bytes():
                yield piece


class SyncClient(_ClientBase):
    """A blocking client of one server. Use as a context manager, or close it."""

    def __init__(self, url: str, token: str | None = None, **options: Unpack[Options]) -> None:
        super().__init__(url, token, options)
        self._http = httpx.Client(**self._arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections."""
        self._http.close()

    def request(self, method: str, path: str, *, again: bool = False, **request: Unpack[Request]) -> Answer:
        """A whole answer."""

        def once() -> Answer:
            with self._typed_errors():
                answer = self._http.request(method, **self._request_arguments(path, request))
            if self._refusal is not None and not answer.is_success:
                raise self._refusal(answer)
            return answer

        return retry(once, NoAnswerError, self.backoff if again else ONCE)

    def ask(self, method: str, path: str, *, again: bool = False, **request: Unpack[Request]) -> Any:
        """The JSON of an answer."""
        return read_json(self.request(method, path, again=again, **request))


def _seconds(value: float) -> float | None:
    """A time limit for httpx, where None means no limit."""
    return None if value == math.inf else value


def _query(params: Mapping[str, object]) -> str:
    given = {name: str(value) for name, value in params.items() if value is not None}
    return "?" + urlencode(given, errors="surrogatepass", quote_via=quote) if given else ""
