"""The router against round robin, in virtual time with measured step costs; and the latency it adds.

python benchmarks/inference_router.py [--json FILE] [--coefficients FILE] [--sessions N] [--seeds N]

Three parts: (1) an engine's step cost, fitted from a load of agent sessions on the quickstart's model, or
read from a file; (2) heavy-tailed sessions on four simulated replicas, every policy on the same sessions;
(3) the processor time that the real proxy adds to a request, on the loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx
import torch
from benchmarks.load import (
    LoadSession,
    LogNormal,
    WorkloadShape,
    run_load,
    synthetic_sessions,
)
from benchmarks.sampler_target import SamplerTarget
from benchmarks.simulation.router.simple import RandomChoice, RoundRobin, RoundRobinSessions
from benchmarks.simulation.router.simulated_replica import ReplicaSpec
from benchmarks.simulation.router.simulation import PolicyMaker, RouterOutcome, RouterScenario, simulate
from benchmarks.simulation.router.step_cost import StepCost, fit_step_cost, read_step_cost
from common import Figures, median_figures, print_table, write_result
from tests.fakes.replica import FakeReplica, fake_replica, running_server

from etude.config import ModelConfig
from etude.inference import Engine, EngineService
from etude.inference.router import Router, RouteRequest, RoutingConfig
from etude.inference.router.server import Proxy, ReplicaAddress, build_app
from etude.model import build_model
from etude.native import find_compiler
from etude.records import PolicyVersion
from etude.weights import MemoryWeights

VOCABULARY = 1024
CONCURRENCY = 256
"""Concurrent sessions when measuring throughput: far more than four replicas can serve without queues."""
SLOW = (1.0, 1.0, 1.0, 2.0)
RR_LOAD = 0.85
"""Open load as a share of round robin's throughput: at more its queues would grow without bound."""
IDEAL_LOAD = 0.7
"""Open load as a share of the ideal's throughput."""
SHAPE = WorkloadShape(turns=LogNormal(6.0, 40.0), tool_s=LogNormal(0.5, 10.0))
"""Prompts, observations and answers as in the engine's benchmarks; turns and tool times also heavy-tailed."""


async def measure_step_cost() -> StepCost:
    """Measures our engine's step cost with 2 to 24 concurrent agent sessions, the same ones each time."""
    config = ModelConfig(max_positions=4096)
    model = build_model(config, VOCABULARY)
    model.initialise(0)
    kernels: Any = "native" if find_compiler() is not None else "eager"
    engine = Engine(config, VOCABULARY, 32, 4096, 512, kernels)
    weights = MemoryWeights()
    manifest = weights.publish(PolicyVersion("bench", 0), dict(model.named_parameters()))
    async with EngineService(engine, weights.fetch, None) as service:
        await service.stage(manifest)
        await service.activate(manifest.version)
        for concurrency in (2, 8, 24):
            sessions = synthetic_sessions(WorkloadShape(num_sessions=concurrency, turns=LogNormal(3, 3)))
            await run_load(SamplerTarget(service, VOCABULARY), sessions)
        steps = service.times.steps
    return fit_step_cost(steps.gram, steps.moment)


def policies(cost: StepCost) -> dict[str, PolicyMaker | None]:
    """Policies by name; None is the ideal."""

    def ours(names: Sequence[str]) -> Router:
        router = Router(RoutingConfig(prefill_weight=cost.prefill_weight))
        for name in names:
            router.join(name)
        return router

    return {
        "ideal": None,
        "router": ours,
        "round_robin": RoundRobin,
        "round_robin_sessions": RoundRobinSessions,
        "random": RandomChoice,
    }


def play(cost: StepCost, sessions: Sequence[LoadSession], seed: int) -> tuple[Figures, dict[str, Any]]:
    """One seed: throughput under closed load, latency under open loads, and both with a slow replica."""
    spec, makers = ReplicaSpec(cost), policies(cost)
    per_session = sum(session.output_tokens for session in sessions) / len(sessions)

    def each(names: Sequence[str], **load: Any) -> dict[str, RouterOutcome]:
        return {
            name: simulate(RouterScenario(sessions, spec, seed=seed, **load), makers[name]) for name in names
        }

    everyone = list(makers)
    full = each(everyone, concurrency=CONCURRENCY)
    capacity = full["ideal"].output_tokens_per_s
    stable = RR_LOAD * full["round_robin"].output_tokens_per_s / per_session
    high = IDEAL_LOAD * capacity / per_session
    calm = each(everyone, arrivals_per_s=stable)
    busy = each(everyone, arrivals_per_s=high)
    real = [name for name in everyone if name != "ideal"]
    slow = each(real, arrivals_per_s=high, slowness=SLOW)
    settings = {"saturated": full, "calm": calm, "busy": busy, "slow_replica": slow}
    figures: Figures = {
        "router_p99_vs_round_robin": _ratio(calm, "round_robin"),
        "router_p99_vs_round_robin_sessions": _ratio(calm, "round_robin_sessions"),
        "router_p99_vs_ideal": _ratio(calm, "ideal"),
        "router_busy_p99_vs_round_robin": _ratio(busy, "round_robin"),
        "router_busy_p99_vs_round_robin_sessions": _ratio(busy, "round_robin_sessions"),
        "router_slow_replica_p99_vs_round_robin": _ratio(slow, "round_robin"),
        "router_slow_replica_p99_vs_round_robin_sessions": _ratio(slow, "round_robin_sessions"),
        "router_throughput_vs_ideal": full["router"].output_tokens_per_s / capacity,
        "round_robin_throughput_vs_ideal": full["round_robin"].output_tokens_per_s / capacity,
        "round_robin_sessions_throughput_vs_ideal": full["round_robin_sessions"].output_tokens_per_s
        / capacity,
        "calm_sessions_per_s": stable,
        "calm_load_of_ideal": stable * per_session / capacity,
    }
    return figures, {name: {who: _row(o) for who, o in found.items()} for name, found in settings.items()}


