"""One line for each request, whole, and a log that cannot be written is an error."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import SandboxError
from etude.sandbox.network.log import RequestLog, RequestRecord
from etude.sandbox.network.proxy import proxy_environment


def test_a_file_gets_one_json_line_per_request(tmp_path: Path) -> None:
    path = tmp_path / "egress.jsonl"
    for _ in range(2):  # a second log of the same file appends
        log = RequestLog.to_file(path)
        log.write(RequestRecord("box", 5.0, "GET", "example.org", 80, "allowed", status=200, bytes_up=3))
        log.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["host"] for row in rows] == ["example.org"] * 2
    assert set(rows[0]) == {
        "sandbox", "time_s", "method", "host", "port", "decision", "reason", "address", "status", "bytes_up",
        "bytes_down", "duration_s",
    }  # fmt: skip
    assert path.stat().st_mode & 0o077 == 0


def test_a_full_file_makes_room_for_a_new_one_whoever_fills_it(tmp_path: Path) -> None:
    path = tmp_path / "egress.jsonl"
    logs = [RequestLog.to_file(path, max_bytes=1000) for _ in range(2)]
    for number in range(20):
        logs[number % 2].write(RequestRecord("box", host=f"h{number}"))
    for log in logs:
        log.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["egress.jsonl", "egress.jsonl.1"]
    kept = [file.read_text().splitlines() for file in (tmp_path / "egress.jsonl.1", path)]
    hosts = [json.loads(line)["host"] for lines in kept for line in lines]
    assert hosts == [f"h{number}" for number in range(20 - len(hosts), 20)] and len(hosts) >= 4
    assert all(file.stat().st_size <= 1000 for file in tmp_path.iterdir())


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "egress.jsonl"

    def write(name: str) -> None:
        log = RequestLog.to_file(path)
        for _ in range(200):
            log.write(RequestRecord(name, host="a" * 200))
        log.close()

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(row["sandbox"] for row in rows) == ["a"] * 200 + ["b"] * 200 + ["c"] * 200


@given(st.text(), st.text())
def test_any_text_stays_on_one_bounded_line(host: str, method: str) -> None:
    line = RequestRecord("box", method=method, host=host).to_line()
    assert line.isascii() and line.count("\n") == 1 and len(line) < 8000
    assert json.loads(line)["host"] == host[:255]


def test_a_log_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SandboxError):
        RequestLog.to_file(tmp_path / "missing" / "egress.jsonl")


def test_a_closed_log_takes_no_more(tmp_path: Path) -> None:
    log = RequestLog.to_file(tmp_path / "egress.jsonl")
    log.close()
    log.close()
    with pytest.raises(SandboxError):
        log.write(RequestRecord("box"))


def test_a_full_disk_is_an_error() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    log = RequestLog.to_file("/dev/full")
    with pytest.raises(SandboxError):
        log.write(RequestRecord("box"))
    log.close()


def test_commands_are_told_of_the_proxy_in_both_cases() -> None:
    variables = proxy_environment(3128)
    assert variables["https_proxy"] == variables["HTTP_PROXY"] == "http://127.0.0.1:3128"
    assert variables["NO_PROXY"] == variables["no_proxy"] == "localhost,127.0.0.1,::1"
