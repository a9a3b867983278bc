"""Egress rules: the hosts and ports that an allow-list permits, and the IP addresses that are forbidden
whatever it says. A request must pass both.

Host names are compared in one form: ASCII (IDNA), lower case, without a trailing dot.

Forbidden are all IPv4 addresses that are not globally routed; of IPv6, everything outside 2000::/3 and what
is reserved within it. Addresses that embed an IPv4 address (mapped, 6to4, NAT64) are judged by that address.
The list is written out because that of the standard library differs between its versions."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from etude.errors import ConfigError

FIELD = "network.allow"
DEFAULT_PORT = 443
_FIX = 'write "host:port", "host" (port 443), "*.domain:port" or "[IPv6]:port"'
_MAX_NAME_CHARS = 253
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_AMBIGUOUS = frozenset("\u00df\u03c2\u200c\u200d")
"""Characters that IDNA 2003 and IDNA 2008 encode differently."""


class HostError(ValueError):
    """A text that is not a host, or is one in a form that programs parse differently."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One allowed destination."""

    host: str
    """Canonical name or IP address, without brackets; of a wildcard rule, the domain after `*.`."""
    port: int
    subdomains: bool = False
    """Whether the rule allows the names below `host`, at any depth, and not `host` itself."""

    def matches(self, host: str, port: int) -> bool:
        """Whether this rule allows a canonical host and a port."""
        if port != self.port:
            return False
        return host.endswith("." + self.host) if self.subdomains else host == self.host


def parse_rules(allow: Iterable[str]) -> tuple[Rule, ...]:
    """Parses an allow-list. Raises ConfigError, see `parse_rule`."""
    return tuple(parse_rule(text) for text in allow)


def parse_rule(text: str) -> Rule:
    """One rule from `host:port`, `host`, `*.domain:port` or `[IPv6]:port`.

    Raises ConfigError for what is no rule, for whole top-level domains and for names of the loopback.
    """
    subdomains = text.startswith("*.")
    try:
        host, port = split_authority(text[2:] if subdomains else text, DEFAULT_PORT, convert_unicode=True)
    except HostError as error:
        raise ConfigError(f"no allow rule: {error}", field=FIELD, received=text, fix=_FIX) from error
    if is_loopback_name(host):
        raise ConfigError(
            "a sandbox never reaches the host's loopback",
            field=FIELD,
            received=text,
            fix="leave the rule out; servers inside the sandbox are reached without it",
        )
    if subdomains and (is_address(host) or "." not in host):
        raise ConfigError(
            "a wildcard needs a domain of two labels at least", field=FIELD, received=text, fix=_FIX
        )
    return Rule(host, port, subdomains)


def permits(rules: Iterable[Rule], host: str, port: int) -> bool:
    """Whether some rule allows `host` (a name or address in any spelling, no brackets) at `port`."""
    try:
        name = canonical_host(host)
    except HostError:
        return False
    return any(rule.matches(name, port) for rule in rules)


def split_authority(text: str, default_port: int | None, convert_unicode: bool = False) -> tuple[str, int]:
    """(canonical host, port) of `host:port`, `[IPv6]:port`, or of a host alone if there is a default port.

    `convert_unicode`: non-ASCII names are converted; else they are refused. Raises HostError.
    """
    if text.startswith("["):
        inner, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise HostError("a bracketed address does not end")
        host, port_text = canonical_address(inner), rest[1:] if rest else None
        if ":" not in host:
            raise HostError("only IPv6 addresses stand in brackets")
    else:
        name, colon, after = text.partition(":")
        host, port_text = canonical_host(name, convert_unicode), after if colon else None
    if port_text is None:
        if default_port is None:
            raise HostError("the port is missing")
        return host, default_port
    if not _PORT.fullmatch(port_text) or int(port_text) > 65535:
        raise HostError("a port is a number from 1 to 65535")
    return host, int(port_text)


