"""Checks a server's address and binds its sockets before anything else is started."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import sys
from collections.abc import Sequence

from etude.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether an address is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_host(host: str, guarded: bool, message: str, fix: str) -> None:
    """Raises ConfigError for an address that other hosts can reach, unless the server is `guarded`."""
    if not guarded and not is_loopback(host):
        raise ConfigError(message, field="host", received=host, fix=f"{fix}, or bind to 127.0.0.1")


def check_token(host: str, has_token: bool) -> None:
    """Raises ConfigError for an address that other hosts can reach, if no token is required."""
    check_host(host, has_token, "other hosts can reach this address, and there is no token", "give a token")


def open_listeners(host: str, port: int) -> list[socket.socket]:
    """Sockets bound to an address, not listening yet; `port` 0: any that is free.

    Raises ConfigError that names the port if it is in use or not permitted, or the host if it is not an
    address of this machine.
    """
    try:
        # asyncio sets TCP_NODELAY only on sockets whose protocol number is TCP's.
        found = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise _not_bound(host, port, error) from error
    listeners: list[socket.socket] = []
    absent: OSError | None = None
    for family, kind, number, _, address in dict.fromkeys(found):
        chosen = port or (listeners[0].getsockname()[1] if listeners else 0)
        try:
            listeners.append(_bound(family, kind, number, (address[0], chosen, *address[2:])))
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                absent = error  # such as ::1 of `localhost`, where there is no IPv6
                continue
            for listener in listeners:
                listener.close()
            raise _not_bound(host, port, error) from error
    if not listeners:
        assert absent is not None, "getaddrinfo gives one address at least"
        raise _not_bound(host, port, absent) from absent
    return listeners


def accepted_hosts(listeners: Sequence[socket.socket], configured: Sequence[str]) -> frozenset[str]:
    """The host names that a server accepts, besides the address at which a connection arrives."""
    on_all = any(listener.getsockname()[0] in ("0.0.0.0", "::") for listener in listeners)
    return frozenset((*configured, *((socket.gethostname(),) if on_all else ())))


def _bound(family: int, kind: int, number: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, kind, number)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def _not_bound(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            "another process listens on this port",
            field="port",
            received=port,
            fix=f"end the process that uses port {port}, or name another with --port",
        )
    if error.errno == errno.EACCES:
        return ConfigError("needs privileges", field="port", received=port, fix="name a port from 1024 on")
    return ConfigError(
        f"is not an address of this machine: {error.strerror or error}",
        field="host",
        received=host,
        fix="use 127.0.0.1, or an address that `ip address` lists",
    )


def say(name: str, words: str) -> None:
    """Prints a line on stderr, not through logging: the program that starts a server waits for it, if it
    still runs."""
    with contextlib.suppress(OSError):
        print(f"{name}: {words}", file=sys.stderr, flush=True)
