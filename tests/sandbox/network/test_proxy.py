"""The proxy between ordinary clients and loopback servers."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from etude.errors import ConfigError, SandboxError
from etude.sandbox.network.log import RequestLog
from etude.sandbox.network.proxy import EgressProxy, ProxyLimits, proxy_environment
from tests.fakes.network import FakeResolver, memory_streams
from tests.sandbox.network.builders import (
    LOOPBACK,
    PATIENT,
    Bench,
    Handler,
    Origin,
    client_hello,
    echo,
    exchange,
    listening,
    make_bench,
    read_all,
    serving,
    status_of,
)

HOST = "example.org"


async def with_server(
    handler: Handler,
    body: Callable[[Bench, int], Any],
    limits: ProxyLimits = PATIENT,
    rules: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """Runs `body` with a listening bench for which example.org is a loopback server."""
    async with serving(handler, **options) as port:
        bench = make_bench([f"{HOST}:{port}", *rules], {HOST: [[LOOPBACK]]}, [f"{LOOPBACK}:{port}"], limits)
        async with listening(bench):
            return await body(bench, port)


def ask(bench: Bench, method: str, url: str, **options: Any) -> tuple[int, bytes, http.client.HTTPMessage]:
    """One request of the standard library's client through the proxy."""
    connection = http.client.HTTPConnection(LOOPBACK, bench.port, timeout=60)
    try:
        connection.request(method, url, **options)
        response = connection.getresponse()
        return response.status, response.read(), response.headers
    finally:
        connection.close()


def test_a_plain_request_reaches_an_allowed_host() -> None:
    origin = Origin()

    async def body(bench: Bench, port: int) -> None:
        url = f"http://{HOST}:{port}/a?token=secret"
        headers = {"Authorization": "Bearer secret", "Proxy-Authorization": "Basic secret"}
        status, data, _ = await asyncio.to_thread(ask, bench, "GET", url, headers=headers)
        assert (status, data) == (200, b"hello")
        (line,) = await bench.logged(1)
        assert line["decision"] == "allowed" and line["reason"] == ""
        assert (line["host"], line["port"], line["method"], line["status"]) == (HOST, port, "GET", 200)
        assert (line["address"], line["sandbox"]) == (LOOPBACK, "box-1")
        assert line["bytes_up"] == len(origin.seen[0]) and line["bytes_down"] == len(origin.response)
        assert line["duration_s"] > 0
        assert "secret" not in json.dumps(line)
        assert origin.seen[0].startswith(b"GET /a?token=secret HTTP/1.1\r\nHost: example.org:")
        assert b"Authorization: Bearer secret" in origin.seen[0]
        assert b"Proxy-Authorization" not in origin.seen[0]

    asyncio.run(with_server(origin.handle, body))


@pytest.mark.parametrize("method", ["GET", "CONNECT"])
def test_what_no_rule_names_is_refused_with_the_rule_to_add(method: str) -> None:
    bench = make_bench(["example.org"])
    target = "http://other.example:8080/" if method == "GET" else "other.example:8080"
    got = asyncio.run(
        exchange(bench.proxy, f"{method} {target} HTTP/1.1\r\nHost: other.example:8080\r\n\r\n".encode())
    )
    assert status_of(got) == 403
    assert b'add "other.example:8080" to network.allow' in got
    assert bench.names.queries == [] and bench.connected == []
    assert (bench.lines[0]["decision"], bench.lines[0]["reason"]) == ("refused", "no_rule")
    assert (bench.lines[0]["host"], bench.lines[0]["port"]) == ("other.example", 8080)


@pytest.mark.parametrize(
    ("response", "data"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n", b"hello"),
        (b"HTTP/1.0 200 OK\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 599 Odd\r\nContent-Length: 0\r\n\r\n", b""),
    ],
)
def test_every_framing_of_a_response_arrives(response: bytes, data: bytes) -> None:
    async def body(bench: Bench, port: int) -> None:
        _, got, _ = await asyncio.to_thread(ask, bench, "GET", f"http://{HOST}:{port}/")
        assert got == data
        assert (await bench.logged(1))[0]["reason"] == ""

    asyncio.run(with_server(Origin(response).handle, body))


