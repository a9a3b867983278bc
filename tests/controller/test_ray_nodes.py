"""Parts over several machines of a Ray cluster, which are as many of Ray's own node processes on this one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from etude.config import ClusterConfig
from etude.controller.arrangement import open_executor
from etude.controller.supervision import FaultJournal, Pulsing, Supervision, Supervisor
from etude.errors import ResourceError
from etude.observe.metrics import MemorySink
from etude.observe.observer import RecordingObserver
from etude.protocols import Handle, Resources

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

LABEL = "etude-domain"
COMMON = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "object_store_memory": 80 << 20}
"""Of every machine."""


class Part:
    """Says where it is."""

    async def pulse(self) -> int:
        """Its process."""
        return os.getpid()


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    """Three machines of a core each, in the failure domains a (the head), b and c, all on loopback. One takes
    seconds to start: all tests have the same, and those that take machines away or add them come last."""
    from ray._private import ray_constants
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        # Else Ray takes an address on loopback for one of this machine's others, where nobody listens.
        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        head = {**COMMON, "include_dashboard": False, "labels": {LABEL: "a"}}
        made = Cluster(initialize_head=True, head_node_args=head)
        try:
            for domain in "bc":
                add_node(made, domain)
            yield made
        finally:
            made.shutdown()


@pytest.fixture
def cluster(machines: Any) -> Iterator[Any]:
    """Those, left by the test before."""
    import ray

    yield machines
    ray.shutdown()  # what a test that failed may not have done


def add_node(cluster: Any, domain: str) -> Any:
    """One machine more."""
    return cluster.add_node(**COMMON, labels={LABEL: domain})


def settings_for(cluster: Any, **values: Any) -> ClusterConfig:
    """Of a run on the cluster."""
    quick = {
        "connect_timeout_s": 60.0,
        "heartbeat_s": 0.2,
        "silent_s": 30.0,
        "backoff_s": 0.05,
        "healthy_s": 600.0,
    }
    return ClusterConfig.model_validate({"address": cluster.address, **quick, **values})


def domains() -> dict[str, str]:
    """Machine -> its failure domain."""
    import ray

    return {node["NodeID"]: node["Labels"][LABEL] for node in ray.nodes() if node["Alive"]}


def domain_of(handle: Handle[Any]) -> str:
    """Where a part is; the run's own process is on the head."""
    return domains()[handle.node] if handle.node else "a"


async def until(holds: Callable[[], bool]) -> None:
    """Waits for a condition."""
    async with asyncio.timeout(120.0):
        while not holds():  # noqa: ASYNC110 (nobody tells of it)
            await asyncio.sleep(0.05)


def test_parts_are_where_their_failure_domains_say_and_apart_where_they_must_be(cluster: Any) -> None:
    async def run() -> None:
        parts = [Resources(0.5, failure_domain=domain, part=f"part-{domain}") for domain in "bca"]
        with open_executor(settings_for(cluster, placement="strict_spread")) as executor:
            await executor.reserve(parts)
            handles = [await executor.spawn(Part, resources=part) for part in parts]
            assert [domain_of(handle) for handle in handles] == ["b", "c", "a"]
            assert len({await handle.call(Pulsing.pulse) for handle in handles}) == 3
            await executor.shutdown()

    asyncio.run(run())


def test_more_parts_than_machines_to_keep_them_apart_are_refused(cluster: Any) -> None:
    async def run() -> None:
        parts = [Resources(0.1, part=f"part-{number}") for number in range(4)]
        settings = settings_for(cluster, placement="strict_spread", placement_timeout_s=3.0)
        with (
            open_executor(settings) as executor,
            pytest.raises(
                ResourceError, match=r"cluster\.placement: Ray has too few resources.*'strict_spread'"
            ),
        ):
            await executor.reserve(parts)

    asyncio.run(run())


