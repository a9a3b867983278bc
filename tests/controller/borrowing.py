"""A run's fleet in this process that borrows replicas through a router; both are real, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from etude.config import ElasticConfig, RunConfig
from etude.config.routing import HealthCheckConfig, LendingConfig, RouterConfig
from etude.controller.borrowed_engine import Needs
from etude.controller.elastic import ElasticPool
from etude.controller.local import LocalHandle
from etude.controller.remote.engine_part import EnginePart
from etude.controller.remote.fleet import EngineFleet
from etude.controller.supervision import FaultJournal, Supervision
from etude.inference.exchange import Build
from etude.inference.router.server import Proxy, ReplicaAddress, build_app
from etude.observe import RecordingObserver
from etude.observe.metrics import MemorySink
from etude.protocols import Handle
from etude.records import PolicyVersion, SampleChunk
from tests.controller.remote.building import FAST
from tests.controller.running import tiny_config
from tests.environment.recording.recording_builders import qwen_tokenizer
from tests.fakes.replica import running_server
from tests.inference.server.lending import NUMERICS, RunStore, rollout
from tests.inference.server.serving import ADMIN, Served
from tests.model.builders import small_config


@dataclass
class Run:
    """A run's engine in this process, and what it borrows."""

    config: RunConfig
    fleet: EngineFleet
    pool: ElasticPool
    proxy: Proxy
    router: httpx.AsyncClient
    store: RunStore
    metrics: MemorySink
    faults: dict[str, int]

    def events(self) -> list[str]:
        """What became of borrowed replicas, in order."""
        return [row["mode"] for row in self.metrics.rows if row["kind"] == "elastic"]

    async def serve(self, step: int) -> PolicyVersion:
        """Brings weights of that step into service."""
        manifest = self.store.publish(step)
        await self.fleet.stage(manifest)
        await self.fleet.activate(manifest.version)
        return manifest.version

    async def hand(self, what: str, served: Served, **body: Any) -> httpx.Response:
        """Lends, recalls or releases by hand."""
        name = served.url.removeprefix("http://")
        answer = await self.router.post(f"/router/replicas/{name}/{what}", json=body)
        assert answer.status_code == 200, answer.text
        return answer

    async def sample(self, number: int, max_tokens: int = 8, **options: Any) -> list[SampleChunk]:
        """One message of a session of that number: the same tokens each time, wherever they come from."""
        session = f"session-{number}"
        self.fleet.open(session)
        try:
            asked = replace(rollout(session, max_tokens=max_tokens, **options), rng_key=(7, number))
            return [chunk async for chunk in self.fleet.stream(asked)]
        finally:
            self.fleet.close(session)


async def until(holds: Callable[[], object]) -> None:
    """Waits for a condition."""
    async with asyncio.timeout(120.0):
        while not holds():  # noqa: ASYNC110 (nobody tells of it)
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(
    replicas: Sequence[Served],
    directory: Path,
    needs: Needs | None = None,
    lending: dict[str, Any] | None = None,
    day: Callable[[], float] = lambda: 0.0,
    clock: Callable[[], float] = time.monotonic,
    **elastic: Any,
) -> AsyncIterator[Run]:
    """`lending`, `day`: of the router. `clock`: of the pool."""
    store = RunStore(directory / "weights")
    config = tiny_config(
        directory,
        executor="ray",
        engine={"num_slots": 8, "kernels": "eager"},
        model=small_config(max_positions=600).model_dump(),
        weights={"url": store.url},
    )
    health = HealthCheckConfig(interval_s=0.1, timeout_s=30.0)
    proxy = Proxy(
        RouterConfig(health=health, lending=LendingConfig.model_validate(lending or {})), ADMIN, day
    )
    app = build_app(proxy, [ReplicaAddress(served.url) for served in replicas])
    metrics, faults = MemorySink(), dict[str, int]()
    observer = RecordingObserver()
    journal = FaultJournal(metrics, observer, faults)

    async def spawn(avoid: frozenset[str]) -> Handle[Any]:
        return LocalHandle(EnginePart(config, qwen_tokenizer(), directory, None), name="engine-0")

    async with (
        running_server(app) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=60.0) as router,
    ):
        settings = {"router": url, "poll_s": 0.05, "lease_s": 60.0, "most": 2, **elastic}
        config = config.model_copy(update={"elastic": ElasticConfig.model_validate(settings)})
        fleet = EngineFleet({"engine-0": spawn}, Build.here(config.model), Supervision(FAST, journal))
        needs = needs or Needs(NUMERICS, qwen_tokenizer().digest, 512)
        pool = ElasticPool(config, needs, fleet, metrics, observer, clock)
        run = Run(config, fleet, pool, proxy, router, store, metrics, faults)
        try:
            await fleet.start()
            await run.serve(0)
            async with pool:
                yield run
        finally:
            await fleet.shutdown()
            store.close()


def state_of(served: Served) -> str:
    """Where a replica stands."""
    assert served.state.loans is not None
    return str(served.state.loans.state)


def version_of(served: Served) -> str:
    """What its users get; None while they get nothing."""
    return str(served.state.sink.current())
