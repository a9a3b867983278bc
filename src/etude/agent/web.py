"""The web through the sandbox's egress proxy: pages as text, and a search provider.

    EgressWeb --CONNECT, GET--> EgressProxy (allow-list, addresses, log) --> the server

The harness asks on the agent's behalf, so what a sandbox may not reach the harness may not either: every
request, and every step of a redirect, passes the same proxy. The search provider is the operator's own
choice and is asked directly; of its results those are shown that the allow-list lets through.
"""

from __future__ import annotations

import asyncio
import json
import math
import zlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from etude.agent.html_text import html_to_text
from etude.agent.tools.ports import WebPage, WebResult
from etude.errors import ConfigError, InfrastructureError, ToolArgumentError, UserError
from etude.kit.tasks import Tasks
from etude.sandbox.network.proxy import EgressProxy
from etude.sandbox.network.rules import HostError, Rule, join_authority, parse_rules, split_authority
from etude.sandbox.network.streams import AsyncioStream
from etude.serving.client import Answer, Client, NoAnswerError, Options, ProxyRefusedError

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_REFUSED, _UNREACHED = "403", ("502", "504")
_PROVIDER_STATUS = 500
_TOO_MANY = 429
_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/javascript", "application/toml")
_HTML_TYPES = ("text/html", "application/xhtml+xml")
_CHARSET_NAMES = """
utf-8 us-ascii iso-8859-1 iso-8859-2 iso-8859-15 windows-1250 windows-1251 windows-1252 koi8-r shift_jis
euc-jp euc-kr gb2312 gbk gb18030 big5 utf-16
"""
_CHARSETS = frozenset(_CHARSET_NAMES.split())
"""Those that are decoded; pages in others are read as UTF-8."""
_USER_AGENT = "etude-agent"


@dataclass(frozen=True, slots=True)
class WebLimits:
    """Bounds of one fetch or search."""

    page_bytes: int = 2 << 20
    """Of a page as sent and as unpacked; the rest is not read."""
    fetch_s: float = 20.0
    """Redirects included."""
    search_s: float = 20.0
    num_redirects: int = 5
    url_characters: int = 2000


@dataclass(frozen=True, slots=True)
class SearchProvider:
    """A search service that answers in JSON.

    The results are a list of objects with `url`, `title`, and one of `content`, `description`, `snippet`.
    """

    url: str
    """With `{query}` where the query belongs, and `{limit}` if the service wants it."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """For example the service's key."""
    results: tuple[str, ...] = ("results",)
    """Keys on the way to the list: `("web", "results")`; empty: the answer is the list."""

    def __post_init__(self) -> None:
        if "{query}" not in self.url or urlsplit(self.url).scheme not in _PORTS:
            raise ConfigError(
                "no URL of a search",
                field="web.search.url",
                received=self.url,
                fix="https://search.example.org/search?format=json&q={query}",
            )


class EgressWeb:
    """Implements `tools.ports.Web`. One event loop; any number of fetches at once."""

    def __init__(
        self,
        proxy_url: str,
        allow: Iterable[str],
        search: SearchProvider | None = None,
        limits: WebLimits | None = None,
    ) -> None:
        """`proxy_url`: the egress proxy, see `serve_proxy`. `allow`: the rules that it enforces, as in
        `Network.allow`; they are asked here too, so that a refusal can be told from a failure.

        Raises ConfigError for what is no rule.
        """
        self._rules = parse_rules(allow)
        self._search = search
        self._limits = limits or WebLimits()
        options: Options = {
            "headers": {"User-Agent": _USER_AGENT, "Accept-Encoding": "gzip"},
            "within_s": math.inf,  # each fetch and search has a time of its own
            "connect_s": math.inf,
            "refusal": None,
        }
        self._client = Client("", proxy=proxy_url, **options)
        self._direct = Client("", **options)

    async def close(self) -> None:
        """Closes all connections. Idempotent."""
        await self._client.close()
        await self._direct.close()

    async def fetch(self, url: str) -> WebPage:
        """See Web.fetch."""
        try:
            async with asyncio.timeout(self._limits.fetch_s):
                return await self._fetch(url)
        except TimeoutError as error:
            raise _dead(f"no whole page within {self._limits.fetch_s:g} s", url) from error

    async def search(self, query: str, limit: int) -> Sequence[WebResult]:
        """See Web.search. Raises InfrastructureError where no provider is configured or it fails."""
        if self._search is None:
            raise InfrastructureError(
                "no search provider is configured", field="web.search", fix="leave web_search out"
            )
        url = self._search.url.replace("{query}", quote(query, safe="")).replace("{limit}", str(limit))
        try:
            async with asyncio.timeout(self._limits.search_s):
                async with self._direct.stream("GET", url, headers=dict(self._search.headers)) as response:
                    if response.status_code != 200:
                        raise _dead(f"the search provider answered {response.status_code}", query)
                    data = await _read(response, self._limits.page_bytes)
        except (NoAnswerError, UserError, TimeoutError, ToolArgumentError) as error:
            raise _dead(f"the search provider does not answer: {type(error).__name__}", query) from error
        results = _parse_results(data, self._search.results)
        return [result for result in results if self._is_allowed(result.url)][:limit]

    async def _fetch(self, url: str) -> WebPage:
        for _ in range(self._limits.num_redirects + 1):
            rule = self._check(url)
            try:
                async with self._client.stream("GET", url) as response:
                    if response.status_code not in _REDIRECTS or "location" not in response.headers:
                        return await self._page(url, response)
                    url = urljoin(url, response.headers["location"])
            except ProxyRefusedError as error:
                raise _refused(url, error.message, rule) from error
            except UserError as error:
                raise ToolArgumentError("no URL", field="url", received=url[:80]) from error
            except NoAnswerError as error:
                raise _dead(f"the page could not be read: {error.message}", url) from error
        raise ToolArgumentError(f"more than {self._limits.num_redirects} redirects", field="url")

    async def _page(self, url: str, response: Answer) -> WebPage:
        """The page of a final answer. Raises as Web.fetch."""
        status = response.status_code
        if status >= _PROVIDER_STATUS or status == _TOO_MANY:
            raise _dead(f"the server answered {status}", url)
        if not 200 <= status < 300:
            raise ToolArgumentError(f"no such page ({status})", field="url", received=url)
        content_type = response.headers.get("content-type", "text/html")
        kind, _, options = content_type.lower().partition(";")
        kind = kind.strip()
        if not kind.startswith(_TEXT_TYPES) and kind not in _HTML_TYPES:
            raise ToolArgumentError(f"not text but {kind[:40]}", field="url", received=url)
        data = await _read(response, self._limits.page_bytes)
        text = data.decode(_charset(options), "replace")
        if kind not in _HTML_TYPES:
            return WebPage(url, "", text)
        title, text = await asyncio.to_thread(html_to_text, text)
        return WebPage(url, title, text)

    def _check(self, url: str) -> Rule:
        """The rule that allows `url`. Raises ToolArgumentError."""
        if len(url) > self._limits.url_characters:
            raise ToolArgumentError("the URL is too long", field="url")
        host, port = _target(url)
        for rule in self._rules:
            if rule.matches(host, port):
                return rule
        raise ToolArgumentError(f"{join_authority(host, port)} is not allowed", field="url", received=host)

    def _is_allowed(self, url: str) -> bool:
        try:
            self._check(url)
        except ToolArgumentError:
            return False
        return True


