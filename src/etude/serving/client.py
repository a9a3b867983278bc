"""The HTTP client of everything here: a server's address and token, timeouts, typed errors, attempts.

    request, ask ──> a whole answer         NoAnswerError where none came, or not all of it; what `refusal`
    stream       ──> an answer as it comes  makes of a status beyond 299
    open, pieces ──> the same, for one that is handed on

A request is sent `again` only if it does the same when it comes twice. What httpx raises stays in here.
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
"""As they came: names in lower case, values in whatever encoding."""
Refusal = Callable[[Answer], Exception]
"""Makes the error to raise of an answer whose status is beyond 299."""

ONCE = Backoff(attempts=1)
_WRITE_S = 90.0
"""A server that works on what it has may take nothing more for a while."""
_CHARACTERS = 300
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=256)
"""However many requests wait for their answers, others wait for none of them."""


class NoAnswerError(InfrastructureError):
    """No answer came, not all of it, or none that can be read."""


class NobodyListensError(NoAnswerError):
    """There is no connection to be made."""


class SilentServerError(NoAnswerError):
    """Nothing came for longer than the request allows."""


_KINDS: Mapping[type[httpx.HTTPError], type[NoAnswerError]] = {
    httpx.ConnectError: NobodyListensError,
    httpx.ReadTimeout: SilentServerError,
}


class Request(TypedDict, total=False):
    """What a request has besides its method and path."""

    json: object
    """Its body; None: no body."""
    content: bytes | AsyncIterator[bytes]
    """Its body as it is."""
    params: Mapping[str, object]
    """Of the query. None is left out; file names of any bytes pass."""
    headers: Mapping[str, str] | RawHeaders
    within_s: float
    """How long the server may be silent, instead of the client's own time; `math.inf`: for ever."""


def check_address(url: str, field: str = "url") -> None:
    """Raises ConfigError for what can never be the address of a server."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is no number
        is_address = False
    if not is_address:
        raise ConfigError(
            "is no address of a server, which begins with http:// or https://",
            field=field,
            received=url,
            fix="http://HOST:PORT, or https://HOST:PORT where it has a certificate",
        )


def error_in(answer: Answer) -> dict[str, Any]:
    """The error object of an answer, in our own shape or OpenAI's; empty where there is none."""
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return error if isinstance(error, dict) else {}


def message_of(answer: Answer) -> str:
    """What a refusal says, for people."""
    return str(error_in(answer).get("message") or answer.text[:_CHARACTERS])


def refused(answer: Answer) -> EtudeError:
    """The typed error that an answer names; without one an error with its status and beginning."""
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
    """The JSON of an answer. Raises NoAnswerError where it is none: something in between has answered."""
    try:
        return answer.json()
    except (ValueError, RecursionError) as error:
        raise NoAnswerError(
            "the answer is not JSON", field="server", received=answer.text[:_CHARACTERS]
        ) from error


async def read_events(pieces: AsyncIterator[bytes], limit_bytes: float = math.inf) -> AsyncGenerator[str]:
    """The data of each server-sent event, one line each. Raises NoAnswerError for more than `limit_bytes`.

    Only a line feed ends a line: JSON may hold what else Unicode takes for one.
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
    """How a client asks."""

    within_s: float
    """How long the server may be silent; 30 unless given."""
    connect_s: float
    """For a connection; 10 unless given."""
    backoff: Backoff
    """Of requests that are sent `again`."""
    refusal: Refusal | None
    """See `refused`, which it is unless given; None: every status is an answer."""
    headers: Mapping[str, str]
    """Of every request."""
    outside: bool
    """Whether proxies that the environment names are on the way."""


class _Server:
    """How one server is asked: what both clients share."""

    def __init__(self, url: str, token: str | None, options: Options) -> None:
        self.url = url.rstrip("/")
        self.backoff = options.get("backoff", ONCE)
        self._within_s, self._connect_s = options.get("within_s", 30.0), options.get("connect_s", 10.0)
        self._refusal = options.get("refusal", refused)
        headers = {**options.get("headers", {}), **({"authorization": f"Bearer {token}"} if token else {})}
        # Proxies of the environment are for the outside; servers of ours are not.
        self._kept = {"headers": headers, "trust_env": options.get("outside", False), "limits": _LIMITS}

    def _sent(self, path: str, request: Request) -> dict[str, Any]:
        """A request's arguments as httpx has them."""
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
    def _typed(self) -> Iterator[None]:
        """Turns what httpx raises into errors of ours."""
        try:
            yield
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
            raise UserError(f"cannot be sent: {error}", field="request", fix="correct the request") from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            kind = next((ours for theirs, ours in _KINDS.items() if isinstance(error, theirs)), NoAnswerError)
            words = f"{type(error).__name__}: {error}".rstrip(": ")
            fix = "see whether the server runs and can be reached"
            raise kind(words, field="server", received=self.url or None, fix=fix) from error


class Client(_Server):
    """Asks one server, for one event loop; any number of requests may be under way."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        transport: Transport | None = None,
        **options: Unpack[Options],
    ) -> None:
        """`url`: what paths are put behind. `transport`: another way to the server."""
        super().__init__(url, token, options)
        self._kept |= {"transport": transport}
        self._http: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def is_open(self) -> bool:
        """Whether there may be connections."""
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
        """An answer whose body the block reads as it comes."""
        answer = await self.open(method, path, **request)
        try:
            with self._typed():
                yield answer
        finally:
            await answer.aclose()

    async def open(self, method: str, path: str, **request: Unpack[Request]) -> Answer:
        """An answer whose body is still to come; see `pieces`. The caller closes it (`aclose`)."""
        if self._http is None:
            self._http = httpx.AsyncClient(**self._kept)
        with self._typed():
            asked = self._http.build_request(method, **self._sent(path, request))
            answer = await self._http.send(asked, stream=True)
        try:
            if self._refusal is not None and not answer.is_success:
                with self._typed():
                    await answer.aread()
                raise self._refusal(answer)
        except BaseException:
            await answer.aclose()
            raise
        return answer

    async def pieces(self, answer: Answer) -> AsyncIterator[bytes]:
        """The body of an answer from `open` as it comes."""
        with self._typed():
            async for piece in answer.aiter_bytes():
                yield piece


class SyncClient(_Server):
    """Asks one server from a thread. Use as a context manager, or close it."""

    def __init__(self, url: str, token: str | None = None, **options: Unpack[Options]) -> None:
        super().__init__(url, token, options)
        self._http = httpx.Client(**self._kept)

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
            with self._typed():
                answer = self._http.request(method, **self._sent(path, request))
            if self._refusal is not None and not answer.is_success:
                raise self._refusal(answer)
            return answer

        return retry(once, NoAnswerError, self.backoff if again else ONCE)

    def ask(self, method: str, path: str, *, again: bool = False, **request: Unpack[Request]) -> Any:
        """The JSON of an answer."""
        return read_json(self.request(method, path, again=again, **request))


def _seconds(value: float) -> float | None:
    """As httpx has it."""
    return None if value == math.inf else value


def _query(params: Mapping[str, object]) -> str:
    given = {name: str(value) for name, value in params.items() if value is not None}
    return "?" + urlencode(given, errors="surrogatepass", quote_via=quote) if given else ""
