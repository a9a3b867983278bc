import asyncio
import gzip
import json

import pytest

pytest.importorskip("httpx")

from tests.sandbox.network.builders import make_bench, serving

from etude.agent.web import EgressWeb, SearchProvider, WebLimits, serve_proxy
from etude.errors import ConfigError, InfrastructureError, ToolArgumentError

PAGE = b"<title>T</title><p>hello"


def answer(body=PAGE, status="200 OK", kind="text/html", **headers):
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"Content-Type: {kind}"] if kind else []
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Site:
    """A server on loopback: path -> answer; keeps what it was asked for."""

    def __init__(self, pages):
        self.pages, self.asked = pages, []

    async def handle(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ")[1]
        self.asked.append(head)
        page = self.pages.get(path.partition("?")[0], answer(b"", "404 Not Found"))
        if page is None:
            await asyncio.sleep(30)
        writer.write(page or b"")
        await writer.drain()


def browse(pages, scenario, rules=("site.example.org:{port}",), names=None, **settings):
    """Runs a scenario with a web whose one name leads to a server on loopback."""

    async def run():
        site = Site(pages)
        async with serving(site.handle) as port:
            names_ = {"site.example.org": [["127.0.0.1"]], **(names or {})}
            allow = [rule.format(port=port) for rule in rules]
            bench = make_bench(allow, names_, [f"127.0.0.1:{port}"])
            async with serve_proxy(bench.proxy) as url:
                search = settings.pop("search", None)
                if search is not None:
                    search = SearchProvider(search.format(port=port, query="{query}", limit="{limit}"))
                web = EgressWeb(url, allow, search, **settings)
                try:
                    return await scenario(web, f"http://site.example.org:{port}", site, bench)
                finally:
                    await web.close()

    return asyncio.run(run())


def fetch(pages, path="/", **settings):
    return browse(pages, lambda web, base, site, bench: web.fetch(base + path), **settings)


def test_a_page_comes_through_the_proxy_as_text():
    async def scenario(web, base, site, bench):
        page = await web.fetch(base + "/a?b=c#part")
        return page, base, site.asked, bench.lines, bench.connected

    page, base, asked, lines, connected = browse({"/a": answer()}, scenario)
    assert (page.url, page.title, page.text) == (base + "/a?b=c#part", "T", "hello")
    assert asked[0].startswith("GET /a?b=c HTTP/1.1") and len(connected) == 1
    assert lines[0]["decision"] == "allowed" and lines[0]["host"] == "site.example.org"


def test_what_is_no_html_is_shown_as_it_is():
    assert fetch({"/": answer(b"<a>", kind="text/plain")}).text == "<a>"
    assert fetch({"/": answer(b'{"a": 1}', kind="application/json")}).text == '{"a": 1}'
    assert fetch({"/": answer("é".encode("latin-1"), kind="text/plain; charset=ISO-8859-1")}).text == "é"
    assert fetch({"/": answer(b"\xff", kind="text/plain; charset=punycode")}).text == "\ufffd"
    packed = answer(gzip.compress(b"packed"), kind="text/plain", Content_Encoding="gzip")
    assert fetch({"/": packed}).text == "packed"


def test_large_pages_and_packed_bombs_are_bounded():
    limits = WebLimits(page_bytes=1000)
    assert len(fetch({"/": answer(b"x" * 5000, kind="text/plain")}, limits=limits).text) == 1000
    bomb = answer(gzip.compress(b"x" * 10_000_000), kind="text/plain", Content_Encoding="gzip")
    assert len(fetch({"/": bomb}, limits=WebLimits(page_bytes=20_000)).text) == 20_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "message"),
    [
        (answer(b"", "404 Not Found"), r"no such page \(404\)"),
        (answer(b"", "403 Forbidden"), r"no such page \(403\)"),
        (answer(b"%PDF", kind="application/pdf"), "not text but application/pdf"),
        (answer(b"x", Content_Encoding="br"), "packed as br"),
        (answer(b"not gzip", Content_Encoding="gzip"), "damaged"),
        (answer(b"", "302 Found", Location="/"), "more than 5 redirects"),
        (
            answer(b"", "302 Found", Location="http://other.example.org/"),
            "other.example.org:80 is not allowed",
        ),
        (answer(b"", "302 Found", Location="file:///etc/passwd"), "no URL"),
    ],
)
def test_pages_that_are_missing_or_refused_are_the_agents_matter(page, message):
    with pytest.raises(ToolArgumentError, match=message):
        fetch({"/": page})


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (answer(b"", "503 Service Unavailable"), "answered 503"),
        (answer(b"", "429 Too Many Requests"), "answered 429"),
        (b"nonsense\r\n\r\n", "answered 502|could not be read"),
        (None, "no whole page within 0.5 s"),
    ],
)
def test_servers_that_fail_are_never_an_answer(page, message):
    with pytest.raises(InfrastructureError, match=message):
        fetch({"/": page}, limits=WebLimits(fetch_s=0.5 if page is None else 60))


