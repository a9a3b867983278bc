"""The egress proxy: every byte that leaves a sandbox's network namespace passes here.

For each request it checks the host name against the rules and every address of that name, connects to a
checked address, forwards bytes, and logs one line.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from etude.errors import SandboxError
from etude.sandbox.inside.forward import PORT
from etude.sandbox.network.exchange import CutError, Forwarding, Tunnel
from etude.sandbox.network.log import RequestLog, RequestRecord
from etude.sandbox.network.messages import (
    MAX_HEAD_BYTES,
    Refusal,
    RequestHead,
    Target,
    parse_request_head,
)
from etude.sandbox.network.rules import (
    FIELD,
    Rule,
    forbidden_reason,
    is_address,
    is_loopback_name,
    join_authority,
    parse_private,
    parse_rules,
    permits,
)
from etude.sandbox.network.streams import CHUNK_BYTES, AsyncioStream, BufferedStream, Stream, UpstreamStream

OWN_URL = f"http://127.0.0.1:{PORT}"
"""URL at which programs inside reach the server of the sandbox's owner (`own_server`), if allowed."""
_NO_PROXY = "localhost,127.0.0.1,::1"
_REFUSAL_S = 5.0
_LINGER_S = 1.0
_LINGER_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """Limits and timeouts of one sandbox's proxy."""

    head_s: float = 10.0
    """From the first byte of a request's head (or of a ClientHello) to its last."""
    keep_alive_s: float = 30.0
    """Until the first byte of a connection's first or next request."""
    connect_s: float = 10.0
    """To resolve a name and connect to one of its addresses."""
    idle_s: float = 60.0
    """Without a byte to or from the server."""
    own_idle_s: float = 900.0
    """The same for the owner's server, whose long answers of a model take long."""
    num_connections: int = 64
    """Open at the same time."""
    num_requests: int = 100_000
    """In total, which also bounds the log."""
    num_lookups: int = 4
    """Names resolved at the same time."""


Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""Name -> IP addresses, best first. Raises OSError if there are none."""
Connect = Callable[[str, int], Awaitable[Stream]]
"""(IP address, port) -> stream. Raises OSError."""

MAX_ADDRESSES = 4
# Not the event loop's default executor: slow name servers that a sandbox chose must not block other work.
_LOOKUPS = ThreadPoolExecutor(max_workers=16, thread_name_prefix="etude-lookup")


async def resolve_name(name: str) -> Sequence[str]:
    """Addresses of a name, by this machine's resolver. Raises OSError."""
    loop = asyncio.get_running_loop()
    look_up = partial(socket.getaddrinfo, name, None, type=socket.SOCK_STREAM)
    rows = await loop.run_in_executor(_LOOKUPS, look_up)
    return [str(row[4][0]) for row in rows]


async def open_tcp(address: str, port: int) -> Stream:
    """A TCP connection to an IP address. Raises OSError."""
    reader, writer = await asyncio.open_connection(address, port)
    return AsyncioStream(reader, writer)


