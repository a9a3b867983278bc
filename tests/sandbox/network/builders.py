"""Test bench of the network tests: a proxy on loopback, servers behind it, and records of their traffic."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from etude.sandbox.network.log import RequestLog
from etude.sandbox.network.proxy import EgressProxy, ProxyLimits, open_tcp
from etude.sandbox.network.streams import AsyncioStream, Stream
from tests.fakes.network import FakeResolver, MemoryStream, memory_streams

PUBLIC = "93.184.216.34"
"""An address that passes the checks; no test connects to it."""
LOOPBACK = "127.0.0.1"
PATIENT = ProxyLimits(head_s=60.0, keep_alive_s=60.0, connect_s=60.0, idle_s=60.0)
"""A busy machine reaches none of these."""
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Bench:
    """A proxy whose names all lead to loopback servers, and its log."""

    proxy: EgressProxy
    lines: list[dict[str, Any]]
    names: FakeResolver
    port: int = 0
    connected: list[tuple[str, int]] = field(default_factory=list)
    written: asyncio.Event = field(default_factory=asyncio.Event)

    async def logged(self, num_lines: int) -> list[dict[str, Any]]:
        """The log once it has so many lines; tunnels are logged after their client has gone."""
        async with asyncio.timeout(60):
            while len(self.lines) < num_lines:
                self.written.clear()
                await self.written.wait()
        return self.lines


def make_bench(
    rules: Iterable[str],
    names: dict[str, Sequence[Sequence[str]]] | None = None,
    private: Iterable[str] = (),
    limits: ProxyLimits = PATIENT,
) -> Bench:
    """A bench that is not yet listening."""
    lines: list[dict[str, Any]] = []
    connected: list[tuple[str, int]] = []

    async def connect(address: str, port: int) -> Stream:
        connected.append((address, port))
        assert address in (LOOPBACK, "::1"), "a test must not leave this machine"
        return await open_tcp(address, port)

    written = asyncio.Event()

    def write(line: str) -> None:
        lines.append(json.loads(line))
        written.set()

    fake = FakeResolver(names or {})
    proxy = EgressProxy(rules, RequestLog(write), "box-1", fake, connect, limits, private)
    return Bench(proxy, lines, fake, connected=connected, written=written)


@asynccontextmanager
async def listening(bench: Bench) -> AsyncIterator[Bench]:
    """The bench's proxy on a loopback port, for clients that need a socket."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await bench.proxy.serve(AsyncioStream(reader, writer))

    async with serving(serve) as port:
        bench.port = port
        yield bench


@asynccontextmanager
async def serving(handler: Handler, **options: Any) -> AsyncIterator[int]:
    """A loopback server; its port."""
    tasks: set[asyncio.Task[Any]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()
            tasks.discard(task)

    server = await asyncio.start_server(handle, LOOPBACK, 0, **options)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Origin:
    """An HTTP server that answers each request with the same bytes and keeps what it received."""

    response: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
    seen: list[bytes] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reads one request with its body, then answers and closes."""
        head = await reader.readuntil(b"\r\n\r\n")
        body = b""
        lowered = head.lower()
        if b"transfer-encoding: chunked" in lowered:
            body = await reader.readuntil(b"0\r\n\r\n")
        elif b"content-length: " in lowered:
            length = lowered.partition(b"content-length: ")[2].partition(b"\r\n")[0]
            body = await reader.readexactly(int(length))
        self.seen.append(head + body)
        writer.write(self.response)
        await writer.drain()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends back what comes, and ends when the client does."""
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def exchange(proxy: EgressProxy, sent: bytes, end: bool = True) -> bytes:
    """What a client gets that sends `sent` on one connection and then, if `end`, ends its direction."""
    client, served = memory_streams()
    task = asyncio.create_task(proxy.serve(served))
    try:
        async with asyncio.timeout(60):
            await client.write(sent)
            if end:
                await client.write_eof()
            got = await read_all(client)
            await task
    finally:
        client.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return got


async def read_all(stream: MemoryStream) -> bytes:
    """Everything until the other side ends."""
    got = b""
    while data := await stream.read(1 << 16):
        got += data
    return got


def status_of(response: bytes) -> int:
    """The status of a response's first line."""
    return int(response.split(b" ", 2)[1])


def client_hello(server_name: str | None) -> bytes:
    """The first bytes of a TLS client of the standard library."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = context.wrap_bio(incoming, outgoing, server_hostname=server_name)
    try:
        connection.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("a handshake without a server")
