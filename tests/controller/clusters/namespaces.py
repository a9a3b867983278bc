"""Clusters on one machine: network namespaces that only meet over shaped links.

    wan (bridge) ── eth0 ── training: control API, weight store behind a relay
      ├── tbf ────── eth0 ── cluster 1: far end of the long link, relay, `etude sample`
      └── tbf ────── eth0 ── cluster 2 ...

Bandwidth is shaped in the kernel, in both directions of each cluster's cable. Latency and loss are added by a
process at the cluster's end (`long_link`), through which all of its traffic goes: this kernel has no netem.
An outage is the cable itself, pulled. Processor, memory and disk are one machine's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from etude.kit.leftovers import is_owner_alive, owner_tag
from tests.sandbox.fleet.namespaced import enter_namespace, ip, namespaces, obstacle, remove_namespace

T = TypeVar("T")

PREFIX = "etude-clusters-"
REPOSITORY = Path(__file__).parents[3]
_numbers = itertools.count()
_TBF_BURST_BYTES = 32 << 10
_TBF_QUEUE_MS = 200


@dataclass(eq=False)
class Cluster:
    """One namespace with an address, and what was started in it."""

    name: str
    namespace: str
    address: str
    link: str
    """The bridge's end of its cable."""
    bridge: str
    directory: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, log: str, *command: str) -> subprocess.Popen[bytes]:
        """Starts a command in the namespace; what it says goes to the log of this name."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        with self.log(log).open("ab") as output:
            process = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self.namespace}", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=REPOSITORY,
            )
        self.processes.append(process)
        return process

    def etude(self, log: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts `etude` in the namespace."""
        return self.start(log, sys.executable, "-c", "from etude.cli import main; main()", *arguments)

    def log(self, name: str) -> Path:
        """Where a process says what it says."""
        path = self.directory / f"{name}.log"
        path.touch()
        return path

    def cut_link(self) -> None:
        """Takes the link down, without notifying any process."""
        ip("-n", self.bridge, "link", "set", self.link, "down")

    def restore_link(self) -> None:
        """Brings the link up again."""
        ip("-n", self.bridge, "link", "set", self.link, "up")

    def link_bytes(self) -> tuple[int, int]:
        """(to the cluster, from the cluster): what has crossed its cable, headers included."""
        base = Path("/sys/class/net") / self.link / "statistics"
        command = ["ip", "netns", "exec", self.bridge, "cat", str(base / "tx_bytes"), str(base / "rx_bytes")]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
        sent, received = done.stdout.split()
        return int(sent), int(received)

    def run(self, work: Callable[[], T]) -> T:
        """Does something in a thread that is on the cluster's network."""
        with ThreadPoolExecutor(1, "cluster", enter_namespace, (self.namespace,)) as executor:
            return executor.submit(work).result()

    def stop(self) -> None:
        """Kills what still runs."""
        for process in self.processes:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Wan:
    """A training cluster, and others that reach it over long links."""

    training: Cluster
    others: Sequence[Cluster]
    directory: Path


def missing() -> str | None:
    """Why this machine cannot play several clusters; None if it can."""
    if (reason := obstacle()) is not None:
        return reason
    return None if shutil.which("tc") else "needs the program tc"


@contextlib.contextmanager
def wan(num_others: int, mbit_per_s: float) -> Iterator[Wan]:
    """Namespaces, with that bandwidth in each direction of the others' cables; removed at the end with what
    runs in them. What a killed former run left is removed first."""
    for name in namespaces(PREFIX):
        if not is_owner_alive(name.removeprefix(PREFIX)):
            remove_namespace(name)
    base = f"{PREFIX}{owner_tag()}-{next(_numbers)}"
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    names = ["training", *(f"cluster-{number}" for number in range(1, num_others + 1))]
    made: list[Cluster] = []
    try:
        ip("netns", "add", f"{base}-wan")
        ip("-n", f"{base}-wan", "link", "add", "bridge", "type", "bridge")
        ip("-n", f"{base}-wan", "link", "set", "bridge", "up")
        for number, name in enumerate(names, 1):
            made.append(_join(base, name, number, directory))
        for cluster in made[1:]:
            _shape(cluster.namespace, "eth0", mbit_per_s)
            _shape(cluster.bridge, cluster.link, mbit_per_s)
        yield Wan(made[0], made[1:], directory)
    finally:
        for cluster in made:
            cluster.stop()
        for name in ("wan", *names):
            remove_namespace(f"{base}-{name}")
        shutil.rmtree(directory)


def _join(base: str, name: str, number: int, directory: Path) -> Cluster:
    namespace, bridge, address, link = f"{base}-{name}", f"{base}-wan", f"10.8.0.{number}", f"link{number}"
    ip("netns", "add", namespace)
    ip("link", "add", "eth0", "netns", namespace, "type", "veth", "peer", "name", link, "netns", bridge)
    ip("-n", bridge, "link", "set", link, "master", "bridge")
    ip("-n", bridge, "link", "set", link, "up")
    ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
    ip("-n", namespace, "link", "set", "eth0", "up")
    ip("-n", namespace, "link", "set", "lo", "up")
    (directory / name).mkdir()
    return Cluster(name, namespace, address, link, bridge, directory / name)


def _shape(namespace: str, device: str, mbit_per_s: float) -> None:
    command = ["ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, "root", "tbf"]
    command += [
        "rate",
        f"{mbit_per_s:g}mbit",
        "burst",
        f"{_TBF_BURST_BYTES}",
        "latency",
        f"{_TBF_QUEUE_MS}ms",
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
