"""A fleet's scheduler: time of a placement decision, and a simulated burst of 100,000 sandboxes.

python benchmarks/sandbox_fleet.py [--json FILE] [--sandboxes N] [--create-p50-ms MS] [--create-p90-ms MS]

The simulation uses the fleet's real scheduler. Its inputs: the start time measured by benchmarks/sandbox.py,
the fleet's work per start as measured here, and the assumptions listed in docs/fleet.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.simulation.fleet.scenario import Latencies, Latency, Outcome, Scenario
from benchmarks.simulation.fleet.simulation import simulate

from etude.observe import commit, describe_machine, versions
from etude.sandbox.fleet.fleet import Fleet
from etude.sandbox.fleet.host import HostSpec
from etude.sandbox.fleet.hosts import Capacity, Request
from etude.sandbox.fleet.registry import FleetConfig
from etude.sandbox.fleet.scheduler import Scheduler
from etude.sandbox.types import Capabilities, Resources, SandboxInfo

REPETITIONS = 5


class InstantSandbox:
    """A sandbox that is only an id: the fleet around it is measured."""

    def __init__(self, number: int) -> None:
        self.id = str(number)

    async def kill(self) -> None:
        return


class InstantHost:
    """A host that creates sandboxes instantly."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def capabilities(self) -> Capabilities:
        return Capabilities("instant", "none", False, False, False, frozenset(), frozenset(), None, None)

    async def create(self, *arguments: Any, **options: Any) -> InstantSandbox:
        return InstantSandbox(next(self._numbers))

    async def list(self) -> list[SandboxInfo]:
        return []

    async def close(self) -> None:
        return

    def doctor(self) -> list[str]:
        return []


def decision_s(num_placements: int) -> float:
    """Median time of one placement while a fleet of 125 hosts fills up from empty."""
    request = Request(Resources(memory_bytes=512 << 20))
    times: list[float] = []
    for seed in range(REPETITIONS):
        hosts = {f"host-{n}": Capacity(64, 512 << 30, 4 << 40) for n in range(125)}
        scheduler = Scheduler(hosts, seed=seed)
        began_s = time.perf_counter()
        for number in range(num_placements):
            scheduler.place(request, number * 1e-5)
        times.append((time.perf_counter() - began_s) / num_placements)
    return statistics.median(times)


async def create_overhead_s(num_creates: int = 5000, at_once: int = 100) -> float:
    """Median time of one `Fleet.create` without the host's work; 125 hosts in this process."""
    times: list[float] = []
    for _ in range(REPETITIONS):
        hosts = {f"host-{n}": HostSpec(InstantHost()) for n in range(125)}  # type: ignore[arg-type]
        fleet = Fleet(hosts, FleetConfig(heartbeat_s=3600.0))
        await fleet.start()
        began_s = time.perf_counter()
        for _ in range(num_creates // at_once):
            await asyncio.gather(*(fleet.create() for _ in range(at_once)))
        times.append((time.perf_counter() - began_s) / num_creates)
        await fleet.close()
    return statistics.median(times)


def scenarios(base: Scenario) -> dict[str, tuple[str, Scenario]]:
    """Prefix of the figures -> (title, scenario). The empty prefix is the headline."""
    return {
        "": ("each host starts 64 at once", base),
        "serial_": ("each host starts one at a time", replace(base, create_slots=1)),
    }


def figures_of(prefix: str, outcome: Outcome) -> dict[str, float]:
    """Figures of one burst; their names contain 100k even for a trial of another size."""
    return {
        f"{prefix}burst_100k_s": outcome.burst_s,
        f"{prefix}start_p50_s": outcome.start_p50_s,
        f"{prefix}start_p99_s": outcome.start_p99_s,
        f"{prefix}pressure_spread": outcome.pressure_spread,
    }


def print_row(title: str, outcome: Outcome) -> None:
    bound, least_s = outcome.bound
    print(
        f"{title:62s} {outcome.burst_s:8.1f} {outcome.start_p50_s:8.2f} {outcome.start_p99_s:8.1f} "
        f"{outcome.pressure_spread:7.3f} {outcome.promised_spread:7.3f} "
        f"{outcome.lost:6d} {outcome.recover_s:7.1f} {least_s:8.1f} {bound}",
        flush=True,
    )


def measure(base: Scenario, with_all: bool) -> tuple[dict[str, float], dict[str, Any]]:
    """(figures, details of all bursts)."""
    figures: dict[str, float] = {}
    details: dict[str, Any] = {}
    print(
        f"{'':62s} {'burst s':>8s} {'p50 s':>8s} {'p99 s':>8s} {'spread':>7s} {'promis.':>7s} "
        f"{'lost':>6s} {'recover':>7s} {'bound s':>8s}"
    )
    for prefix, (title, scenario) in scenarios(base).items():
        if prefix and not with_all:
            continue
        healthy = simulate(scenario)
        dying = simulate(replace(scenario, death_fraction=0.02, death_at_s=healthy.burst_s / 2))
        for part, name, outcome in (("", title, healthy), ("deaths_", "  with 2 % of hosts dying", dying)):
            print_row(name, outcome)
            figures |= figures_of(prefix + part, outcome)
            details[prefix + part + "burst"] = {"what": name, **asdict(outcome)}
        figures[f"{prefix}deaths_lost"] = dying.lost
        figures[f"{prefix}deaths_recover_s"] = dying.recover_s
        figures[f"{prefix}burst_over_bound"] = healthy.burst_s / healthy.bound[1]
    return figures, details


def write_json(path: Path, figures: Mapping[str, float], inputs: Any, details: Any) -> None:
    """Writes the result file in the format of all benchmarks."""
    result = {
        "figures": dict(figures),
        "peers": {"inputs": inputs, "bursts": details},
        "machine": describe_machine(),
        "versions": versions(),
        "commit": commit(),
    }
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def plain(value: Any) -> Any:
    """Replaces infinite numbers, which JSON lacks, by text."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sandboxes", type=int, default=100_000)
    parser.add_argument("--create-p50-ms", type=float, default=4.4)
    parser.add_argument("--create-p90-ms", type=float, default=7.8)
    parser.add_argument("--headline-only", action="store_true")
    arguments = parser.parse_args()
    one_decision_s = decision_s(min(100_000, arguments.sandboxes))
    one_create_s = asyncio.run(create_overhead_s())
    print(
        f"one decision {one_decision_s * 1e6:.1f} us; one create of the fleet {one_create_s * 1e6:.0f} us\n"
    )
    create = Latency(arguments.create_p50_ms / 1e3, arguments.create_p90_ms / 1e3)
    base = Scenario(
        num_sandboxes=arguments.sandboxes, latencies=Latencies(create=create, dispatch_s=one_create_s)
    )
    figures, details = measure(base, not arguments.headline_only)
    figures["decision_us"] = one_decision_s * 1e6
    figures["decisions_per_s"] = 1 / one_decision_s
    figures["fleet_create_us"] = one_create_s * 1e6
    if arguments.json:
        write_json(arguments.json, figures, plain(asdict(base)), plain(details))


if __name__ == "__main__":
    main()