def _ratio(outcomes: dict[str, RouterOutcome], other: str) -> float:
    return outcomes["router"].latency_s(99) / outcomes[other].latency_s(99)


def _row(outcome: RouterOutcome) -> dict[str, float]:
    return {
        "latency_p50_s": outcome.latency_s(50),
        "latency_p99_s": outcome.latency_s(99),
        "output_tokens_per_s": outcome.output_tokens_per_s,
        "cache_hit_rate": outcome.cache_hit_rate,
        "busy_share": outcome.busy_share,
    }


def decision_us(num_replicas: int = 32, num_requests: int = 4000) -> float:
    """Median microseconds of begin, progress and end of one request, with four requests per session."""
    router = Router()
    for number in range(num_replicas):
        router.join(f"r{number}")
    times: list[float] = []
    for number in range(num_requests):
        request = RouteRequest(f"q{number}", 1000, 500, f"s{number % (num_requests // 4)}")
        began = time.perf_counter()
        router.begin(request, float(number))
        router.progress(request.id, 1)
        router.end(request.id, number + 0.5, 40, 1040)
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


async def proxy_cpu_ms(num_requests: int = 200) -> Figures:
    """Median processor milliseconds of a streamed answer of 8 events, directly and through the proxy.

    Client and replica are in the same process and cancel out. Processor time, since other work on the machine
    distorts wall time.
    """
    body = {"messages": [{"role": "user", "content": "x " * 500}], "max_tokens": 8, "stream": True}
    proxy = Proxy()
    async with (
        fake_replica(FakeReplica()) as replica,
        running_server(build_app(proxy, [ReplicaAddress(replica)])) as router,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        while not any(one.ready for one in proxy.router.replicas.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        times: dict[str, list[float]] = {replica: [], router: []}
        for number in range(num_requests + 20):
            for url, taken in times.items():
                began = time.process_time()
                await http.post(f"{url}/v1/chat/completions", json=body, headers={"x-session-id": "s"})
                if number >= 20:
                    taken.append(1e3 * (time.process_time() - began))
    direct, routed = statistics.median(times[replica]), statistics.median(times[router])
    return {"direct_cpu_ms": direct, "routed_cpu_ms": routed, "router_added_cpu_ms": routed - direct}


def print_settings(details: dict[str, Any]) -> None:
    for name, rows in details.items():
        print(f"\n{name:22s} {'p50 s':>8s} {'p99 s':>8s} {'tokens/s':>10s} {'cache hits':>11s} {'busy':>6s}")
        for who, row in rows.items():
            print(
                f"  {who:20s} {row['latency_p50_s']:8.3f} {row['latency_p99_s']:8.3f} "
                f"{row['output_tokens_per_s']:10,.0f} {row['cache_hit_rate']:11.3f} {row['busy_share']:6.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--coefficients", type=Path, help="step cost to take instead of measuring")
    parser.add_argument("--sessions", type=int, default=700)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cost = read_step_cost(options.coefficients) if options.coefficients else asyncio.run(measure_step_cost())
    print("step cost:", json.dumps(asdict(cost)), f"prefill weight {cost.prefill_weight:.3f}", flush=True)
    blocks: list[Figures] = []
    details: dict[str, Any] = {}
    for seed in range(options.seeds):
        shape = WorkloadShape(options.sessions, SHAPE.turns, tool_s=SHAPE.tool_s)
        figures, details = play(cost, synthetic_sessions(shape, seed), seed)
        blocks.append(figures)
        print(f"seed {seed}: " + ", ".join(f"{figures[name]:.3f}" for name in list(figures)[:8]), flush=True)
    figures = median_figures(blocks) | {"router_decision_us": decision_us()} | asyncio.run(proxy_cpu_ms())
    print_settings(details)
    print_table("medians over the seeds", figures)
    if options.json:
        peers = {"step_cost": asdict(cost), "last_seed": details, "seeds": blocks}
        write_result(options.json, figures, peers)


if __name__ == "__main__":
    main()
