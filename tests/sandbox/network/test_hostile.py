"""What a hostile program inside tries: other spellings of the loopback, rebinding, floods, broken bytes."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from benchmarks.simulation.virtual_time import run_virtual
from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox.network.proxy import ProxyLimits
from tests.fakes.network import memory_streams
from tests.sandbox.network.builders import (
    LOOPBACK,
    PATIENT,
    PUBLIC,
    Bench,
    Origin,
    client_hello,
    exchange,
    make_bench,
    read_all,
    serving,
    status_of,
)

HOST = "example.org"
QUICK = ProxyLimits(head_s=0.2, keep_alive_s=0.3)
HASTY = dataclasses.replace(PATIENT, idle_s=0.3)
"""Patient with all but silence."""
SPELLINGS = [
    "127.0.0.1",
    "127.0.0.1.",
    "127.1.2.3",
    "[::1]",
    "[0:0:0:0:0:0:0:1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[64:ff9b::7f00:1]",
    "[2002:7f00:1::]",
    "[fe80::1]",
    "[fe80::1%25eth0]",
    "0.0.0.0",
    "0",
    "127.1",
    "127.0.1",
    "2130706433",
    "017700000001",
    "0x7f000001",
    "0x7f.0.0.1",
    "0177.0.0.1",
    "0x7F.1",
    "169.254.169.254",
    "10.0.0.1",
    "localhost",
    "LOCALHOST",
    "localhost.",
    "a.localhost",
    "localhost.localdomain",
    "ip6-localhost",
]


def request(host: str, port: int, method: str) -> bytes:
    target = f"{host}:{port}" if method == "CONNECT" else f"http://{host}:{port}/"
    return f"{method} {target} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["CONNECT", "GET"])
@pytest.mark.parametrize("host", SPELLINGS)
def test_no_spelling_of_an_inside_address_is_reached(host: str, method: str) -> None:
    async def run() -> None:
        origin = Origin()
        async with serving(origin.handle) as port:
            # Even an operator's careless list: whatever of it parses as a rule is in it.
            careless = [
                f"{h}:{port}" for h in ("127.0.0.1", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "10.0.0.1")
            ]
            bench = make_bench([*careless, "*.example.org"], {"localhost": [[LOOPBACK]]})
            got = await exchange(bench.proxy, request(host, port, method))
        assert status_of(got) in (400, 403)
        assert bench.connected == [] and origin.seen == []
        assert bench.lines[0]["decision"] == "refused"

    asyncio.run(run())


def test_a_name_that_is_rebound_to_the_loopback_is_not_reached() -> None:
    async def run() -> None:
        origin = Origin()
        async with serving(origin.handle) as port:
            bench = make_bench([f"{HOST}:{port}"], {HOST: [[PUBLIC], [LOOPBACK]]})
            first = await _refused_connect(bench, request(HOST, port, "GET"))
            second = await exchange(bench.proxy, request(HOST, port, "GET"))
        # One question for each request, and the connection went to its answer.
        assert bench.names.queries == [HOST, HOST]
        assert bench.connected == [(PUBLIC, port)]
        assert first is None and status_of(second) == 403 and origin.seen == []

    asyncio.run(run())


async def _refused_connect(bench: Bench, sent: bytes) -> None:
    """The bench refuses to leave the machine: an assertion of the builder, not an answer."""
    client, served = memory_streams()
    await client.write(sent)
    await client.write_eof()
    with pytest.raises(AssertionError, match="must not leave"):
        await bench.proxy.serve(served)


def test_a_slow_head_is_ended() -> None:
    async def run() -> None:
        bench = make_bench([HOST], limits=QUICK)
        client, served = memory_streams()
        task = asyncio.create_task(bench.proxy.serve(served))
        started = asyncio.get_running_loop().time()
        with pytest.raises(BrokenPipeError):
            for byte in b"GET http://example.org/ HTTP/1.1\r\nX: " + b"a" * 10_000:
                await client.write(bytes([byte]))
                await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - started < 5
        assert status_of(await client.read(1000)) == 408
        await task
        assert bench.lines[0]["reason"] == "head_timeout"

    run_virtual(run())


def test_a_silent_connection_is_ended_without_a_word() -> None:
    async def run() -> None:
        bench = make_bench([HOST], limits=QUICK)
        assert await exchange(bench.proxy, b"", end=False) == b""
        assert bench.lines == []

    run_virtual(run())


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET http://example.org/ HTTP/1.1\r\nHost: example.org\r\nX: " + b"a" * (1 << 20), 431),
        (b"a" * (1 << 20), 431),
        (b"GET http://example.org/ HTTP/1.1\nHost: example.org\n\n", 400),
        (b"GET http://example.org/ HT", 400),
        (client_hello(HOST), 400),
        (b"\x05\x01\x00", 400),
    ],
)
def test_what_is_no_request_is_refused_at_once(sent: bytes, status: int) -> None:
    async def run() -> None:
        bench = make_bench([HOST])
        got = await exchange(bench.proxy, sent)
        assert status_of(got) == status
        assert len(bench.lines) == 1 and bench.lines[0]["decision"] == "refused"

    asyncio.run(run())


@given(st.binary(min_size=1, max_size=400))
def test_any_bytes_get_one_refusal(sent: bytes) -> None:
    async def run() -> None:
        bench = make_bench([])
        got = await exchange(bench.proxy, sent)
        assert status_of(got) >= 400 and got.count(b"HTTP/1.1 ") == 1
        assert len(bench.lines) == 1 and bench.lines[0]["decision"] == "refused"

    asyncio.run(run())


def test_a_request_hidden_behind_a_badly_chunked_one_is_not_served() -> None:
    async def run() -> None:
        origin = Origin()
        async with serving(origin.handle) as port:
            bench = make_bench([f"{HOST}:{port}"], {HOST: [[LOOPBACK]]}, [f"{LOOPBACK}:{port}"])
            head = f"POST http://{HOST}:{port}/ HTTP/1.1\r\nHost: {HOST}:{port}\r\n".encode()
            hidden = request(HOST, port, "GET")
            got = await exchange(bench.proxy, head + b"Transfer-Encoding: chunked\r\n\r\n0\n\r\n" + hidden)
            both = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
            got += await exchange(bench.proxy, head + both + hidden)
        assert got.count(b"HTTP/1.1 400") == 2 and got.count(b"HTTP/1.1 ") == 2
        assert origin.seen == []

    asyncio.run(run())


def test_an_answer_before_the_end_of_the_body_ends_the_connection() -> None:
    seen: list[bytes] = []

    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        await reader.read()

    async def run() -> None:
        async with serving(hasty) as port:
            bench = make_bench([f"{HOST}:{port}"], {HOST: [[LOOPBACK]]}, [f"{LOOPBACK}:{port}"])
            head = (
                f"POST http://{HOST}:{port}/ HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Length: 9999\r\n\r\n"
            )
            # What follows is a part of the body, whatever it looks like.
            got = await exchange(bench.proxy, head.encode() + request(HOST, port, "GET"), end=False)
        assert status_of(got) == 413 and b"\r\nConnection: close\r\n" in got
        assert got.count(b"HTTP/1.1 ") == 1 and len(seen) == 1 and len(bench.lines) == 1

    asyncio.run(run())


def test_pipelined_requests_are_each_checked() -> None:
    async def run() -> None:
        origin = Origin()
        async with serving(origin.handle) as port:
            bench = make_bench([f"{HOST}:{port}"], {HOST: [[LOOPBACK]]}, [f"{LOOPBACK}:{port}"])
            hosts = (HOST, "127.0.0.1", HOST)
            got = await exchange(bench.proxy, b"".join(request(host, port, "GET") for host in hosts))
        assert [part[:3] for part in got.split(b"HTTP/1.1 ")[1:]] == [b"200", b"403"]
        assert len(origin.seen) == 1

    asyncio.run(run())


def test_connections_and_requests_are_bounded() -> None:
    async def run() -> None:
        limits = dataclasses.replace(PATIENT, num_connections=2, num_requests=4)
        bench = make_bench([HOST], limits=limits)
        held = [memory_streams() for _ in range(2)]
        tasks = [asyncio.create_task(bench.proxy.serve(served)) for _, served in held]
        await asyncio.sleep(0)
        assert status_of(await exchange(bench.proxy, b"x")) == 503
        for client, _ in held:
            client.close()
        await asyncio.gather(*tasks)
        statuses = [status_of(await exchange(bench.proxy, request("a.b", 1, "GET"))) for _ in range(6)]
        assert statuses == [403, 403, 403, 429, 429, 429]
        # The flood itself is not logged beyond its beginning.
        assert [line["status"] for line in bench.lines] == [503, 403, 403, 403, 429]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("response", "status", "reason"),
    [
        (b"", 502, "upstream_ended"),
        (b"HTTP/1.1 200", 502, "upstream_ended"),
        (b"SSH-2.0-x\r\n\r\n", 502, "bad_response"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", 502, "bad_response"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 20, 502, "bad_response"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 40_000, 502, "bad_response"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            502,
            "ambiguous_length",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", 200, "upstream_incomplete"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello", 200, "upstream_bad_chunk"),
    ],
)
def test_a_broken_server_is_a_502_or_a_cut_response(response: bytes, status: int, reason: str) -> None:
    async def run() -> None:
        async with serving(Origin(response).handle) as port:
            bench = make_bench([f"{HOST}:{port}"], {HOST: [[LOOPBACK]]}, [f"{LOOPBACK}:{port}"])
            got = await exchange(bench.proxy, request(HOST, port, "GET"))
        assert status_of(got.rpartition(b"Continue\r\n\r\n")[2]) == status
        assert not got.endswith(b"0\r\n\r\n")
        line = bench.lines[0]
        assert (line["decision"], line["status"], line["reason"]) == ("allowed", status, reason)

    asyncio.run(run())


@pytest.mark.parametrize(("method", "status"), [("GET", 504), ("CONNECT", 200)])
def test_a_server_that_says_nothing_is_left(method: str, status: int) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async def run() -> None:
        async with serving(silent) as port:
            bench = make_bench([f"{HOST}:{port}"], {HOST: [[LOOPBACK]]}, [f"{LOOPBACK}:{port}"], HASTY)
            got = await exchange(bench.proxy, request(HOST, port, method), end=False)
        assert status_of(got) == status
        assert bench.lines[0]["reason"] == "idle"

    asyncio.run(run())


def test_a_client_that_reads_nothing_is_left() -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"x" * (1 << 16))
            await writer.drain()

    async def run() -> None:
        async with serving(flood) as port:
            bench = make_bench([f"{HOST}:{port}"], {HOST: [[LOOPBACK]]}, [f"{LOOPBACK}:{port}"], HASTY)
            client, served = memory_streams()
            await client.write(request(HOST, port, "CONNECT"))
            await asyncio.wait_for(bench.proxy.serve(served), 60)
        assert bench.lines[0]["reason"] == "idle"
        assert len(await read_all(client)) < 1 << 20

    asyncio.run(run())


def test_a_hello_that_never_ends_is_cut() -> None:
    async def run() -> None:
        origin = Origin()
        async with serving(origin.handle) as port:
            for limits, end, reason in ((QUICK, False, "tls_timeout"), (PATIENT, True, "tls_incomplete")):
                bench = make_bench([f"{HOST}:{port}"], {HOST: [[LOOPBACK]]}, [f"{LOOPBACK}:{port}"], limits)
                await exchange(bench.proxy, request(HOST, port, "CONNECT") + client_hello(HOST)[:100], end)
                (line,) = bench.lines
                assert (line["reason"], line["bytes_up"]) == (reason, 0)
        assert origin.seen == []

    asyncio.run(run())


def test_a_client_that_vanishes_leaves_nothing_open() -> None:
    closed = asyncio.Event()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(b"x" * 1000)
                await writer.drain()
                await asyncio.sleep(0.001)
        finally:
            closed.set()

    async def run() -> None:
        async with serving(server) as port:
            bench = make_bench([f"{HOST}:{port}"], {HOST: [[LOOPBACK]]}, [f"{LOOPBACK}:{port}"])
            client, served = memory_streams()
            task = asyncio.create_task(bench.proxy.serve(served))
            await client.write(request(HOST, port, "CONNECT"))
            await client.read(10)
            client.close()
            await asyncio.wait_for(task, 60)
            await asyncio.wait_for(closed.wait(), 60)
        assert bench.proxy.num_open == 0 and bench.lines[0]["reason"] == "client_failed"

    asyncio.run(run())
