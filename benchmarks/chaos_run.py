"""Runs one training run, restarted after each kill of its main process, and kills its processes."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos_services import RELAY, SANDBOXES, STORE, Servers

from etude.config import RunConfig, load_config
from etude.observe import read_metrics

KINDS = ("trainer", "engine", "worker", "driver", SANDBOXES, "sandbox", RELAY, STORE)
_PARTS = ("trainer", "engine", "worker")
"""Kinds that are Ray actors of the run."""
_POLL_S = 0.05
_LONGEST_S = 3600.0
"""Time limit of one process (from start or resumption to its end)."""


@dataclass
class Disturbance:
    """A seeded schedule of kills that treats all kinds of processes about equally often."""

    kills: int
    dice: random.Random
    gap_s: float
    """Mean time between two kills."""
    killed: Counter[str] = field(default_factory=Counter[str])

    @property
    def is_over(self) -> bool:
        """Whether all kills are done."""
        return self.killed.total() >= self.kills

    def choose(self) -> str:
        """Draws the kind to kill next."""
        least = min(self.killed[kind] for kind in KINDS)
        return self.dice.choice([kind for kind in KINDS if self.killed[kind] <= least + 1])

    def pause_s(self) -> float:
        """Draws the pause until the next kill."""
        return self.dice.expovariate(1 / self.gap_s)


@dataclass
class Run:
    """One training run, restarted until it finishes."""

    config: Path
    settings: Sequence[str]
    directory: Path
    """The run directory."""
    servers: Servers | None = None
    sittings: int = 0
    wall_s: float = 0.0

    @functools.cached_property
    def loaded(self) -> RunConfig:
        """Its resolved configuration."""
        return load_config(self.config, list(self.settings))

    @property
    def is_finished(self) -> bool:
        """Whether its report is complete."""
        report = self.directory / "report.json"
        return report.exists() and "heldout_after" in json.loads(report.read_text(encoding="utf-8"))

    def use_servers(self, servers: Servers) -> None:
        """Configures the run to use these servers."""
        self.servers = servers
        self.settings = [*self.settings, *servers.settings]

    def run_to_end(self, disturbance: Disturbance | None = None) -> None:
        """Trains to the end, killing processes meanwhile. Raises SystemExit if the run fails by itself."""
        began = time.monotonic()
        while True:
            with self._start() as process:
                try:
                    if disturbance is not None and self._disturb(process, disturbance):
                        continue  # the run's own process was killed: start it again
                    output = self._wait(process)
                finally:
                    process.kill()
            break
        self.wall_s = time.monotonic() - began
        if process.returncode:
            raise SystemExit(f"the run failed:\n{output}")

    def _start(self) -> subprocess.Popen[str]:
        if self.servers is not None:
            self.servers.wait_until_up()
        command = [sys.executable, "-c", "from etude.cli import main; main()", "train"]
        command += ["--config", str(self.config), *(f"--set={setting}" for setting in self.settings)]
        begun = (self.directory / "config.toml").exists()
        self.sittings += 1
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*command, "--resume"] if begun else command,
                stdout=log,
                stderr=log,
                text=True,
                env=os.environ | {"NO_COLOR": "1"} | (self.servers.environment if self.servers else {}),
            )

    @property
    def _log(self) -> Path:
        return self.directory.with_name(f"{self.directory.name}.log")

    def _wait(self, process: subprocess.Popen[str]) -> str:
        """Waits for the process to end, restarting servers meanwhile; returns the log."""
        deadline = time.monotonic() + _LONGEST_S
        while process.poll() is None:
            if self.servers is not None:
                self.servers.restart_due()
            if time.monotonic() > deadline:
                raise SystemExit(f"the run does not end:\n{self._log.read_text()}")
            time.sleep(_POLL_S)
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _disturb(self, process: subprocess.Popen[str], disturbance: Disturbance) -> bool:
        """Kills processes during RL until no kills are left; returns whether it killed the run's own."""
        wait_until = time.monotonic() + disturbance.pause_s()
        before = self._num_rl_rows()
        while not disturbance.is_over and process.poll() is None:
            time.sleep(_POLL_S)
            if self.servers is not None:
                self.servers.restart_due()
            if time.monotonic() < wait_until or not self._is_in_rl(before):
                continue
            kind = disturbance.choose()
            if not self._kill(kind, process.pid, disturbance.dice):
                continue  # no process of this kind exists right now
            disturbance.killed[kind] += 1
            if kind == "driver":
                return True
            wait_until = time.monotonic() + disturbance.pause_s()
        return False

    def _kill(self, kind: str, driver: int, dice: random.Random) -> bool:
        """Kills one process of a kind; returns False if there is none."""
        server = self.servers.all_of.get(kind) if self.servers is not None else None
        if server is not None:
            if server.is_up:
                server.kill(dice)
                return True
            return False
        roots = [driver]
        if kind == "sandbox" and self.servers is not None:
            process = self.servers.all_of[SANDBOXES].process
            roots = [] if process is None else [process.pid]
        victims = [pid for root in roots for pid in find_victims(root, kind)]
        if victims:
            kill(dice.choice(victims))
        return bool(victims)

    def _is_in_rl(self, rows_before: int) -> bool:
        """Whether RL has begun in this process and has a step left."""
        if self._num_rl_rows() == rows_before:
            return False
        steps = [row["step"] for row in read_metrics(self.directory / "metrics.jsonl") if row["kind"] == "rl"]
        return max(steps, default=0) < self.loaded.rl.num_steps

    def _num_rl_rows(self) -> int:
        """Metrics rows of the RL stage; the first comes at the latest when the engine serves its weights."""
        file = self.directory / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return sum('"kind": "rl"' in line or '"kind": "parity"' in line for line in lines)


def find_victims(root: int, kind: str) -> list[int]:
    """Processes of a kind among `root`, a run's process or the sandbox server's, and its descendants."""
    if kind == "driver":
        return [root]
    titles = {pid: title_of(pid) for pid in descendants(root)}
    if kind in _PARTS:
        return [pid for pid, title in titles.items() if title.startswith(f"ray::etude-{kind}")]
    return [pid for pid, title in titles.items() if title and "ray" not in title]


def descendants(pid: int) -> list[int]:
    """All descendants of a process, itself excluded."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has ended meanwhile
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        own = children.get(waiting.pop(), [])
        found += own
        waiting += own
    return found


def title_of(pid: int) -> str:
    """The command line of a process; empty once it has ended."""
    try:
        return (
            (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""


def kill(pid: int) -> None:
    """Kills a process; does nothing if it has ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
