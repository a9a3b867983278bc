"""The page-fault handler: its message, and real faults of a real child process."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.sandbox.firecracker import uffd
from etude.sandbox.firecracker.uffd import HandshakeError, Region, pack_handshake, parse_handshake
from tests.sandbox.firecracker.builders import needs_userfaultfd

PAGE = 4096
NUM_PAGES = 512
SOURCE = str(Path(uffd.__file__).resolve().parents[3])
HANDLER = "import sys; sys.path.insert(0, sys.argv[1]); "
HANDLER += "from etude.sandbox.firecracker.uffd import main; main(sys.argv[2:])"


def test_the_handshake_survives_its_wire() -> None:
    regions = [Region(0x10000, 2 * PAGE, 0, PAGE), Region(0x40000, PAGE, 2 * PAGE, PAGE)]
    assert parse_handshake(pack_handshake(regions), 3 * PAGE) == regions


@pytest.mark.parametrize(
    ("row", "page_size"),
    [
        ({"page_size": 2 << 20}, 2 << 20),
        ({"page_size_kib": 4}, PAGE),
        ({"page_size_kib": PAGE}, PAGE),
        ({}, PAGE),
    ],
)
def test_every_release_s_page_size_is_understood(row: dict[str, int], page_size: int) -> None:
    data = json.dumps([{"base_host_virt_addr": 1 << 30, "size": 2 << 20, "offset": 0, **row}])
    assert parse_handshake(data.encode(), 2 << 20)[0].page_size == page_size


@pytest.mark.parametrize(
    "region",
    [
        Region(0, 2 * PAGE, 0, PAGE),
        Region(0, PAGE, PAGE, PAGE),
        Region(1, PAGE, 0, PAGE),
        Region(0, 0, 0, PAGE),
        Region(0, PAGE, -PAGE, PAGE),
        Region(0, PAGE, 0, 5000),
    ],
)
def test_regions_that_do_not_fit_are_refused(region: Region) -> None:
    with pytest.raises(HandshakeError):
        parse_handshake(pack_handshake([region]), PAGE)


def test_overlapping_regions_are_refused() -> None:
    with pytest.raises(HandshakeError, match="overlap"):
        parse_handshake(pack_handshake([Region(0, 2 * PAGE, 0, PAGE), Region(PAGE, PAGE, 0, PAGE)]), 4 * PAGE)


@settings(deadline=None)  # of a busy machine
@given(
    st.binary(max_size=200)
    | st.recursive(st.integers() | st.text(), st.lists).map(lambda v: json.dumps(v).encode())
)
def test_no_message_breaks_the_parser(data: bytes) -> None:
    try:
        regions = parse_handshake(data, 1 << 20)
    except HandshakeError:
        return
    assert regions


def memory_file(path: Path) -> bytes:
    """Pages of random bytes, every third a hole."""
    source = random.Random(7)
    with path.open("xb") as file:
        file.truncate(NUM_PAGES * PAGE)
        for index in range(NUM_PAGES):
            if index % 3:
                file.seek(index * PAGE)
                file.write(source.randbytes(PAGE))
    return path.read_bytes()


def start_handler(directory: Path) -> subprocess.Popen[bytes]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "s"))
        listener.listen(1)
        command = [
            sys.executable,
            "-ISB",
            "-c",
            HANDLER,
            SOURCE,
            str(listener.fileno()),
            str(directory / "m"),
        ]
        return subprocess.Popen(command, pass_fds=(listener.fileno(),), stderr=subprocess.PIPE)


def fault_in(path: str, expected: bytes) -> None:
    """The guest's side, in a child: touches pages in random order, gives some away, touches them again."""
    memory = mmap.mmap(-1, len(expected), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    descriptor = uffd.new_userfaultfd()
    uffd.register(descriptor, address, len(expected))
    half = len(expected) // 2
    regions = [Region(address + half, half, half, PAGE), Region(address, half, 0, PAGE)]
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        socket.send_fds(line, [pack_handshake(regions)], [descriptor])
    order = list(range(NUM_PAGES))
    random.Random(3).shuffle(order)
    for index in order[: NUM_PAGES // 2]:
        start = index * PAGE
        assert memory[start : start + PAGE] == expected[start : start + PAGE]
    # What the balloon does: pages given back are zeros from then on, touched before or not.
    memory.madvise(mmap.MADV_DONTNEED, 64 * PAGE, 32 * PAGE)
    assert not any(memory[64 * PAGE : 96 * PAGE])
    memory[96 * PAGE : 96 * PAGE + 3] = b"own"
    assert memory[96 * PAGE : 97 * PAGE] == b"own" + expected[96 * PAGE + 3 : 97 * PAGE]
    assert memory[: 64 * PAGE] == expected[: 64 * PAGE]
    assert memory[97 * PAGE :] == expected[97 * PAGE :]


@needs_userfaultfd
def test_real_faults_are_served_page_by_page(tmp_path: Path) -> None:
    expected = memory_file(tmp_path / "m")
    handler = start_handler(tmp_path)
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            fault_in(str(tmp_path / "s"), expected)
            os._exit(0)
        except BaseException as error:
            print(f"guest: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    try:
        _, errors = handler.communicate(timeout=60)
    finally:
        handler.kill()
    assert (status, handler.returncode, errors) == (0, 0, b"")


@pytest.mark.parametrize("message", [b"", b"no json", pack_handshake([Region(0, PAGE, 0, PAGE)])])
def test_a_handler_refuses_what_is_no_handshake(tmp_path: Path, message: bytes) -> None:
    (tmp_path / "m").write_bytes(bytes(PAGE))
    handler = start_handler(tmp_path)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(tmp_path / "s"))
        line.sendall(message)
    _, errors = handler.communicate(timeout=60)
    assert handler.returncode == 1 and b"page-fault handler:" in errors
