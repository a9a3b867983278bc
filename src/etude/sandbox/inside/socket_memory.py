"""What the sockets of a sandbox hold in the kernel's memory: for the watchdog.

Without control groups nobody counts it. With those of version 1, going beyond the limit of connections is
not refused: it only makes the kernel sparing with each.

Two looks, as for the memory of processes. The quick one multiplies the number of sockets of this network
namespace by the most that one can hold; it reads one line of /proc. The close one asks the kernel for each
socket's buffers (`sock_diag(7)`). A socket that the kernel counts and does not list (it was closed while its
peer is still there; it was disconnected) is taken to be full. So both never say too little.

The bounds for one socket hold because buffers do not grow beyond what is set at the start (`limit_buffers`;
the filter answers a wish for larger ones as done), and no other protocols than TCP and UDP exist.
"""

from __future__ import annotations

import contextlib
import socket
import struct

from etude.sandbox.inside.kernel import write_file

TCP_BUFFER_BYTES = 1 << 20
"""The most to which the kernel lets each of the two buffers of a connection grow."""
_OBJECT_BYTES = 4 << 10
"""Of the kernel's own records for a socket and the descriptor of it."""
_PACKET_BYTES = 256 << 10
"""How far the last packet may reach beyond a buffer's bound."""
_ANSWER_S = 1.0
_ANSWER_BYTES = 1 << 16

_SOCK_DIAG, _BY_FAMILY = 4, 20
_DUMP = 0x301
_NOTHING_MORE, _FAILURE = 3, 2
_INET_MEMORY, _UNIX_MEMORY = 7, 5
"""Numbers of the attribute with a socket's buffers, for IP and for local sockets."""
_INET_HEADER_BYTES, _UNIX_HEADER_BYTES = 72, 16
_STATES = 0xFFF & ~(1 << 6 | 1 << 3)
"""All but TIME_WAIT and SYN_RECV: those are not counted as sockets either."""
_RECEIVED, _SENT, _QUEUED, _OPTIONS, _BACKLOG = 0, 2, 5, 6, 7


def limit_buffers() -> None:
    """Bounds the buffers of connections in this network namespace: for its CAP_NET_ADMIN. Raises OSError."""
    for name, first in (("tcp_rmem", 131072), ("tcp_wmem", 16384)):
        write_file(f"/proc/sys/net/ipv4/{name}", f"4096 {first} {TCP_BUFFER_BYTES}")


class SocketMemory:
    """Counts what the sockets of this network namespace hold. Made before the filter is installed."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG)
        self._kernel.settimeout(_ANSWER_S)
        self._sequence = 0
        received, sent = _default_bytes("rmem"), _default_bytes("wmem")
        self._full_bytes = received + sent + _PACKET_BYTES
        """Of a socket that is no connection."""
        connection_bytes = 2 * TCP_BUFFER_BYTES + _PACKET_BYTES
        self._most_bytes = _OBJECT_BYTES + max(self._full_bytes, connection_bytes)

    def most_bytes(self) -> int:
        """What all sockets can hold at most. Some ten microseconds. Raises OSError."""
        return _num_sockets() * self._most_bytes

    def held_bytes(self) -> int:
        """What all sockets hold. Half a millisecond, and some microseconds for each. Raises OSError."""
        listed: list[int] = []
        for family in (socket.AF_INET, socket.AF_INET6):
            for protocol in (socket.IPPROTO_TCP, socket.IPPROTO_UDP):
                extension = 1 << (_INET_MEMORY - 1)
                body = struct.pack("=BBBBI48x", family, protocol, extension, 0, _STATES)
                listed += self._ask(body, _INET_HEADER_BYTES, _INET_MEMORY)
        body = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, 0x20, 0, 0)
        listed += self._ask(body, _UNIX_HEADER_BYTES, _UNIX_MEMORY)
        # Counted last: a socket that came meanwhile is taken to be full, one that went is not missed.
        num_sockets = _num_sockets()
        num_unlisted = max(0, num_sockets - len(listed))
        return sum(listed) + num_unlisted * self._full_bytes + num_sockets * _OBJECT_BYTES

    def _ask(self, body: bytes, header_bytes: int, attribute: int) -> list[int]:
        """Bytes of each socket of one kind, of those that this kernel lists."""
        found: list[int] = []
        # What is not listed is taken to be full, whatever the reason: a kernel short of memory, too.
        with contextlib.suppress(OSError):
            self._list(body, header_bytes, attribute, found)
        return found

    def _list(self, body: bytes, header_bytes: int, attribute: int, found: list[int]) -> None:
        self._sequence += 1
        size = 16 + len(body)
        self._kernel.send(struct.pack("=IHHII", size, _BY_FAMILY, _DUMP, self._sequence, 0) + body)
        while True:
            data = self._kernel.recv(_ANSWER_BYTES)
            start = 0
            while start + 16 <= len(data):
                size, kind, _, sequence, _ = struct.unpack_from("=IHHII", data, start)
                if size < 16:
                    break
                if sequence == self._sequence:
                    if kind in (_NOTHING_MORE, _FAILURE):
                        return
                    found.append(_buffer_bytes(data, start + 16 + header_bytes, start + size, attribute))
                start += (size + 3) & ~3


def _buffer_bytes(data: bytes, start: int, end: int, attribute: int) -> int:
    """Out of a socket's attributes: unread, unsent, and not yet sorted in."""
    while start + 4 <= end:
        size, kind = struct.unpack_from("=HH", data, start)
        if size < 4:
            break
        if kind == attribute:
            rows = struct.unpack_from(f"={(size - 4) // 4}I", data, start + 4)
            return rows[_RECEIVED] + max(rows[_SENT], rows[_QUEUED]) + rows[_OPTIONS] + rows[_BACKLOG]
        start += (size + 3) & ~3
    return 0


def _num_sockets() -> int:
    """Of this network namespace, with those that are closed and not yet gone; not the one that asks."""
    with open("/proc/net/sockstat", "rb") as file:
        return max(0, int(file.readline().split()[2]) - 1)


def _default_bytes(name: str) -> int:
    with open(f"/proc/sys/net/core/{name}_default", "rb") as file:
        return int(file.read())
