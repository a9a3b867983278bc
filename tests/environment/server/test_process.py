"""Servers as processes: start messages, occupied ports, hidden tokens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from etude.errors import ConfigError
from etude.sandbox.types import Capabilities
from etude_quickstart.memory_backend import MemoryBackend
from tests.cli.commands import etude
from tests.environment.server.serving import httpx, new_host, new_services

from etude.environment.server.process import serve  # isort: skip
from etude.serving.listening import is_loopback, open_listeners  # isort: skip
from etude.serving.token_files import read_or_make_tenants, read_token  # isort: skip


def taken_port() -> tuple[socket.socket, int]:
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


def test_a_port_that_is_taken_is_named_with_what_to_do() -> None:
    listener, port = taken_port()
    with listener:
        for start in (
            lambda: open_listeners("127.0.0.1", port),
            lambda: serve(new_host(), port=port),
        ):
            with pytest.raises(ConfigError, match="listens on this port") as caught:
                start()
            assert (caught.value.field, caught.value.received) == ("port", port)
            assert f"{port}" in str(caught.value.fix) and "--port" in str(caught.value.fix)


class SharingBackend(MemoryBackend):
    """Its sandboxes share what the kernel counts for each user."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), neighbours_share=True)


def test_tenants_who_could_starve_each_other_are_served_only_if_that_is_said() -> None:
    listener, port = taken_port()

    def start(backend: MemoryBackend, tokens: dict[str, str], tenants_share: bool = False) -> str | None:
        with pytest.raises(ConfigError) as caught:
            serve(new_host(new_services(backend)), port=port, tokens=tokens, tenants_share=tenants_share)
        return caught.value.field

    two = {"aaa": "one", "bbb": "two"}
    with listener:
        assert start(SharingBackend(), two) == "tenants"
        # These come as far as the port.
        assert start(SharingBackend(), {"aaa": "one", "bbb": "one"}) == "port"
        assert start(SharingBackend(), two, tenants_share=True) == "port"
        assert start(MemoryBackend(), two) == "port"


def test_the_command_says_so_without_a_traceback(tmp_path: Path) -> None:
    listener, port = taken_port()
    with listener:
        answer = etude("env", "serve", "--port", str(port))
    assert answer.exit_code == 2
    assert "listens on this port" in answer.stderr and str(port) in answer.stderr
    assert "Traceback" not in answer.output


def test_a_host_that_is_not_this_machines_is_refused() -> None:
    with pytest.raises(ConfigError, match="not an address of this machine") as caught:
        open_listeners("192.0.2.1", 0)
    assert caught.value.field == "host"


def test_every_address_of_a_name_gets_the_same_free_port() -> None:
    listeners = open_listeners("localhost", 0)
    try:
        assert len({listener.getsockname()[1] for listener in listeners}) == 1
        assert all(is_loopback(listener.getsockname()[0]) for listener in listeners)
    finally:
        for listener in listeners:
            listener.close()


def test_a_new_token_is_not_shown_but_where_it_lies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = read_token(tmp_path / "one", "environment server")
    (other,) = read_or_make_tenants(tmp_path / "two", "recording server")
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"environment server: a new token is in {tmp_path / 'one'}",
        f"recording server: a new token is in {tmp_path / 'two'}",
    ]
    assert token not in said[0] and other not in said[1]
    assert read_token(tmp_path / "one") == token
    with pytest.raises(ConfigError, match="more than one word"):
        read_token(tmp_path / "two")


def test_a_certificate_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("no certificate")
    for certificate, key in (
        (tmp_path / "absent.pem", tmp_path / "absent.pem"),
        (tmp_path / "bad.pem", tmp_path / "bad.pem"),
        (None, tmp_path / "bad.pem"),
    ):
        with pytest.raises(ConfigError) as caught:
            serve(new_host(), port=0, certificate=certificate, key=key)
        assert caught.value.field == "certificate"


SERVERS = {
    "environment": """
from tests.environment.server.serving import new_host
from etude.environment.server import serve
serve(new_host(), port=0)
""",
    "recording": """
import asyncio, sys
from pathlib import Path
from tests.environment.recording.recording_builders import TellingSampler, make_recordings
from etude.environment.recording.server import serve
recordings = make_recordings(TellingSampler(lambda context: "x"), Path(sys.argv[1]))
from etude.serving.listening import open_listeners
asyncio.run(serve(recordings, open_listeners("127.0.0.1", 0), note="a note"))
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SERVERS)
def test_a_server_says_where_it_is_ready_and_answers_there(kind: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVERS[kind], str(tmp_path)],
        cwd=Path(__file__).parents[3],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    try:
        assert process.stderr is not None
        ready = process.stderr.readline()
        assert ready.startswith(f"{kind} server: ready at http://127.0.0.1:"), ready
        url, _, note = ready.partition(" at ")[2].strip().partition("; ")
        assert note == (
            "a note" if kind == "recording" else "1 task, 8 tools, no token: for this machine only"
        )
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert f"{kind} server: shutting down when its" in process.stderr.read()
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)