class Bench:
    """A supervised part on the cluster."""

    def __init__(
        self, executor: Any, settings: ClusterConfig, part: Resources, needs_room: bool = False
    ) -> None:
        """`needs_room`: whether the executor has reserved none for it."""
        self.observer = RecordingObserver()
        self.journal = FaultJournal(MemorySink(), self.observer)
        self.supervision = Supervision(settings, self.journal)
        self.was_on: list[str] = []

        async def spawn(avoid: frozenset[str]) -> Handle[Any]:
            if needs_room:
                await executor.make_room(part)
            asked = Resources(part.num_cpus, failure_domain=part.failure_domain, part=part.part, avoid=avoid)
            return await executor.spawn(Part, resources=asked)

        async def prepare(handle: Handle[Any]) -> None:
            self.was_on.append(domain_of(handle))

        self.supervisor = Supervisor(part.part, spawn, prepare, self.supervision)

    async def kill(self) -> None:
        """Kills its process, and waits for the next."""
        seen = len(self.was_on)
        handle = await self.supervisor.ready(60.0)
        os.kill(await handle.call(Pulsing.pulse), signal.SIGKILL)
        await until(lambda: len(self.was_on) > seen)
        await self.supervisor.ready(60.0)


def test_a_machine_on_which_a_part_keeps_failing_is_left_alone(cluster: Any) -> None:
    async def run() -> None:
        settings = settings_for(cluster, placement="strict_spread", quarantine_after=2)
        parts = [Resources(0.5, failure_domain="a", part="trainer"), Resources(0.5, part="engine-0")]
        with open_executor(settings) as executor:
            await executor.reserve(parts)
            bench = Bench(executor, settings, parts[1])
            await bench.supervisor.start()
            await bench.kill()
            first, second = bench.was_on
            assert first == second != "a", "where it has been reserved"
            await bench.kill()
            assert bench.was_on[2] != first, "its reservation is on a machine in quarantine"
            assert bench.journal.counts == {"lost": 2, "restarted": 2, "quarantined": 1}
            await bench.supervisor.close()
            await executor.shutdown()

    asyncio.run(run())


def test_a_part_whose_machine_goes_down_comes_back_on_another(cluster: Any) -> None:
    async def run() -> None:
        settings = settings_for(cluster, placement="strict_spread", start_timeout_s=30.0, give_up_after=20)
        parts = [Resources(0.5, failure_domain="a", part="trainer"), Resources(0.5, part="engine-0")]
        with open_executor(settings) as executor:
            await executor.reserve(parts)
            bench = Bench(executor, settings, parts[1])
            await bench.supervisor.start()
            lost = (await bench.supervisor.ready()).node
            gone = next(node for node in cluster.worker_nodes if node.node_id == lost)
            await asyncio.to_thread(cluster.remove_node, gone, False)
            await until(lambda: len(bench.was_on) > 1)
            assert bench.was_on[1] not in (bench.was_on[0], "")
            assert bench.journal.counts["restarted"] == 1
            await bench.supervisor.close()
            await executor.shutdown()

    asyncio.run(run())


def test_room_for_one_part_more_comes_with_a_machine_goes_with_it_and_comes_again(cluster: Any) -> None:
    async def run() -> None:
        settings = settings_for(cluster, start_timeout_s=60.0, give_up_after=20)
        part = Resources(0.5, failure_domain="d", part="worker-1")
        with open_executor(settings) as executor:
            await executor.reserve([Resources(0.5, failure_domain="a", part="trainer")])
            bench = Bench(executor, settings, part, needs_room=True)
            starting = asyncio.ensure_future(bench.supervisor.start())
            await asyncio.sleep(2.0)
            assert not starting.done()
            node = add_node(cluster, "d")  # in the main thread, as Ray wants it
            await starting
            await asyncio.to_thread(cluster.remove_node, node, False)
            await until(lambda: bench.supervisor.handle is None)
            await asyncio.sleep(2.0)
            add_node(cluster, "d")
            await until(lambda: len(bench.was_on) > 1)
            await bench.supervisor.ready(60.0)
            assert bench.was_on == ["d", "d"]
            assert bench.journal.counts["restarted"] == 1
            await bench.supervisor.close()
            executor.release_room("worker-1")
            await executor.make_room(Resources(1.0, failure_domain="d", part="worker-2"))
            await executor.shutdown()

    asyncio.run(run())
