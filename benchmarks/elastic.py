"""A rollout pool that borrows a serving replica: the run's gain in throughput, and the effect on users.

python benchmarks/elastic.py [--seconds S] [--recalls N] [--json FILE]

Simulated engines: each has a fixed number of slots and takes a fixed time per token, so that several engines
hardly load this machine. All else is real: router, servers, HTTP, loans, the fleet. Then recalls of a real
`etude serve` with a small model while it samples rollouts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx
import numpy as np
from benchmarks.common import Figures, print_table, write_result
from benchmarks.load import LogNormal, TurnRecord, WorkloadShape, run_load, summarise, synthetic_sessions
from benchmarks.load.http_target import HttpTarget
from numpy.typing import NDArray
from tests.fakes.replica import running_server
from tests.inference.server.checkpoint import serve_process, write_checkpoint
from tests.inference.server.lending import NUMERICS, RunStore, rollout
from tests.inference.server.serving import ADMIN, qwen_model
from torch import Tensor

from etude.config import ClusterConfig, ModelConfig, RunConfig
from etude.config.routing import HealthCheckConfig, RouterConfig
from etude.controller.borrowed_engine import Needs
from etude.controller.elastic import ElasticPool
from etude.controller.local import LocalHandle
from etude.controller.remote.engines import NO_USAGE, EngineProcess, Usage
from etude.controller.remote.fleet import EngineFleet
from etude.controller.supervision import FaultJournal, Supervision
from etude.inference.exchange import Build, Command, Event, Exchange
from etude.inference.loan_client import LoanHandle
from etude.inference.router.server import Proxy, ReplicaAddress
from etude.inference.router.server import build_app as build_router
from etude.inference.server import ServerState
from etude.inference.server import build_app as build_server
from etude.inference.server.loans import LoanDesk
from etude.observe import SilentObserver
from etude.observe.metrics import MemorySink
from etude.protocols import Handle, KvPolicy
from etude.records import PolicyVersion, SampleChunk, SampleRequest, Scores, WeightManifest

SLOTS = 16
TOKEN_S = 0.004
STAGE_S = 0.05
"""Time to stage a new weight version next to the current one."""
SESSIONS = 64
MESSAGES = 3
USERS = WorkloadShape(
    num_sessions=100_000,
    turns=LogNormal(3, 6),
    prompt_tokens=(20, 60),
    observation_tokens=(5, 20),
    output_tokens=LogNormal(30, 120),
)
USERS_PER_S = 2.0
"""Arrival rate of user sessions: one replica serves it without a queue."""
CONTEXT = 4000


@dataclass(eq=False)
class PacedEngine:
    """A Sampler and WeightSink of fixed speed, independent of the machine."""

    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SLOTS))
    version: PolicyVersion | None = None
    staged: PolicyVersion | None = None
    ended: set[str] = field(default_factory=set[str])
    sampled: Counter[str] = field(default_factory=Counter[str])
    """Lineage of the weights -> tokens sampled."""

    def open(self, session_id: str, sibling: str | None = None) -> None:
        """See Sampler.open."""

    def close(self, session_id: str) -> None:
        """See Sampler.close."""

    def abort(self, request_id: str) -> None:
        """See Sampler.abort."""
        self.ended.add(request_id)

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        """See Sampler.stream: one chunk per token at a fixed pace, or one in the end unless `streaming`."""
        num, held = 0, 0
        async with self.slots:
            while num < request.params.max_tokens and request.id not in self.ended:
                await asyncio.sleep(TOKEN_S)
                num += 1
                if request.streaming and num < request.params.max_tokens:
                    held += 1
                    yield self._chunk(1, None)
            self.ended.discard(request.id)
            assert self.version is not None
            self.sampled[self.version.lineage] += num
            finish = "length" if num == request.params.max_tokens else "abort"
            yield self._chunk(num - held, finish)

    def _chunk(self, num: int, finish: str | None) -> SampleChunk:
        assert self.version is not None
        tokens = np.full(num, 40, dtype=np.int32)
        logprobs = np.zeros(num, dtype=np.float32)
        return SampleChunk(tokens, logprobs, self.version, self.version, finish=finish, prefix_digest="")

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        """See Sampler.score."""
        return Scores(np.zeros(len(tokens), dtype=np.float32), version)

    def fetch(self, manifest: WeightManifest) -> dict[str, Tensor]:
        """Returns no tensors."""
        return {}

    async def stage(self, manifest: WeightManifest, tensors: Mapping[str, Tensor] | None = None) -> None:
        """See WeightSink.stage."""
        await asyncio.sleep(STAGE_S)
        self.staged = manifest.version

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        """See WeightSink.activate."""
        assert version == self.staged
        self.version = version

    def current(self) -> PolicyVersion | None:
        """See WeightSink.current."""
        return self.version

    def usage(self) -> dict[str, float]:
        """No counts."""
        return {}


class PacedPart:
    """The run's own engine process, with the interface that its fleet calls."""

    def __init__(self, build: Build) -> None:
        self._build, self._engine = build, PacedEngine()
        self._exchange = Exchange(self._engine)

    async def begin(self) -> Build:
        """See EnginePart.begin."""
        return self._build

    async def exchange(self, commands: Sequence[Command], client: str = "") -> None:
        """See EnginePart.exchange."""
        self._exchange.exchange(commands)

    async def poll(self, client: str = "") -> list[Event]:
        """See EnginePart.poll."""
        return await self._exchange.poll()

    async def stage(self, manifest: WeightManifest) -> None:
        """See EnginePart.stage."""
        await self._engine.stage(manifest)

    async def activate(self, version: PolicyVersion, kv: KvPolicy) -> Usage:
        """See EnginePart.activate."""
        await self._engine.activate(version, kv)
        return NO_USAGE

    async def pulse(self) -> Usage:
        """See EnginePart.pulse."""
        return NO_USAGE


