"""Access control: bearer tokens, compared in constant time, and the accepted values of Host and Origin.

A web page can point a name of its own at an address that only this machine reaches (DNS rebinding), or send
requests there from its own origin. Every request, with credentials or without, must therefore use one of the
server's own names. Accepted in Host, and in Origin if it is sent, are the address at which the connection
arrived, configured names, and loopback names: no foreign page can have these, and tunnels to another machine
use them.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping
from typing import TypeVar

from etude.errors import UserError

LOOPBACK_NAMES = frozenset(("127.0.0.1", "localhost", "::1"))
T = TypeVar("T")


class AccessError(UserError):
    """A request without the required token, or with a Host or Origin that is not the server's."""


def is_token(given: str, token: str) -> bool:
    """Whether a token is the right one, compared in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), token.encode("utf-8", "surrogatepass"))


def find_token(table: Mapping[str, T], given: str) -> T | None:
    """Looks a token up in constant time; None if it is unknown."""
    found = [value for token, value in table.items() if is_token(given, token)]
    return found[0] if found else None


def bearer_of(headers: Mapping[str, str]) -> str:
    """The bearer token of a request; empty if there is none."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def check_bearer(headers: Mapping[str, str], token: str | None) -> None:
    """Raises AccessError for a request without the bearer token; None: no token is required."""
    if token is not None and not is_token(bearer_of(headers), token):
        raise AccessError("the token is missing or wrong", field="token", fix="send it as a bearer token")


def check_names(headers: Mapping[str, str], address: str | None, allowed: Collection[str] = ()) -> None:
    """Raises AccessError for a request whose Host or Origin is not one of the server's names.

    `address`: where the connection arrived; None: a local socket. `allowed`: configured names.
    """
    known = {*LOOPBACK_NAMES, *(name.lower() for name in allowed)}
    if address is not None:
        known.add(address.lower())
    origin = headers.get("origin")
    for field, host in (("Host", headers.get("host", "")), ("Origin", origin and origin.rpartition("//")[2])):
        if host is not None and _name(host) not in known:
            raise AccessError(
                "is not a name of this server",
                field=field,
                received=host,
                fix=f"use {address or 'localhost'}, or start the server with --allowed-host",
            )


def _name(host: str) -> str:
    """A host without its port and brackets."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return name.strip("[]").lower()