class Dialer:
    """Connects to targets that the rules permit. Raises Refusal: 403 for forbidden addresses, 502, 504."""

    def __init__(
        self,
        resolve: Resolve,
        connect: Connect,
        allow_private: frozenset[tuple[str, int]],
        deadline_s: float,
        num_lookups: int,
    ) -> None:
        """`deadline_s` bounds resolving and connecting together, `num_lookups` concurrent look-ups."""
        self._resolve = resolve
        self._connect = connect
        self._allow_private = allow_private
        self._deadline_s = deadline_s
        self._lookups = asyncio.Semaphore(num_lookups)

    async def dial(self, target: Target) -> tuple[str, Stream]:
        """Connects to a target: (address, open stream)."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._deadline_s
        try:
            async with asyncio.timeout_at(deadline):
                addresses = await self._addresses(target)
        except TimeoutError as error:
            raise Refusal(504, "resolve_timeout", f"{target.host} was not resolved in time") from error
        # All are checked, including those that are not tried: a mixed answer is suspicious.
        for address in addresses:
            self._check(address, target)
        addresses = addresses[:MAX_ADDRESSES]
        failure: OSError = TimeoutError("no time is left")
        for place, address in enumerate(addresses):
            share_s = (deadline - loop.time()) / (len(addresses) - place)
            try:
                async with asyncio.timeout(share_s):
                    return address, await self._connect(address, target.port)
            except OSError as error:
                failure = error
        if isinstance(failure, TimeoutError):
            raise Refusal(504, "connect_timeout", f"{target.host} did not answer in time") from failure
        reason = f"connect_failed {errno.errorcode.get(failure.errno or 0, '')}".rstrip()
        raise Refusal(502, reason, f"{target.host} cannot be connected to") from failure

    async def _addresses(self, target: Target) -> list[str]:
        """Distinct addresses of the target in canonical form."""
        if is_address(target.host):
            return [target.host]
        if is_loopback_name(target.host):
            raise _forbidden_address(target, "loopback")
        try:
            async with self._lookups:
                found = await self._resolve(target.host)
            unique = list(dict.fromkeys(str(ipaddress.ip_address(address)) for address in found))
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise Refusal(502, "resolve_failed", f"the name {target.host} does not resolve") from error
        except ValueError as error:
            raise Refusal(502, "resolve_failed", f"the name {target.host} has no valid address") from error
        if not unique:
            raise Refusal(502, "resolve_failed", f"the name {target.host} has no address")
        return unique

    def _check(self, address: str, target: Target) -> None:
        if (address, target.port) in self._allow_private:
            return
        reason = forbidden_reason(address)
        if reason is not None:
            raise _forbidden_address(target, reason, address)


def _forbidden_address(target: Target, reason: str, address: str = "") -> Refusal:
    return Refusal(
        403,
        f"address_{reason}",
        f"{target.host} is at an address that no sandbox reaches ({reason}), whatever network.allow says",
        address=address,
    )


class EgressProxy:
    """Serves the connections of one sandbox. One event loop; `serve` may run many times at once."""

    def __init__(
        self,
        rules: Iterable[str | Rule],
        log: RequestLog,
        sandbox_id: str,
        resolve: Resolve = resolve_name,
        connect: Connect = open_tcp,
        limits: ProxyLimits | None = None,
        allow_private: Iterable[str] = (),
        own_server: str = "",
    ) -> None:
        """`rules`: as in `Network.allow`. `allow_private`: exact `IP:port` that are allowed although they are
        private or this machine's own; set by the operator, never by a sandbox. `own_server`: one more, of a
        server of the owner; it gets the requests that name a path alone, which programs send that use the
        proxy's URL as the server's.

        Raises ConfigError for an invalid rule or address.
        """
        self._rules = tuple(rule if isinstance(rule, Rule) else parse_rules([rule])[0] for rule in rules)
        self._log = log
        self._sandbox_id = sandbox_id
        self._limits = limits or ProxyLimits()
        self._own = parse_private([own_server] if own_server else ())
        private = parse_private(allow_private) | self._own
        self._dialer = Dialer(resolve, connect, private, self._limits.connect_s, self._limits.num_lookups)
        self._num_open = 0
        self._num_requests = 0
        self._log_failed = False

    @property
    def num_open(self) -> int:
        """Number of open connections."""
        return self._num_open

    async def serve(self, client: Stream) -> None:
        """Serves one connection until it ends, and closes it. Cancellation closes it at once.

        Raises SandboxError if the log cannot be written; from then on every request is refused.
        """
        self._num_open += 1
        source = BufferedStream(client)
        try:
            if self._num_open > self._limits.num_connections:
                await self._refuse_connection(source)
                return
            while await self._serve_request(source):
                pass
        except OSError:
            # The client is gone.
            return
        finally:
            self._num_open -= 1
            client.close()

    async def _serve_request(self, client: BufferedStream) -> bool:
        """Serves one request; returns whether another may follow."""
        if not await self._wait_for_request(client):
            return False
        record = RequestRecord(self._sandbox_id)
        started = time.monotonic()
        self._num_requests += 1
        logged = self._num_requests <= self._limits.num_requests + 1
        keep, refused = False, None
        try:
            keep = await self._handle(client, record)
        except Refusal as refusal:
            refused = refusal
            record.host = record.host or refusal.received
            record.reason, record.status = refusal.reason, refusal.status
            record.address = refusal.address
        except CutError as cut:
            record.reason = cut.reason
            if cut.reason.startswith("tls_"):
                record.decision = "refused"
        except OSError:
            record.reason = "client_failed"
        except asyncio.CancelledError:
            record.reason = "cancelled"
            raise
        finally:
            record.duration_s = time.monotonic() - started
            try:
                if logged:
                    self._write(record)
            finally:
                if refused is not None:
                    await self._send_refusal(client, refused)
        return keep

    async def _wait_for_request(self, client: BufferedStream) -> bool:
        try:
            async with asyncio.timeout(self._limits.keep_alive_s):
                return await client.wait_readable()
        except TimeoutError:
            return False

    async def _handle(self, client: BufferedStream, record: RequestRecord) -> bool:
        """As `_serve_request`, without the log. Raises Refusal, CutError, OSError (of the client)."""
        if self._num_requests > self._limits.num_requests:
            raise Refusal(429, "too_many_requests", "this sandbox has used up its requests")
        request = await self._read_request(client)
        target = request.target
        record.method, record.host, record.port = request.method, target.host, target.port
        if self._log_failed:
            raise Refusal(503, "log_failed", "requests cannot be logged, so none is served")
        if not permits(self._rules, target.host, target.port):
            name = join_authority(target.host, target.port)
            raise Refusal(403, "no_rule", f'{name} is not allowed: add "{name}" to {FIELD}')
        async with self._connected(request, record) as upstream:
            if request.method == "CONNECT":
                record.status = 200
                await Tunnel(client, upstream, target.host, self._limits.head_s).run(self._limits.idle_s)
                return False
            is_own = (target.host, target.port) in self._own
            forwarding = Forwarding(client, upstream, request)
            try:
                return await forwarding.run(self._limits.own_idle_s if is_own else self._limits.idle_s)
            finally:
                record.status = forwarding.status

    async def _read_request(self, client: BufferedStream) -> RequestHead:
        try:
            async with asyncio.timeout(self._limits.head_s):
                data = await client.read_head(MAX_HEAD_BYTES)
        except TimeoutError as error:
            raise Refusal(408, "head_timeout", "the request's head did not come in time") from error
        except EOFError as error:
            raise Refusal(400, "incomplete", "the connection ended within the request's head") from error
        if data is None:
            raise Refusal(431, "head_too_large", "a head of more than 32 KiB")
        return parse_request_head(data, next((Target(*place) for place in self._own), None))

    @asynccontextmanager
    async def _connected(self, request: RequestHead, record: RequestRecord) -> AsyncIterator[UpstreamStream]:
        """An open connection to the request's target; sets the record's decision, address and bytes."""
        try:
            record.address, stream = await self._dialer.dial(request.target)
        except Refusal as refusal:
            record.decision = "refused" if refusal.status == 403 else "allowed"
            raise
        record.decision = "allowed"
        upstream = UpstreamStream(stream)
        try:
            yield upstream
        finally:
            record.bytes_up, record.bytes_down = upstream.num_sent_bytes, upstream.num_received_bytes
            upstream.close()

    async def _refuse_connection(self, client: BufferedStream) -> None:
        limit = self._limits.num_connections
        refusal = Refusal(503, "too_many_connections", f"this sandbox has {limit} connections open already")
        self._num_requests += 1
        if self._num_requests <= self._limits.num_requests:
            self._write(RequestRecord(self._sandbox_id, reason=refusal.reason, status=refusal.status))
        if self._num_open > 2 * limit:
            return
        await self._send_refusal(client, refusal)

    async def _send_refusal(self, client: BufferedStream, refusal: Refusal) -> None:
        """Sends a refusal, then reads for a moment: closing with unread bytes would reset the connection."""
        try:
            async with asyncio.timeout(_REFUSAL_S):
                await client.write(refusal.response())
                await client.write_eof()
            async with asyncio.timeout(_LINGER_S):
                left = _LINGER_BYTES
                while left > 0 and (data := await client.read(CHUNK_BYTES)):
                    left -= len(data)
        except OSError:
            # Too slow, or gone: the connection is closed next.
            return

    def _write(self, record: RequestRecord) -> None:
        try:
            self._log.write(record)
        except SandboxError:
            self._log_failed = True
            raise


def proxy_environment(port: int = PORT) -> dict[str, str]:
    """Environment variables for commands inside, in both cases: programs differ in which they read."""
    url = f"http://127.0.0.1:{port}"
    names = {"http_proxy": url, "https_proxy": url, "all_proxy": url, "no_proxy": _NO_PROXY}
    return names | {name.upper(): value for name, value in names.items()}
