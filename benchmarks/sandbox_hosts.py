"""A fleet over real servers in network namespaces: latency of placement, and reaction to a killed server.

python benchmarks/sandbox_hosts.py [--json FILE] [--hosts N]

Needs root and the programs ip and nsenter. All hosts share this machine's processors: this measures the path
from `Fleet.create` over HTTP to a running command, not the throughput of several machines.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import print_table, write_result
from tests.sandbox.fleet.namespaced import RESOURCES, Network, ServerHost, fleet_over, network, obstacle

from etude.sandbox.errors import SandboxLostError
from etude.sandbox.fleet.fleet import Fleet
from etude.sandbox.fleet.registry import FleetConfig
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.template import Template

REPETITIONS = 5
NUM_CREATES = 60
"""Sandboxes per repetition, created one by one and 16 at once."""
TEMPLATE = Template({"code.py": "print('hello')\n"})

Figures = dict[str, float]


async def first_commands(backend: SandboxBackend, num: int, at_once: int) -> list[float]:
    """Seconds from requesting each sandbox to the end of its first command."""
    slots = asyncio.Semaphore(at_once)

    async def one() -> float:
        async with slots:
            began_s = time.perf_counter()
            sandbox = await backend.create(TEMPLATE, RESOURCES)
            await sandbox.commands.run("true")
            took_s = time.perf_counter() - began_s
            await sandbox.kill()
            return took_s

    return await asyncio.gather(*(one() for _ in range(num)))


async def measure_placement(fleet: Fleet) -> Figures:
    """Latencies through the fleet and, for comparison, of one of its servers without the fleet."""
    direct = next(iter(fleet.registry.hosts.values())).backend
    samples: dict[str, list[float]] = {}
    for _ in range(REPETITIONS):
        for at_once in (1, 16):
            for name, backend in (("fleet", fleet), ("one_server", direct)):
                took_s = await first_commands(backend, NUM_CREATES, at_once)
                samples.setdefault(f"{name}_at_{at_once}", []).extend(took_s)
    figures: Figures = {}
    for name, times in samples.items():
        cuts = statistics.quantiles(times, n=100, method="inclusive")
        figures[f"{name}_p50_ms"], figures[f"{name}_p99_ms"] = cuts[49] * 1e3, cuts[98] * 1e3
    return figures


async def create_sandboxes(fleet: Fleet, num: int) -> list[Any]:
    return await asyncio.gather(*(fleet.create(TEMPLATE, RESOURCES) for _ in range(num)))


async def kill_sandboxes(boxes: list[Any]) -> None:
    await asyncio.gather(*(box.kill() for box in boxes))


async def wait_for_loss(call: Awaitable[object]) -> float:
    """Awaits a call that raises SandboxLostError; returns the time, by `time.perf_counter`."""
    try:
        await call
    except SandboxLostError:
        return time.perf_counter()
    raise SystemExit("a sandbox outlived its server")


async def wait_until(condition: Callable[[], bool]) -> float:
    """Polls a condition until it holds; returns the time, by `time.perf_counter`."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.002)
    return time.perf_counter()


async def measure_death(fleet: Fleet, hosts: list[ServerHost]) -> Figures:
    """Seconds from `kill -9` of a server until its clients notice."""
    rows: list[Figures] = []
    for number in range(REPETITIONS):
        host = hosts[number % len(hosts)]
        state = fleet.registry.scheduler.hosts[host.name]
        boxes: list[Any] = []
        while len(boxes) < 4:
            made = await create_sandboxes(fleet, 16)
            boxes += [box for box in made if box.host.name == host.name]
            await kill_sandboxes([box for box in made if box.host.name != host.name])
        in_flight = asyncio.ensure_future(wait_for_loss(boxes[0].commands.run("sleep 50", 60.0)))
        # At a different point between two heartbeats in each repetition.
        await asyncio.sleep(1.0 + number / REPETITIONS)
        host.remember()
        began_s = time.perf_counter()
        host.kill()
        seen = {
            "in_flight": in_flight,
            "next_command": asyncio.ensure_future(wait_for_loss(boxes[1].commands.run("true"))),
            "next_read": asyncio.ensure_future(wait_for_loss(boxes[2].files.read("code.py"))),
            "host_dead": asyncio.ensure_future(wait_until(lambda state=state: not state.alive)),
        }
        created = await fleet.create(TEMPLATE, RESOURCES)
        row = {"create_at_once": time.perf_counter() - began_s}
        row |= {name: await task - began_s for name, task in seen.items()}
        rows.append(row)
        await created.kill()
        # By now the fleet knows from a failed call that the host is dead.
        began_s = time.perf_counter()
        created = await fleet.create(TEMPLATE, RESOURCES)
        row["create_once_noticed"] = time.perf_counter() - began_s
        await created.kill()
        host.launch()
        await host.wait_until_ready()
        await wait_until(lambda name=host.name: fleet.registry.scheduler.hosts[name].alive)
    figures: Figures = {}
    for name in rows[0]:
        figures[f"killed_{name}_median_ms"] = statistics.median(row[name] for row in rows) * 1e3
        figures[f"killed_{name}_worst_ms"] = max(row[name] for row in rows) * 1e3
    return figures


def measure(net: Network) -> Figures:
    """All figures, each part with new servers."""

    async def scenario() -> Figures:
        figures: Figures = {}
        async with fleet_over(net.hosts, FleetConfig()) as fleet:
            figures |= await measure_placement(fleet)
        async with fleet_over(net.hosts, FleetConfig()) as fleet:
            figures |= await measure_death(fleet, net.hosts)
        return figures

    return net.run(scenario)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hosts", type=int, default=4)
    arguments = parser.parse_args()
    if (reason := obstacle()) is not None:
        raise SystemExit(f"cannot measure: {reason}")
    with network(arguments.hosts) as net:
        figures = measure(net)
    print_table(f"fleet over {arguments.hosts} servers in network namespaces", figures)
    if arguments.json:
        write_result(arguments.json, figures, {"hosts": arguments.hosts, "repetitions": REPETITIONS})


if __name__ == "__main__":
    main()
