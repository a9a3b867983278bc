"""Which IP addresses are out of reach for a sandbox, whatever its allow-list says.

IPv4: everything that is not globally routed. IPv6: everything outside 2000::/3 and what is reserved
within it; addresses that carry an IPv4 address (mapped, 6to4, NAT64) are judged by the one that they
carry. The list is written out because that of the standard library differs between its versions.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable

from etude.errors import ConfigError
from etude.sandbox.network.rules import HostError, is_address, join_authority, split_authority

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_IPV4 = tuple(
    (ipaddress.IPv4Network(network), reason)
    for network, reason in (
        ("0.0.0.0/8", "unspecified"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared"),
        ("127.0.0.0/8", "loopback"),
        ("168.63.129.16/32", "metadata"),  # the one cloud metadata service at a public address
        ("169.254.0.0/16", "link-local"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "reserved"),
        ("192.0.2.0/24", "reserved"),
        ("192.88.99.0/24", "reserved"),
        ("192.168.0.0/16", "private"),
        ("198.18.0.0/15", "reserved"),
        ("198.51.100.0/24", "reserved"),
        ("203.0.113.0/24", "reserved"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
    )
)
_IPV6 = tuple(
    (ipaddress.IPv6Network(network), reason)
    for network, reason in (
        ("::/128", "unspecified"),
        ("::1/128", "loopback"),
        ("fc00::/7", "private"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "private"),
        ("ff00::/8", "multicast"),
        ("2001::/23", "reserved"),  # Teredo among others
        ("2001:db8::/32", "reserved"),
        ("3fff::/20", "reserved"),
    )
)
_GLOBAL = ipaddress.IPv6Network("2000::/3")
_CARRIERS = (
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),
    (ipaddress.IPv6Network("2002::/16"), 80),
)
"""(network, bits to the right of the IPv4 address that its addresses carry)."""


def forbidden_reason(ip: str, own: Callable[[Address], bool] | None = None) -> str | None:
    """Why an address is out of reach (`loopback`, `private`, `own`, ...); None if it is not.

    `own` tells this machine's own addresses; None: `is_own_address`.
    """
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return "malformed"
    return reserved_reason(address) or ("own" if (own or is_own_address)(address) else None)


def reserved_reason(address: Address) -> str | None:
    """As `forbidden_reason`, from the address alone: this machine's own addresses are not looked up."""
    if isinstance(address, ipaddress.IPv4Address):
        return next((reason for network, reason in _IPV4 if address in network), None)
    carried = _carried(address)
    if carried is not None:
        return reserved_reason(carried)
    for network, reason in _IPV6:
        if address in network:
            return reason
    return None if address in _GLOBAL else "reserved"


def is_own_address(address: Address) -> bool:
    """Whether this machine itself answers at `address`.

    Asked of the kernel's routing: a packet to an own address has that address as its source too.
    Connecting a datagram socket sends nothing.
    """
    if isinstance(address, ipaddress.IPv6Address):
        carried = _carried(address)
        if carried is not None:
            return is_own_address(carried)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0]) == address
    except OSError:
        # No route, or no such family: a connection cannot be made either, and says why.
        return False


def parse_private(entries: Iterable[str]) -> frozenset[tuple[str, int]]:
    """Exact `IP:port` exceptions from all of this, which only an operator makes. Raises ConfigError."""
    parsed: set[tuple[str, int]] = set()
    for text in entries:
        try:
            host, port = split_authority(text, None)
        except HostError as error:
            raise _private_error(text, str(error)) from error
        if not is_address(host) or join_authority(host, port) != text:
            raise _private_error(text, "not an exact address and port")
        parsed.add((host, port))
    return frozenset(parsed)


def _private_error(text: str, message: str) -> ConfigError:
    return ConfigError(
        message, field="allow_private", received=text, fix='write "127.0.0.1:8080" or "[::1]:8080"'
    )


def _carried(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    for network, shift in _CARRIERS:
        if address in network:
            return ipaddress.IPv4Address((int(address) >> shift) & 0xFFFFFFFF)
    return None
