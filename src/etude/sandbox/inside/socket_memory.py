"""Kernel memory of a sandbox's sockets, for the memory watchdog.

Without control groups it is not counted. With those of version 1, exceeding the limit of connections is not
an error: the kernel only becomes sparing with each.

There are two estimates, as for the memory of processes. The quick one multiplies the number of sockets of
this network namespace by the maximum of one; it reads one line of /proc. The exact one asks the kernel for
each socket's buffers (`sock_diag(7)`). A socket that the kernel counts but does not list (closed before its
peer, or disconnected) counts as full. So neither underestimates.

The bounds for one socket hold because buffers do not grow beyond the limit set at the start (`limit_buffers`;
the system-call filter ignores larger requests), and no protocols but TCP and UDP are allowed.
"""

from __future__ import annotations

import contextlib
import socket
import struct

from etude.sandbox.inside.kernel import write_file

TCP_BUFFER_BYTES = 1 << 20
"""Limit of each of the two buffers of a connection."""
_OBJECT_BYTES = 4 << 10
"""The kernel's own structures for a socket and its descriptor."""
_PACKET_BYTES = 256 << 10
"""How far the last packet may exceed a buffer's limit."""
_ANSWER_S = 1.0
_ANSWER_BYTES = 1 << 16

_SOCK_DIAG, _BY_FAMILY = 4, 20
_DUMP = 0x301
_NOTHING_MORE, _FAILURE = 3, 2
_INET_MEMORY, _UNIX_MEMORY = 7, 5
"""Numbers of the attribute with a socket's buffers, for IP and UNIX sockets."""
_INET_HEADER_BYTES, _UNIX_HEADER_BYTES = 72, 16
_STATES = 0xFFF & ~(1 << 6 | 1 << 3)
"""All but TIME_WAIT and SYN_RECV, which the kernel does not count as sockets."""
_RECEIVED, _SENT, _QUEUED, _OPTIONS, _BACKLOG = 0, 2, 5, 6, 7


def limit_buffers() -> None:
    """Limits the buffers of connections in this network namespace; needs CAP_NET_ADMIN. Raises OSError."""
    for name, first in (("tcp_rmem", 131072), ("tcp_wmem", 16384)):
        write_file(f"/proc/sys/net/ipv4/{name}", f"4096 {first} {TCP_BUFFER_BYTES}")


class SocketMemory:
    """Measures the sockets of this network namespace. Created before the filter is installed."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG)
        self._kernel.settimeout(_ANSWER_S)
        self._sequence = 0
        received, sent = _default_bytes("rmem"), _default_bytes("wmem")
        self._full_bytes = received + sent + _PACKET_BYTES
        """Most bytes of a socket that is not a connection."""
        connection_bytes = 2 * TCP_BUFFER_BYTES + _PACKET_BYTES
        self._max_bytes = _OBJECT_BYTES + max(self._full_bytes, connection_bytes)

    def max_bytes(self) -> int:
        """Upper bound of the bytes of all sockets. Takes some ten microseconds. Raises OSError."""
        return _num_sockets() * self._max_bytes

    def used_bytes(self) -> int:
        """Bytes of all sockets. Takes half a millisecond, plus microseconds for each. Raises OSError."""
        listed: list[int] = []
        for family in (socket.AF_INET, socket.AF_INET6):
            for protocol in (socket.IPPROTO_TCP, socket.IPPROTO_UDP):
                extension = 1 << (_INET_MEMORY - 1)
                body = struct.pack("=BBBBI48x", family, protocol, extension, 0, _STATES)
                listed += self._ask(body, _INET_HEADER_BYTES, _INET_MEMORY)
        body = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, 0x20, 0, 0)
        listed += self._ask(body, _UNIX_HEADER_BYTES, _UNIX_MEMORY)
        # Counted last: a socket opened meanwhile counts as full; a closed one does no harm.
        num_sockets = _num_sockets()
        num_unlisted = max(0, num_sockets - len(listed))
        return sum(listed) + num_unlisted * self._full_bytes + num_sockets * _OBJECT_BYTES

    def _ask(self, body: bytes, header_bytes: int, attribute: int) -> list[int]:
        """Bytes of each socket of one kind that this kernel lists."""
        found: list[int] = []
        # Unlisted sockets count as full, also if the kernel is short of memory.
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
    """Sum of a socket's attributes: unread, unsent and backlog bytes."""
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
    """Number of sockets of this network namespace, with closed ones not freed yet, without our own."""
    with open("/proc/net/sockstat", "rb") as file:
        return max(0, int(file.readline().split()[2]) - 1)


def _default_bytes(name: str) -> int:
    with open(f"/proc/sys/net/core/{name}_default", "rb") as file:
        return int(file.read())