def manifest_of(lineage: str, step: int) -> WeightManifest:
    """A manifest without files: simulated engines have no weights."""
    return WeightManifest(PolicyVersion(lineage, step, f"{lineage}-{step}"), (), f"memory:{lineage}/{step}")


@contextlib.asynccontextmanager
async def paced_server(build: Build) -> AsyncIterator[tuple[str, PacedEngine]]:
    """A replica over a paced engine: (address, engine)."""
    engine, home = PacedEngine(), manifest_of("served", 0)
    await engine.stage(home)
    await engine.activate(home.version)
    model = qwen_model(CONTEXT)
    about = {
        "build": asdict(build),
        "numerics": NUMERICS,
        "tokenizer": model.tokenizer.digest,
        "max_context_tokens": CONTEXT,
    }
    desk = LoanDesk(engine, home, about, lambda url: lambda manifest: {})
    state = ServerState(model, engine, desk.home, admin_token=ADMIN, loans=desk)
    async with running_server(build_server(state)) as url:
        yield url, engine


@dataclass(eq=False)
class Rollouts:
    """Plays a run's sessions, one after the other in each of several slots."""

    fleet: EngineFleet
    done: int = 0
    versions: set[str] = field(default_factory=set[str])

    async def play(self, place: int) -> None:
        """Plays the sessions of one slot until it is cancelled."""
        random, number = Random(place), 0
        while True:
            session = f"s{place}-{number}"
            self.fleet.open(session)
            for message in range(MESSAGES):
                length = max(1, min(400, round(random.lognormvariate(3.7, 0.8))))
                asked = rollout(session, message, length)
                async for chunk in self.fleet.stream(asked):
                    self.versions.add(str(chunk.version))
            self.fleet.close(session)
            self.done += 1
            number += 1


@contextlib.asynccontextmanager
async def pool_of_a_run(router: str, build: Build, tokenizer: str) -> AsyncIterator[tuple[Any, EngineFleet]]:
    """A fleet of one paced engine that borrows from the router."""
    config = RunConfig.model_validate(
        {
            "name": "run",
            "executor": "ray",
            "weights": {"url": "/nowhere"},
            "elastic": {"router": router, "poll_s": 0.2, "lease_s": 5.0},
        }
    )
    settings = ClusterConfig(heartbeat_s=1.0)
    journal = FaultJournal(MemorySink(), SilentObserver())

    async def spawn(avoid: frozenset[str]) -> Handle[Any]:
        return LocalHandle(PacedPart(build), name="engine-0")

    fleet = EngineFleet({"engine-0": spawn}, build, Supervision(settings, journal))
    await fleet.start()
    manifest = manifest_of("run", 0)
    await fleet.stage(manifest)
    await fleet.activate(manifest.version)
    needs = Needs(NUMERICS, tokenizer, CONTEXT)
    async with ElasticPool(config, needs, fleet, MemorySink(), SilentObserver()) as pool:
        yield pool, fleet
    await fleet.shutdown()


async def measure_phase(name: str, router: str, rollouts: Rollouts, seconds: float, seed: int) -> Figures:
    """Trajectories per second and user latencies over a period."""
    target = HttpTarget(router, "tiny")
    await target.calibrate()
    began, done = time.perf_counter(), rollouts.done
    shape = WorkloadShape(**{**asdict_shape(USERS), "num_sessions": max(1, round(seconds * USERS_PER_S))})
    records = await run_load(target, synthetic_sessions(shape, seed=seed), arrivals_per_s=USERS_PER_S)
    elapsed = time.perf_counter() - began
    await target.close()
    return {
        f"trajectories_per_s_{name}": (rollouts.done - done) / elapsed,
        **user_figures(name, records),
    }


def asdict_shape(shape: WorkloadShape) -> dict[str, Any]:
    """Field name -> value, not recursive."""
    return {one: getattr(shape, one) for one in shape.__dataclass_fields__}


def user_figures(name: str, records: Sequence[TurnRecord]) -> Figures:
    """Latencies and errors of users' requests."""
    report = summarise(records)
    return {
        f"users_p50_ms_{name}": report.latency.p50 * 1e3,
        f"users_p99_ms_{name}": report.latency.p99 * 1e3,
        f"users_first_token_p99_ms_{name}": report.first_token.p99 * 1e3,
        f"users_errors_{name}": float(sum(report.errors.values())),
    }


