"""Who may ask: tokens, compared in constant time, and the names by which a server may be asked.

A web page can point a name of its own at an address that only this machine reaches (DNS rebinding), or send
requests there from its own origin. Every request therefore has to name the server by a name of the
server's, with and without credentials. Accepted in Host, and in Origin where there is one, are the address
at which the connection arrived, configured names, and loopback names: no page from elsewhere can take
these, and a tunnel to another machine begins with them.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping
from typing import TypeVar

from etude.errors import UserError

LOOPBACK_NAMES = frozenset(("127.0.0.1", "localhost", "::1"))
T = TypeVar("T")


class AccessError(UserError):
    """A request without the token that is asked for, or by a name that is not the server's."""


def is_token(given: str, token: str) -> bool:
    """Whether a token is the right one; takes the same time whatever it is."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), token.encode("utf-8", "surrogatepass"))


def find_token(table: Mapping[str, T], given: str) -> T | None:
    """What a table holds for a token; None for an unknown one. Takes the same time whichever it is."""
    found = [value for token, value in table.items() if is_token(given, token)]
    return found[0] if found else None


def bearer_of(headers: Mapping[str, str]) -> str:
    """The bearer token of a request; empty if there is none."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def check_bearer(headers: Mapping[str, str], token: str | None) -> None:
    """Raises AccessError for a request without the token as its bearer; None: no token is asked for."""
    if token is not None and not is_token(bearer_of(headers), token):
        raise AccessError("the token is missing or wrong", field="token", fix="send it as a bearer")


def check_names(headers: Mapping[str, str], address: str | None, allowed: Collection[str] = ()) -> None:
    """Raises AccessError for a request whose Host or Origin is no name of the server's.

    `address`: at which the connection arrived; None: a local socket. `allowed`: configured names.
    """
    known = {*LOOPBACK_NAMES, *(name.lower() for name in allowed)}
    if address is not None:
        known.add(address.lower())
    origin = headers.get("origin")
    for field, host in (("Host", headers.get("host", "")), ("Origin", origin and origin.rpartition("//")[2])):
        if host is not None and _name(host) not in known:
            raise AccessError(
                "this is no name of the server's",
                field=field,
                received=host,
                fix=f"use {address or 'localhost'}, or start the server with --allowed-host",
            )


def _name(host: str) -> str:
    """A host without its port and brackets."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return name.strip("[]").lower()
