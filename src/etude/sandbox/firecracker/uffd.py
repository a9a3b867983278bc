"""The page-fault handler of a microVM that was restored with the `Uffd` memory backend.

A process of its own, standard library only. Firecracker connects to its socket and sends **one** message:

    body        JSON: [{"base_host_virt_addr", "size", "offset", "page_size"}, ...]   (bytes; `offset` is
                where the region begins in the snapshot's memory file; releases before 1.13 say
                `page_size_kib`, in KiB or bytes)
    SCM_RIGHTS  the userfaultfd with which it registered those regions

From then on the kernel reports each touched page through the userfaultfd, and the handler fills it from the
memory file. If the handler dies the guest hangs at its next fault: its owner watches it.

    handler.main([listening socket's descriptor, memory file])

Kernel structures are those of `linux/userfaultfd.h`.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import fcntl
import itertools
import json
import mmap
import os
import select
import socket
import struct
import sys
from dataclasses import dataclass

API, API_IOCTL, REGISTER_IOCTL = 0xAA, 0xC018AA3F, 0xC020AA00
_WAKE, _COPY, _ZEROPAGE = 0x8010AA02, 0xC028AA03, 0xC020AA04
NEW_IOCTL = 0xAA00
"""Of `/dev/userfaultfd`: a new descriptor."""
REGISTER_MISSING = 1
FEATURE_EVENT_REMOVE = 1 << 3
_EVENT_PAGEFAULT, _EVENT_REMOVE, _EVENT_UNMAP = 0x12, 0x15, 0x16
_MESSAGE_BYTES = 32
MAX_HANDSHAKE_BYTES = 64 << 10
HANDSHAKE_S = 30.0
BLOCK_BYTES = 64 << 10
"""How much is filled in around a fault: neighbours are mostly wanted next."""


@dataclass(frozen=True)
class Region:
    """Guest memory at `address` of Firecracker's process, kept from `offset` on in the memory file."""

    address: int
    size: int
    offset: int
    page_size: int


class HandshakeError(Exception):
    """What came on the socket is no handshake."""


def pack_handshake(regions: list[Region]) -> bytes:
    """The message's body, as Firecracker writes it."""
    rows = [
        {
            "base_host_virt_addr": region.address,
            "size": region.size,
            "offset": region.offset,
            "page_size": region.page_size,
            "page_size_kib": region.page_size,
        }
        for region in regions
    ]
    return json.dumps(rows).encode()