def join_authority(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def canonical_host(text: str, convert_unicode: bool = False) -> str:
    """The canonical form of a host, for comparison. Raises HostError for anything ambiguous.

    Also for numbers that C libraries parse as addresses (`127.1`, `0x7f000001`, `0177.0.0.1`).
    """
    if ":" in text:
        return canonical_address(text)
    if not text.isascii() and not convert_unicode:
        raise HostError("a name in another script is sent in its ASCII form (xn--...)")
    name = text if text.isascii() else _to_ascii(text)
    name = name.lower().removesuffix(".")
    if not name or len(name) > _MAX_NAME_CHARS:
        raise HostError(f"a host name has 1 to {_MAX_NAME_CHARS} characters")
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        return canonical_address(name)
    if not all(_LABEL.fullmatch(label) for label in labels):
        raise HostError("a host name consists of letters, digits, hyphens and dots")
    return name


def canonical_address(text: str) -> str:
    """The shortest spelling of an IP address. Raises HostError for zones, octal, hexadecimal, short forms."""
    try:
        if "%" in text:
            raise ValueError("zone")
        return str(ipaddress.ip_address(text))
    except ValueError as error:
        raise HostError("an address is four decimal numbers, or IPv6 without a zone") from error


def is_address(host: str) -> bool:
    """Whether a canonical host is an IP address."""
    return ":" in host or host.rpartition(".")[2].isdigit()


def is_loopback_name(host: str) -> bool:
    """Whether a canonical name means the local machine (RFC 6761, and names common in hosts files)."""
    return host in _LOOPBACK_NAMES or host.endswith((".localhost", ".localdomain"))


_LOOPBACK_NAMES = frozenset({"localhost", "localdomain", "ip6-localhost", "ip6-loopback", "loopback"})


def _to_ascii(text: str) -> str:
    """The ASCII form (IDNA); refuses names that IDNA 2003 and IDNA 2008 encode differently."""
    if len(text) > _MAX_NAME_CHARS or _AMBIGUOUS & set(text):
        raise HostError("write this name in its ASCII form (xn--...)")
    try:
        return text.encode("idna").decode("ascii")
    except UnicodeError as error:
        raise HostError("not a name that IDNA can encode") from error


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
_IPV4_EMBEDDINGS = (
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),
    (ipaddress.IPv6Network("2002::/16"), 80),
)
"""(network, number of bits to the right of the IPv4 address embedded in its addresses)."""


def forbidden_reason(ip: str, own: Callable[[Address], bool] | None = None) -> str | None:
    """Why an address is forbidden (`loopback`, `private`, `own`, ...); None if it is allowed.

    `own`: predicate for this machine's own addresses; None: `is_own_address`.
    """
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return "malformed"
    return reserved_reason(address) or ("own" if (own or is_own_address)(address) else None)


def reserved_reason(address: Address) -> str | None:
    """As `forbidden_reason`, without the check for this machine's own addresses."""
    if isinstance(address, ipaddress.IPv4Address):
        return next((reason for network, reason in _IPV4 if address in network), None)
    embedded = _embedded_ipv4(address)
    if embedded is not None:
        return reserved_reason(embedded)
    for network, reason in _IPV6:
        if address in network:
            return reason
    return None if address in _GLOBAL else "reserved"


def is_own_address(address: Address) -> bool:
    """Whether `address` is this machine's own.

    By the kernel's routing: a packet to an own address has that address as its source, too. Connecting a
    datagram socket sends nothing.
    """
    if isinstance(address, ipaddress.IPv6Address):
        embedded = _embedded_ipv4(address)
        if embedded is not None:
            return is_own_address(embedded)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0]) == address
    except OSError:
        # No route, or no such family: a connection would fail as well, with its own error.
        return False


def parse_private(entries: Iterable[str]) -> frozenset[tuple[str, int]]:
    """Parses exceptions from the forbidden addresses, exact `IP:port` of the operator. Raises ConfigError."""
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


def _embedded_ipv4(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    for network, shift in _IPV4_EMBEDDINGS:
        if address in network:
            return ipaddress.IPv4Address((int(address) >> shift) & 0xFFFFFFFF)
    return None
