"""Runs the suite as root and as a plain user in parallel, and collects the results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

from tests.adversary.escape.model import Outcome, User

ROOT = Path(__file__).resolve().parents[3]
SOURCES = (ROOT / "src", ROOT / "examples" / "quickstart")
PLAIN_INTERPRETER = "/usr/bin/python3"
NOBODY = 65534
LIMIT_S = 3600.0
"""Longest wait for one run."""


@cache
def why_not(user: User) -> str | None:
    """Why no run is possible as this user; None: it is."""
    if user == "root":
        return None if os.geteuid() == 0 else "needs root"
    if os.geteuid() != 0:
        return None
    modern = subprocess.run([PLAIN_INTERPRETER, "-c", "import tomllib"], capture_output=True, check=False)
    if modern.returncode != 0:
        return f"{PLAIN_INTERPRETER} is no Python 3.11"
    places = (*SOURCES, ROOT / "tests", Path(sysconfig.get_path("purelib")))
    if not all(
        folder.stat().st_mode & 0o005 == 0o005 for place in places for folder in (place, *place.parents)
    ):
        return "the sources lie where a plain user may not read"
    return None


class Run:
    """One process of `run.py`, which tries or controls the named attempts one after the other."""

    def __init__(
        self,
        user: User,
        backend: str,
        what: str,
        names: Sequence[str],
        module: str = "tests.adversary.escape.run",
    ) -> None:
        """`module`: another program of the same arguments and output."""
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- open as long as the run goes on
        as_nobody = user == "plain" and os.geteuid() == 0
        identity: Any = NOBODY if as_nobody else None
        paths = [str(ROOT), *map(str, SOURCES), sysconfig.get_path("purelib")]
        env = {"PYTHONPATH": ":".join(paths), "HOME": "/nonexistent", "PATH": os.environ["PATH"]}
        # Where a guest's image is found.
        kept = ("XDG_STATE_HOME",) if as_nobody else ("HOME", "XDG_STATE_HOME")
        env.update({name: os.environ[name] for name in kept if name in os.environ})
        interpreter = PLAIN_INTERPRETER if as_nobody else sys.executable
        command = [interpreter, "-B", "-m", module, backend, what, *names]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd="/",
            env=env,
            user=identity,
            group=identity,
            extra_groups=[] if as_nobody else None,
        )
        self._outcomes: dict[str, Outcome] | None = None

    def outcomes(self) -> dict[str, Outcome]:
        """Name -> outcome. Waits for the end of the run."""
        if self._outcomes is None:
            output, _ = self._process.communicate(timeout=LIMIT_S)
            self._log.seek(0)
            self.log = self._log.read().decode(errors="replace")[-2000:]
            rows = [json.loads(line) for line in output.decode().splitlines()]
            self._outcomes = {name: Outcome(verdict, detail) for _, name, verdict, detail in rows}
        return self._outcomes

    def close(self) -> None:
        """Ends it."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._log.close()


def start(user: User, backend: str, what: str, names: Sequence[str], num_lanes: int) -> list[Run]:
    """Runs that share the names between them."""
    lanes = [names[lane::num_lanes] for lane in range(num_lanes)]
    return [Run(user, backend, what, lane) for lane in lanes if lane]
