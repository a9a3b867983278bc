from __future__ import annotations

import socket
from pathlib import Path

import pytest

from etude.kit import ports

RANGE = tuple(int(word) for word in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())


def test_a_port_is_free_and_the_kernel_gives_it_to_nobody_who_asks_for_any() -> None:
    found = [ports.free_port() for _ in range(20)]
    assert len(set(found)) > 1
    for port in found:
        assert not RANGE[0] <= port <= RANGE[1]
        with socket.create_server(("127.0.0.1", port)) as listener:
            assert listener.getsockname()[1] == port


@pytest.mark.parametrize(
    ("text", "is_among"), [("32768 60999\n", range(10_000, 32_768)), ("11000 50000", range(50_001, 65_536))]
)
def test_the_larger_range_beside_the_kernels_is_used(
    text: str, is_among: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_RANGE_FILE", tmp_path / "range")
    (tmp_path / "range").write_text(text)
    assert all(ports.free_port() in is_among for _ in range(20))


def test_taken_ports_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_RANGE_FILE", tmp_path / "range")
    with socket.create_server(("127.0.0.1", ports.free_port())) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "range").write_text("1024 65535\n" if port == 65_535 else f"{port + 1} 65535\n")
        monkeypatch.setattr(ports, "_LOWEST", port)
        assert ports.free_port() != port, "the kernel chooses where all others are taken"


def test_where_the_kernel_chooses_from_all_ports_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_RANGE_FILE", tmp_path / "range")
    (tmp_path / "range").write_text("1024 65535")
    assert ports.free_port() > 1023


def test_a_kernel_that_does_not_tell_its_range_has_the_usual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_RANGE_FILE", tmp_path / "none")
    assert 10_000 <= ports.free_port() < 32_768