@pytest.mark.slow
@pytest.mark.parametrize(
    "url",
    [
        "ftp://site.example.org/",
        "site.example.org",
        "http://",
        "http://user:word@site.example.org/",
        "http://site.example.org\\@other.example.org/",
        "http://[::1",
        "http://site.example.org:99999/",
        "http://site.example.org/ a",
        "http://site.example.org/\n",
        "http://127.1/",
        "http://169.254.169.254/latest",
        "http://localhost/",
        "http://other.example.org/",
        "http://site.example.org/" + "x" * 3000,
    ],
)
def test_addresses_that_are_none_or_not_allowed_reach_nothing(url):
    async def scenario(web, base, site, bench):
        with pytest.raises(ToolArgumentError):
            await web.fetch(url)
        return bench.connected

    assert browse({}, scenario, rules=("site.example.org:{port}", "site.example.org:80")) == []


def test_names_that_lead_to_private_addresses_are_refused_by_the_proxy():
    async def scenario(web, base, site, bench):
        with pytest.raises(ToolArgumentError, match=r"403|not allowed"):
            await web.fetch("http://inner.example.org/")
        with pytest.raises(ToolArgumentError, match="not allowed"):
            await web.fetch("https://inner.example.org/")
        return bench.connected

    rules = ("inner.example.org:80", "inner.example.org:443")
    assert browse({}, scenario, rules=rules, names={"inner.example.org": [["10.0.0.8"]]}) == []


def test_a_name_that_does_not_exist_is_the_agents_doing_only_if_it_made_it_up():
    async def scenario(web, base, site, bench):
        with pytest.raises(ToolArgumentError, match="cannot be reached"):
            await web.fetch("https://made-up.example.org/")
        with pytest.raises(InfrastructureError, match="could not connect"):
            await web.fetch("https://gone.example.com/")

    browse({}, scenario, rules=("*.example.org:443", "gone.example.com:443"))


def test_a_dead_proxy_is_never_an_answer():
    async def run():
        web = EgressWeb("http://127.0.0.1:9", ["site.example.org:80"])
        try:
            with pytest.raises(InfrastructureError):
                await web.fetch("http://site.example.org/")
        finally:
            await web.close()

    asyncio.run(run())


ROWS = [
    {"url": "http://site.example.org:{port}/x", "title": "X\n1", "content": "<b>about</b> x"},
    {"url": "http://other.example.org/", "title": "Y", "content": "not allowed"},
]


def search(body, status="200 OK", **settings):
    async def scenario(web, base, site, bench):
        port = base.rpartition(":")[2]
        site.pages["/find"] = answer(body.replace(b"{port}", port.encode()), status, "application/json")
        return await web.search("a b&c", 3), site.asked

    settings.setdefault("search", "http://127.0.0.1:{port}/find?q={query}&n={limit}")
    return browse({}, scenario, **settings)


def test_search_asks_the_provider_and_shows_what_may_be_read():
    results, asked = search(json.dumps({"results": ROWS}).encode())
    assert asked[0].startswith("GET /find?q=a%20b%26c&n=3 ")
    assert [(r.title, r.excerpt) for r in results] == [("X 1", "about x")]
    assert search(b'{"results": []}')[0] == []


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", "500 Oops"),
        (b"", "200 OK"),
        (b"{}", "200 OK"),
        (b'{"results": 3}', "200 OK"),
        (b'{"results": [3]}', "200 OK"),
    ],
)
def test_a_provider_that_fails_is_never_an_empty_list(body, status):
    with pytest.raises(InfrastructureError):
        search(body, status)


def test_search_without_a_provider_and_wrong_settings_are_told():
    with pytest.raises(InfrastructureError, match="no search provider"):
        browse({}, lambda web, base, site, bench: web.search("x", 1))
    with pytest.raises(ConfigError, match="no URL of a search"):
        SearchProvider("https://search.example.org/")
    with pytest.raises(ConfigError):
        EgressWeb("http://127.0.0.1:9", ["*"])
