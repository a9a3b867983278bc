"""Sandbox servers in processes of their own, which may be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from etude.kit.ports import free_port

_START_S = 60.0
_COMMAND = "from etude.cli import main; main()"


class SandboxServer:
    """`etude sandbox serve` on loopback."""

    def __init__(self, directory: Path) -> None:
        """`directory`: its state, its token and its log."""
        directory.mkdir()
        self.token_file = directory / "token"
        self.url = f"http://127.0.0.1:{free_port()}"
        self._log = directory / "log"
        command = [sys.executable, "-c", _COMMAND, "sandbox", "serve", "--state", str(directory / "state")]
        command += ["--port", self.url.rpartition(":")[2], "--token-file", str(self.token_file)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))

    def wait_until_up(self) -> None:
        """Returns when it answers."""
        end_s = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == httpx.codes.OK:
                    return
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < end_s, "it does not start"
            time.sleep(0.05)

    def num_live(self) -> int:
        """Sandboxes there now."""
        return len(self._get("sandboxes").json())

    def num_created(self) -> int:
        """Sandboxes that were ever made there."""
        lines = [line for line in self._get("/metrics").text.splitlines() if not line.startswith("#")]
        rows = [line.split() for line in lines if line.startswith("etude_sandboxes_created_total")]
        return sum(int(float(row[-1])) for row in rows)

    def kill(self) -> None:
        """Kills it with SIGKILL. Idempotent."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def section(self, name: str, **values: object) -> str:
        """Its section in a file of servers."""
        rows = [f'url = "{self.url}"', f'token = "file:{self.token_file}"']
        rows += [f"{key} = {str(value).lower()}" for key, value in values.items()]
        return "\n".join([f"[servers.{name}]", *rows, ""])

    def _get(self, path: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.token_file.read_text().strip()}"}
        where = path if path.startswith("/") else f"/v1/{path}"
        return httpx.get(self.url + where, headers=headers, trust_env=False, timeout=30.0).raise_for_status()


@contextlib.contextmanager
def sandbox_servers(directory: Path, count: int) -> Iterator[list[SandboxServer]]:
    """Servers that are up; killed in the end."""
    servers = [SandboxServer(directory / f"server-{number}") for number in range(count)]
    try:
        for server in servers:
            server.wait_until_up()
        yield servers
    finally:
        for server in servers:
            server.kill()