@asynccontextmanager
async def serve_proxy(proxy: EgressProxy) -> AsyncIterator[str]:
    """`proxy` on a port of the loopback, for as long as the block lasts: its URL.

    Whoever reaches this machine's loopback may use it meanwhile, and gets no further than the rules.
    """
    tasks = Tasks()

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.start(proxy.serve(AsyncioStream(reader, writer)))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await tasks.close()


def _target(url: str) -> tuple[str, int]:
    """Canonical host and port of a URL. Raises ToolArgumentError for what is none or carries a password."""
    try:
        parts = urlsplit(url)
        authority = parts.netloc
        if parts.scheme not in _PORTS or not url.isprintable() or " " in url:
            raise HostError("a URL begins with http:// or https:// and has no blanks")
        if "@" in authority or "\\" in authority:
            raise HostError("a URL with a user is not fetched")
        return split_authority(authority, _PORTS[parts.scheme], foreign=True)
    except (HostError, ValueError) as error:
        raise ToolArgumentError(f"no URL: {error}", field="url", received=url[:80]) from error


async def _read(response: Answer, limit_bytes: int) -> bytes:
    """The first `limit_bytes` of the body, unpacked. Raises ToolArgumentError for unknown encodings."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", "gzip", "deflate"):
        raise ToolArgumentError(f"the page is packed as {encoding[:20]}", field="url")
    data = bytearray()
    async for piece in response.aiter_raw():
        data += piece
        if len(data) >= limit_bytes:
            break
    if encoding in ("gzip", "deflate"):
        try:
            return zlib.decompressobj(wbits=47).decompress(bytes(data), limit_bytes)
        except zlib.error as error:
            raise ToolArgumentError("the page is damaged", field="url") from error
    return bytes(data[:limit_bytes])


def _charset(options: str) -> str:
    """The character set that a content type names, if it is one that is decoded."""
    name = options.partition("charset=")[2].partition(";")[0].strip(" \"'")
    return name if name in _CHARSETS else "utf-8"


def _refused(url: str, message: str, rule: Rule) -> Exception:
    """What the proxy's refusal to connect means; its message begins with the status."""
    if message.startswith(_REFUSED):
        return ToolArgumentError("the address is not allowed", field="url", received=url)
    if message.startswith(_UNREACHED) and rule.subdomains:
        # The agent chose the name: that it does not exist is no failure of ours.
        return ToolArgumentError("the host cannot be reached", field="url", received=url)
    return _dead(f"the proxy could not connect: {message[:80]}", url)


def _dead(message: str, received: str) -> InfrastructureError:
    return InfrastructureError(message, field="web", received=received[:200])


def _parse_results(data: bytes, keys: Sequence[str]) -> list[WebResult]:
    """Raises InfrastructureError for an answer of another form: never an empty list in its place."""
    try:
        rows: Any = json.loads(data)
        for key in keys:
            rows = rows[key]
        if not isinstance(rows, list):
            raise TypeError("no list")
        return [
            WebResult(str(row["url"]), _one_line(row.get("title")), _excerpt(row))
            for row in rows
            if row.get("url")
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _dead(
            f"the search provider's answer cannot be read: {error!r}"[:160], ".".join(keys)
        ) from error


def _excerpt(row: Mapping[str, Any]) -> str:
    for name in ("content", "description", "snippet"):
        if row.get(name):
            return _one_line(html_to_text(str(row[name]))[1])
    return ""


def _one_line(text: object) -> str:
    return " ".join(str(text or "").split())