def test_bodies_of_both_framings_arrive_at_the_server() -> None:
    origin = Origin()

    async def body(bench: Bench, port: int) -> None:
        url = f"http://{HOST}:{port}/"
        await asyncio.to_thread(ask, bench, "POST", url, body=b"x" * 200_000)
        await asyncio.to_thread(ask, bench, "POST", url, body=iter([b"ab", b"cde"]), encode_chunked=True)

    asyncio.run(with_server(origin.handle, body))
    assert origin.seen[0].endswith(b"\r\n\r\n" + b"x" * 200_000)
    assert origin.seen[1].endswith(b"\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n")


def test_a_head_request_has_a_length_and_no_body() -> None:
    async def body(bench: Bench, port: int) -> None:
        response = await asyncio.to_thread(ask, bench, "HEAD", f"http://{HOST}:{port}/")
        assert (response[0], response[1], response[2]["Content-Length"]) == (200, b"", "5")

    asyncio.run(with_server(Origin(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n").handle, body))


def test_a_kept_connection_is_checked_anew_for_each_request() -> None:
    origin = Origin()

    def client(bench: Bench, port: int) -> list[int]:
        connection = http.client.HTTPConnection(LOOPBACK, bench.port, timeout=60)
        statuses = []
        for host in (HOST, HOST, "evil.example"):
            connection.request("GET", f"http://{host}:{port}/")
            connection.auto_open = 0  # type: ignore[assignment]
            response = connection.getresponse()
            response.read()
            statuses.append(response.status)
        connection.close()
        return statuses

    async def body(bench: Bench, port: int) -> None:
        assert await asyncio.to_thread(client, bench, port) == [200, 200, 403]
        assert [line["status"] for line in await bench.logged(3)] == [200, 200, 403]

    asyncio.run(with_server(origin.handle, body))


def test_a_tunnel_carries_a_tls_session() -> None:
    async def body(bench: Bench, port: int) -> bytes:
        def client() -> bytes:
            connection = http.client.HTTPSConnection(
                LOOPBACK, bench.port, timeout=60, context=_anonymous(False)
            )
            connection.set_tunnel(HOST, port)
            connection.request("GET", "/secret")
            got = connection.getresponse().read()
            connection.close()
            return got

        got = await asyncio.to_thread(client)
        (line,) = await bench.logged(1)
        assert (line["method"], line["host"], line["status"]) == ("CONNECT", HOST, 200)
        # This client leaves the server's farewell unread, which resets its connection.
        assert line["reason"] in ("", "client_failed")
        assert line["bytes_up"] > 300 and line["bytes_down"] > 100
        return got

    assert asyncio.run(with_server(Origin().handle, body, ssl=_anonymous(True))) == b"hello"


def _anonymous(server: bool) -> ssl.SSLContext:
    """TLS without certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("aNULL:@SECLEVEL=0")
    return context


@pytest.mark.parametrize("name", ["evil.example", None])
def test_a_tunnel_to_one_host_under_the_name_of_another_is_cut(name: str | None) -> None:
    async def body(bench: Bench, port: int) -> tuple[bytes, dict[str, Any]]:
        head = f"CONNECT {HOST}:{port} HTTP/1.1\r\nHost: {HOST}:{port}\r\n\r\n".encode()
        return await exchange(bench.proxy, head + client_hello(name)), bench.lines[0]

    got, line = asyncio.run(with_server(echo, body))
    assert got == b"HTTP/1.1 200 Connection established\r\n\r\n" + b"\x15\x03\x03\x00\x02\x02\x70"
    assert line["decision"] == "refused" and line["reason"].startswith("tls_name_")
    assert line["bytes_up"] == 0


def test_the_right_hello_arrives_unchanged_in_small_pieces() -> None:
    hello = client_hello(HOST)

    async def body(bench: Bench, port: int) -> bytes:
        client, served = memory_streams()
        task = asyncio.create_task(bench.proxy.serve(served))
        await client.write(f"CONNECT {HOST}:{port} HTTP/1.1\r\nHost: {HOST}:{port}\r\n\r\n".encode())
        for at in range(0, len(hello), 50):
            await client.write(hello[at : at + 50])
            await asyncio.sleep(0)
        await client.write_eof()
        got = await read_all(client)
        await task
        return got.partition(b"\r\n\r\n")[2]

    assert asyncio.run(with_server(echo, body)) == hello


def test_a_server_that_speaks_first_is_heard() -> None:
    async def banner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-test\r\n")
        await writer.drain()
        await reader.read()

    async def body(bench: Bench, port: int) -> None:
        client, served = memory_streams()
        task = asyncio.create_task(bench.proxy.serve(served))
        await client.write(f"CONNECT {HOST}:{port} HTTP/1.0\r\n\r\n".encode())
        got = b""
        while b"SSH-2.0-test" not in got:
            got += await asyncio.wait_for(client.read(100), 60)
        client.close()
        await asyncio.wait_for(task, 60)

    asyncio.run(with_server(banner, body))


def test_a_half_closed_tunnel_goes_on_in_the_other_direction() -> None:
    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.read()  # until the client has ended its direction
        for piece in (b"answer to ", asked):
            await asyncio.sleep(0.02)
            writer.write(piece)
            await writer.drain()

    async def body(bench: Bench, port: int) -> bytes:
        return await exchange(bench.proxy, f"CONNECT {HOST}:{port} HTTP/1.0\r\n\r\nquestion".encode())

    assert asyncio.run(with_server(late, body)).endswith(b"\r\n\r\nanswer to question")


def test_a_redirect_to_the_loopback_is_refused_when_it_is_followed() -> None:
    origin = Origin()

    async def body(bench: Bench, port: int) -> None:
        location = f"http://127.0.0.1:{port}/admin"
        origin.response = f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()
        handler = urllib.request.ProxyHandler({"http": f"http://{LOOPBACK}:{bench.port}"})
        opener = urllib.request.build_opener(handler)
        with pytest.raises(urllib.error.HTTPError) as caught:
            await asyncio.to_thread(opener.open, f"http://{HOST}:{port}/", None, 60)
        with caught.value:
            assert caught.value.code == 403
        assert [line["reason"] for line in await bench.logged(2)] == ["", "no_rule"]
        assert len(origin.seen) == 1

    asyncio.run(with_server(origin.handle, body))


@pytest.mark.foreign
def test_curl_and_its_environment_work() -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")

    async def body(bench: Bench, port: int) -> None:
        async def run(*options: str) -> subprocess.CompletedProcess[bytes]:
            command = [curl, "-sS", "-m", "60", *options, f"http://{HOST}:{port}/"]
            env = proxy_environment(bench.port)
            return await asyncio.to_thread(subprocess.run, command, env=env, capture_output=True, check=False)

        assert (await run()).stdout == b"hello"
        assert (await run("--proxytunnel")).stdout == b"hello"
        assert (await run("-d", "x" * 5000)).stdout == b"hello"
        assert b"403" in (await run("--proxytunnel", "--connect-to", "::evil.example:443")).stderr
        assert [line["method"] for line in await bench.logged(4)] == ["GET", "CONNECT", "POST", "CONNECT"]

    asyncio.run(with_server(Origin().handle, body))


def test_a_cancelled_connection_is_closed_and_logged() -> None:
    closed = asyncio.Event()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        closed.set()

    async def body(bench: Bench, port: int) -> None:
        client, served = memory_streams()
        task = asyncio.create_task(bench.proxy.serve(served))
        await client.write(f"CONNECT {HOST}:{port} HTTP/1.0\r\n\r\n".encode())
        assert (await client.read(100)).startswith(b"HTTP/1.1 200")
        assert bench.proxy.num_open == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(closed.wait(), 60)
        assert served.closed and bench.proxy.num_open == 0
        assert bench.lines[0]["reason"] == "cancelled"

    asyncio.run(with_server(server, body))


def test_nothing_is_served_that_cannot_be_logged() -> None:
    def full(line: str) -> None:
        raise OSError(28, "No space left on device")

    async def run() -> None:
        names = FakeResolver({})
        proxy = EgressProxy([HOST], RequestLog(full), "box", names)
        for expected in (502, 503):
            client, served = memory_streams()
            await client.write(b"CONNECT example.org:443 HTTP/1.0\r\n\r\n")
            await client.write_eof()
            with pytest.raises(SandboxError):
                await proxy.serve(served)
            assert served.closed
            assert status_of(await client.read(1000)) == expected
        assert names.queries == [HOST]

    asyncio.run(run())


def test_a_wrong_rule_or_exception_is_a_config_error() -> None:
    log = RequestLog(lambda line: None)
    with pytest.raises(ConfigError):
        EgressProxy(["*"], log, "box")
    with pytest.raises(ConfigError):
        EgressProxy([], log, "box", allow_private=["localhost:80"])