def parse_handshake(data: bytes, file_bytes: int) -> list[Region]:
    """The regions, sorted by address. Raises HandshakeError for what does not fit the memory file."""
    try:
        rows = json.loads(data)
        regions = [
            Region(int(row["base_host_virt_addr"]), int(row["size"]), int(row["offset"]), _page_size(row))
            for row in rows
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise HandshakeError(f"no handshake: {error!r}") from error
    regions.sort(key=lambda region: region.address)
    for region in regions:
        numbers = (region.address, region.size, region.offset)
        page = region.page_size
        if page < 4096 or page & (page - 1) or any(n < 0 or n % page for n in numbers) or not region.size:
            raise HandshakeError(f"{region} is not made of whole pages")
        if region.offset + region.size > file_bytes:
            raise HandshakeError(f"{region} reaches beyond the memory file of {file_bytes} bytes")
    for before, after in itertools.pairwise(regions):
        if before.address + before.size > after.address:
            raise HandshakeError(f"{before} and {after} overlap")
    if not regions:
        raise HandshakeError("no region at all")
    return regions


def _page_size(row: dict[str, int]) -> int:
    size = int(row.get("page_size") or row.get("page_size_kib") or 4096)
    return size if size >= 4096 else size << 10


class PageServer:
    """Fills pages of one process from a memory file until that process ends."""

    def __init__(self, uffd: int, regions: list[Region], memory: int) -> None:
        """`memory`: descriptor of the file."""
        self._uffd = uffd
        self._regions = regions
        self._starts = [region.address for region in regions]
        size = os.fstat(memory).st_size
        # Private and writable, because only then does Python tell where it lies.
        self._map = mmap.mmap(memory, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self._source = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._data = list(_data_ranges(memory, size))
        self._data_starts = [start for start, _ in self._data]
        self._removed: set[int] = set()
        self.num_faults = 0

    def handle(self) -> bool:
        """Deals with what the descriptor reports. False once the process is gone."""
        try:
            messages = os.read(self._uffd, _MESSAGE_BYTES * 64)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ESRCH):
                return False
            raise
        faults: list[int] = []
        for start in range(0, len(messages), _MESSAGE_BYTES):
            event, first, second = struct.unpack_from("<B7xQQ", messages, start)
            if event == _EVENT_PAGEFAULT:
                faults.append(second)
            elif event in (_EVENT_REMOVE, _EVENT_UNMAP):
                self._remove(first, second)
        # Removals first: a fault that comes with one must not bring the old page back.
        filled = [self._fill(address) for address in faults]
        return all(filled)

    def _remove(self, start: int, end: int) -> None:
        """The balloon took pages away: they come back as zeros."""
        region = self._region(start)
        if region is not None:
            self._removed.update(range(start, end, region.page_size))

    def _fill(self, address: int) -> bool:
        self.num_faults += 1
        region = self._region(address)
        if region is None:
            return True
        page = address & ~(region.page_size - 1)
        if page in self._removed or not self._has_data(region, page, region.page_size):
            return self._zero(page, region.page_size)
        start, length = self._block(region, page)
        return self._copy(region, start, length, page)

    def _block(self, region: Region, page: int) -> tuple[int, int]:
        """What is filled around a page: a block if none of it was removed."""
        size = max(BLOCK_BYTES, region.page_size)
        start = max(region.address, page - page % size)
        end = min(region.address + region.size, start + size)
        pages = range(start, end, region.page_size)
        if self._removed and not self._removed.isdisjoint(pages):
            return page, region.page_size
        return start, end - start

    def _copy(self, region: Region, start: int, length: int, page: int) -> bool:
        source = self._source + region.offset + start - region.address
        arguments = bytearray(struct.pack("<QQQQq", start, source, length, 0, 0))
        result = self._ioctl(_COPY, arguments)
        if result == errno.EEXIST and length > region.page_size:
            # Part of the block is there already: only the page that is waited for matters.
            return self._copy(region, page, region.page_size, page)
        if result == errno.EEXIST:
            result = self._ioctl(_WAKE, bytearray(struct.pack("<QQ", start, length)))
        return result not in (errno.ESRCH, errno.EBADF)

    def _zero(self, page: int, length: int) -> bool:
        result = self._ioctl(_ZEROPAGE, bytearray(struct.pack("<QQQq", page, length, 0, 0)))
        if result == errno.EEXIST:
            result = self._ioctl(_WAKE, bytearray(struct.pack("<QQ", page, length)))
        return result not in (errno.ESRCH, errno.EBADF)

    def _ioctl(self, request: int, arguments: bytearray) -> int:
        """0, or the errno of what may happen: the page exists, the process or its mapping is gone."""
        while True:
            try:
                fcntl.ioctl(self._uffd, request, arguments)
                return 0
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    # The memory map is just changing; the event for it waits to be read.
                    if not self.handle():
                        return errno.ESRCH
                    continue
                if error.errno in (errno.EEXIST, errno.ESRCH, errno.ENOENT, errno.EBADF):
                    return error.errno
                raise

    def _region(self, address: int) -> Region | None:
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        region = self._regions[index]
        return region if address < region.address + region.size else None

    def _has_data(self, region: Region, page: int, length: int) -> bool:
        start = region.offset + page - region.address
        index = bisect.bisect_right(self._data_starts, start + length - 1) - 1
        return index >= 0 and self._data[index][1] > start


def _data_ranges(descriptor: int, size: int) -> list[tuple[int, int]]:
    """As memory.data_ranges, which this program cannot import."""
    ranges: list[tuple[int, int]] = []
    position = 0
    while position < size:
        try:
            start = os.lseek(descriptor, position, os.SEEK_DATA)
        except OSError:
            break
        position = os.lseek(descriptor, start, os.SEEK_HOLE)
        ranges.append((start, position))
    return ranges


def new_userfaultfd() -> int:
    """A userfaultfd of this process, with the API agreed upon. Raises OSError where the kernel refuses."""
    flags = os.O_CLOEXEC | os.O_NONBLOCK
    try:
        device = os.open("/dev/userfaultfd", os.O_RDWR | os.O_CLOEXEC)
        try:
            uffd = fcntl.ioctl(device, NEW_IOCTL, flags)
        finally:
            os.close(device)
    except OSError:
        numbers = {"x86_64": 323, "aarch64": 282}
        libc = ctypes.CDLL(None, use_errno=True)
        uffd = libc.syscall(numbers[os.uname().machine], flags)
        if uffd < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"userfaultfd: {os.strerror(code)}") from None
    fcntl.ioctl(uffd, API_IOCTL, bytearray(struct.pack("<QQQ", API, FEATURE_EVENT_REMOVE, 0)))
    return uffd


def register(uffd: int, address: int, size: int) -> None:
    """Faults of a range are reported from now on. Raises OSError."""
    fcntl.ioctl(uffd, REGISTER_IOCTL, bytearray(struct.pack("<QQQQ", address, size, REGISTER_MISSING, 0)))


def main(arguments: list[str]) -> None:
    """Serves one Firecracker process until it ends. Exits with 1 and a message if it never comes."""
    listener = socket.socket(fileno=int(arguments[0]))
    listener.settimeout(HANDSHAKE_S)
    memory = os.open(arguments[1], os.O_RDONLY | os.O_CLOEXEC)
    try:
        line, _ = listener.accept()
        line.settimeout(HANDSHAKE_S)
        data, descriptors, _, _ = socket.recv_fds(line, MAX_HANDSHAKE_BYTES, 2)
        regions = parse_handshake(data, os.fstat(memory).st_size)
        if not descriptors:
            raise HandshakeError("no userfaultfd came with it")
    except (OSError, HandshakeError) as error:
        print(f"page-fault handler: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error
    listener.close()
    os.set_blocking(descriptors[0], False)
    pid, _, _ = struct.unpack("iii", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    peer = os.pidfd_open(pid)
    server = PageServer(descriptors[0], regions, memory)
    poll = select.poll()
    poll.register(descriptors[0], select.POLLIN)
    poll.register(peer, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if peer in ready or not server.handle():
            return


if __name__ == "__main__":
    main(sys.argv[1:])