async def measure_simulated(seconds: float, recalls: int) -> Figures:
    """Three phases (replica not lent, lent, returned), and recalls before the last."""
    build, figures = Build.here(ModelConfig()), Figures()
    proxy = Proxy(RouterConfig(health=HealthCheckConfig(interval_s=0.2)), ADMIN)
    async with paced_server(build) as (first, _), paced_server(build) as (second, borrowed):
        app = build_router(proxy, [ReplicaAddress(first), ReplicaAddress(second)])
        name = second.removeprefix("http://")
        async with (
            running_server(app) as router,
            pool_of_a_run(router, build, qwen_model().tokenizer.digest) as (pool, fleet),
            httpx.AsyncClient(base_url=router, timeout=60.0, trust_env=False) as http,
        ):
            await wait_until(lambda: sum(one.ready for one in proxy.router.replicas.values()) == 2)
            rollouts = Rollouts(fleet)
            playing = [asyncio.create_task(rollouts.play(place)) for place in range(SESSIONS)]
            figures |= await measure_phase("alone", router, rollouts, seconds, 1)
            await http.post(f"/router/replicas/{name}/lend", json={"pool": "rollout"})
            await wait_until(lambda: pool.num_lent == 1)
            figures |= await measure_phase("lent", router, rollouts, seconds, 2)
            times: list[float] = []
            for number in range(recalls):
                await asyncio.sleep(0.5)
                recalling = asyncio.create_task(http.post(f"/router/replicas/{name}/recall"))
                times.append(await first_user_token(second))
                await recalling
                if number + 1 < recalls:
                    await wait_until(lambda: pool.num_lent == 0)
                    await http.post(f"/router/replicas/{name}/lend", json={"pool": "rollout"})
                    await wait_until(lambda: pool.num_lent == 1)
            figures |= await measure_phase("returned", router, rollouts, seconds, 3)
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
            assert rollouts.versions == {"run@0"}, rollouts.versions
    figures["borrowed_tokens"] = float(borrowed.sampled["run"])
    figures["lent_vs_alone"] = figures["trajectories_per_s_lent"] / figures["trajectories_per_s_alone"]
    figures["simulated_recall_to_first_token_ms"] = statistics.median(times) * 1e3
    figures["simulated_recall_to_first_token_worst_ms"] = max(times) * 1e3
    return figures


async def first_user_token(url: str) -> float:
    """Seconds until a user who keeps retrying at this replica gets a token."""
    began = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as http:
        while True:
            body = {"prompt": "def ", "max_tokens": 2, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code == httpx.codes.OK:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            return time.perf_counter() - began
            await asyncio.sleep(0.002)


async def wait_until(holds: Any) -> None:
    """Polls a condition until it holds. Raises TimeoutError after a minute."""
    async with asyncio.timeout(60.0):
        while not holds():  # noqa: ASYNC110 (there is no event for it)
            await asyncio.sleep(0.005)


async def recall_s(url: str, store: str, manifest: WeightManifest, number: int) -> float:
    """Seconds from the recall of a real replica that samples eight rollouts to a user's first token."""
    headers = {"authorization": f"Bearer {ADMIN}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60.0, trust_env=False) as http:
        lent = await http.post("/admin/loan", json={"borrower": "run", "lease_s": 30.0})
        handle = LoanHandle(url, lent.json()["token"], store)
        await handle.call(EngineProcess.begin)
        await handle.call(EngineProcess.stage, manifest)
        await handle.call(EngineProcess.activate, manifest.version, "recompute")
        for place in range(8):
            session = f"r{number}-{place}"
            commands: list[Command] = [("open", session), ("stream", rollout(session, 0, 500))]
            await handle.call(EngineProcess.exchange, commands)
        await asyncio.sleep(0.05)
        recalling = asyncio.create_task(http.delete("/admin/loan"))
        elapsed = await first_user_token(url)
        await recalling
        events = await handle.call(EngineProcess.poll)
        assert any(isinstance(one, SampleChunk) and one.finish == "abort" for _, one in events)
        await handle.stop()
    return elapsed


def measure_real_server(recalls: int) -> Figures:
    """Recall times of a real server without a router."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        token = root / "token"
        token.write_text(ADMIN)
        token.chmod(0o600)
        store = RunStore(root / "store")
        manifest = store.publish(1)
        options = ("--admin-token-file", str(token), "--kernels", "eager")
        with serve_process(write_checkpoint(root / "model"), *options) as served:

            async def measure_all() -> list[float]:
                return [await recall_s(served.url, store.url, manifest, n) for n in range(recalls)]

            times = asyncio.run(measure_all())
        store.close()
    return {
        "recall_to_first_token_ms": statistics.median(times) * 1e3,
        "recall_to_first_token_worst_ms": max(times) * 1e3,
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--recalls", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = asyncio.run(measure_simulated(options.seconds, options.recalls))
    figures |= measure_real_server(options.recalls)
    print_table("A replica lent to a run, and recalled", figures)
    if options.json is not None:
        write_result(options.json, figures, {})


if __name__ == "__main__":
    main()
