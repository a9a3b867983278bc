"""From a permitted host name to a connection: resolved once, every address checked, the checked one used."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from etude.sandbox.network.addresses import forbidden_reason
from etude.sandbox.network.messages import Refusal, Target
from etude.sandbox.network.rules import is_address, is_loopback_name
from etude.sandbox.network.streams import AsyncioStream, Stream

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""Name -> IP addresses, best first. Raises OSError if there are none."""
Connect = Callable[[str, int], Awaitable[Stream]]
"""(IP address, port) -> stream. Raises OSError."""

MAX_ADDRESSES = 4
# Not the event loop's own threads: slow name servers of a sandbox's choice must not block others' work.
_LOOKUPS = ThreadPoolExecutor(max_workers=16, thread_name_prefix="etude-lookup")


async def resolve_name(name: str) -> Sequence[str]:
    """Addresses of a name as this machine sees them. Raises OSError."""
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
        """`deadline_s` bounds resolving and connecting together, `num_lookups` the names in the works."""
        self._resolve = resolve
        self._connect = connect
        self._allow_private = allow_private
        self._deadline_s = deadline_s
        self._lookups = asyncio.Semaphore(num_lookups)

    async def dial(self, target: Target) -> tuple[str, Stream]:
        """(address, open stream)."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._deadline_s
        try:
            async with asyncio.timeout_at(deadline):
                addresses = await self._addresses(target)
        except TimeoutError as error:
            raise Refusal(504, "resolve_timeout", f"{target.host} was not resolved in time") from error
        # All are checked, also those beyond the few that are tried: a mixed answer is no honest one.
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
            raise _out_of_reach(target, "loopback")
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
            raise _out_of_reach(target, reason)


def _out_of_reach(target: Target, reason: str) -> Refusal:
    return Refusal(
        403,
        f"address_{reason}",
        f"{target.host} is at an address that no sandbox reaches ({reason}), whatever network.allow says",
    )
