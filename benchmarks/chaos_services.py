"""The servers that a run uses, as processes that may be killed: weight store, relay, sandbox server."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etude.kit.ports import free_port

_START_S = 60.0
_LONGEST_AWAY_S = 3.0
"""Longest time until a killed server is restarted; drawn uniformly."""
_ETUDE = ("-c", "from etude.cli import main; main()")
_STORE = str(Path(__file__).with_name("chaos_store.py"))
_URL = "s3://weights/run"
STORE, RELAY, SANDBOXES = "store", "relay", "sandbox server"


@dataclass
class Server:
    """One server process, restarted at the same address after it was killed."""

    name: str
    command: Sequence[str]
    port: int
    log: Path
    environment: dict[str, str] = field(default_factory=dict[str, str])
    process: subprocess.Popen[bytes] | None = None
    _due: float = 0.0
    """Monotonic time of the next start."""

    @property
    def is_up(self) -> bool:
        """Whether it accepts connections."""
        if self.process is None or self.process.poll() is not None:
            return False
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False

    def restart_if_due(self) -> None:
        """Starts the process if its start is due. Raises SystemExit if it ended by itself."""
        if self.process is not None and self.process.poll() is not None:
            raise SystemExit(f"the {self.name} ended by itself:\n{self.log.read_text()}")
        if self.process is None and time.monotonic() >= self._due:
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    self.command, stdout=log, stderr=log, env=os.environ | self.environment
                )

    def wait_until_up(self) -> None:
        """Starts it if necessary and waits until it is up. Raises SystemExit if it does not start."""
        self._due = 0.0
        deadline = time.monotonic() + _START_S
        while not self.is_up:
            self.restart_if_due()
            if time.monotonic() > deadline:
                raise SystemExit(f"the {self.name} does not start:\n{self.log.read_text()}")
            time.sleep(0.05)

    def kill(self, dice: random.Random) -> None:
        """Kills it with SIGKILL and draws the time of its restart."""
        assert self.process is not None, "looked at before"
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = None
        self._due = time.monotonic() + dice.uniform(0.0, _LONGEST_AWAY_S)

    def stop(self) -> None:
        """Ends the process without a restart."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = None


@dataclass(frozen=True)
class Servers:
    """All servers of a run, the settings that point the run to them, and the run's environment variables."""

    all_of: dict[str, Server]
    settings: list[str]
    environment: dict[str, str]

    def restart_due(self) -> None:
        """Starts the servers whose start is due."""
        for server in self.all_of.values():
            server.restart_if_due()

    def wait_until_up(self) -> None:
        """Waits until all of them are up."""
        for server in self.all_of.values():
            server.wait_until_up()


@contextlib.contextmanager
def open_servers(directory: Path) -> Iterator[Servers]:
    """An S3 server, a relay in front of it and a sandbox server; their files lie in `directory`."""
    store_port, relay_port, sandbox_port = (free_port() for _ in range(3))
    (directory / "store" / "weights").mkdir(parents=True)
    token = directory / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_urlsafe(16))
    to_store = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{store_port}",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nobody",
        "AWS_EC2_METADATA_DISABLED": "true",
    }

    def server(name: str, port: int, *command: str) -> Server:
        return Server(name, [sys.executable, *command], port, directory / f"{name}.log", to_store)

    store, cache, sandboxes = (str(directory / name) for name in ("store", "cache", "sandboxes"))
    serve = ("sandbox", "serve", "--max-live", "1024", "--token-file", str(token), "--state", sandboxes)
    servers = {
        STORE: server(STORE, store_port, _STORE, "--root", store, "--port", str(store_port)),
        RELAY: server(RELAY, relay_port, *_ETUDE, "relay", _URL, "--cache", cache, "--port", str(relay_port)),
        SANDBOXES: server(SANDBOXES, sandbox_port, *_ETUDE, *serve, "--port", str(sandbox_port)),
    }
    settings = [
        f'weights.url="{_URL}"',
        f'weights.read_url="http://127.0.0.1:{relay_port}"',
        f'sandbox.server="http://127.0.0.1:{sandbox_port}"',
        f'sandbox.token="file:{token}"',
    ]
    try:
        yield Servers(servers, settings, to_store)
    finally:
        for started in servers.values():
            started.stop()
