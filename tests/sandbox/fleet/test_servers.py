"""A fleet over sandbox servers: they join, drain, leave and share with other clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from etude.errors import ConfigError
from etude.sandbox.errors import SandboxLostError
from etude.sandbox.fleet.hosts import Capacity
from etude.sandbox.fleet.probe import NoProbe
from etude.sandbox.fleet.registry import FleetConfig
from etude.sandbox.types import Resources
from etude.sandbox.wire_types import encode
from etude_quickstart.memory_backend import MemoryBackend
from tests.sandbox.serving import TOKEN, build_app, served  # skips where the libraries are missing

from etude.sandbox.fleet.servers import CAPACITY, ServerFleet, ServerSpec  # isort: skip

QUICK = FleetConfig(heartbeat_s=0.05, heartbeat_timeout_s=60.0, queue_wait_s=60.0)
Specs = dict[str, ServerSpec]


@contextlib.asynccontextmanager
async def serving(*names: str) -> AsyncIterator[tuple[Specs, dict[str, MemoryBackend]]]:
    """Servers by name, and what they make sandboxes with."""
    backends = {name: MemoryBackend() for name in names}
    async with contextlib.AsyncExitStack() as stack:
        urls = {name: await stack.enter_async_context(served(app_of(one))) for name, one in backends.items()}
        yield {name: ServerSpec(url, TOKEN) for name, url in urls.items()}, backends


async def until(holds: Callable[[], bool]) -> None:
    """Waits for a condition."""
    async with asyncio.timeout(60.0):
        while not holds():  # noqa: ASYNC110 (nobody tells of it)
            await asyncio.sleep(0.01)


def app_of(backend: MemoryBackend) -> Any:
    """A server on a machine that has nothing else to do."""
    app = build_app({"memory": backend}, TOKEN)
    app.state.sandboxes.probe = NoProbe()
    return app


async def hosts_of(fleet: ServerFleet, count: int = 12) -> set[str]:
    """Where new sandboxes go."""
    boxes: list[Any] = await asyncio.gather(*(fleet.create() for _ in range(count)))
    found = {box.host.name for box in boxes}
    await asyncio.gather(*(box.kill() for box in boxes))
    return found


def test_sandboxes_spread_over_servers_whose_sizes_are_asked_for() -> None:
    async def scenario() -> None:
        async with serving("a", "b") as (specs, _):
            fleet = ServerFleet(specs, config=QUICK)
            assert await asyncio.to_thread(fleet.doctor) == []
            assert await hosts_of(fleet) == {"a", "b"}
            capacities = [host.capacity for host in fleet.registry.hosts.values()]
            assert capacities[0] == capacities[1]
            assert capacities[0].memory_bytes > 64 << 20
            await fleet.close()

    asyncio.run(scenario())


def test_a_server_gets_no_more_than_it_is_said_to_have() -> None:
    async def scenario() -> None:
        async with serving("a") as (specs, _):
            small = ServerSpec(specs["a"].url, TOKEN, {"memory_bytes": 1 << 30})
            fleet = ServerFleet({"a": small}, config=QUICK)
            wanted = Resources(memory_bytes=512 << 20)
            await fleet.create(resources=wanted)
            await fleet.create(resources=wanted)
            third = asyncio.ensure_future(fleet.create(resources=wanted))
            await until(lambda: len(fleet.registry.queue) == 1)
            await fleet.set_servers({"a": ServerSpec(specs["a"].url, TOKEN, {"memory_bytes": 2 << 30})})
            await third
            assert fleet.registry.hosts["a"].capacity.memory_bytes == 2 << 30
            await fleet.close()

    asyncio.run(scenario())


def test_a_server_joins_and_another_leaves_once_its_last_sandbox_has_ended() -> None:
    async def scenario() -> None:
        async with serving("a", "b") as (specs, backends):
            fleet = ServerFleet({"a": specs["a"]}, config=QUICK)
            box = await fleet.create()
            await box.files.write("kept.txt", "kept")
            await fleet.set_servers({"b": specs["b"]})
            assert await hosts_of(fleet) == {"b"}
            assert set(fleet.registry.hosts) == {"a", "b"}
            assert await box.files.read("kept.txt") == b"kept", "its session goes on, where it was"
            (copy,) = await box.fork(1)
            assert not isinstance(copy, Exception), "and may be copied there"
            await asyncio.gather(box.kill(), copy.kill())
            await fleet.set_servers({"b": specs["b"]})
            assert set(fleet.registry.hosts) == {"b"}
            assert not await backends["a"].list()
            await fleet.close()

    asyncio.run(scenario())


def test_a_server_that_drains_is_used_again_when_it_no_longer_does() -> None:
    async def scenario() -> None:
        async with serving("a", "b") as (specs, _):
            draining = {**specs, "a": ServerSpec(specs["a"].url, TOKEN, draining=True)}
            fleet = ServerFleet(draining, config=QUICK)
            assert fleet.num_in_use == 1
            assert await hosts_of(fleet) == {"b"}
            await fleet.set_servers(specs)
            assert await hosts_of(fleet) == {"a", "b"}
            await fleet.set_servers(draining)
            assert await hosts_of(fleet) == {"b"}
            await fleet.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_name_may_lead_to_another_server() -> None:
    async def scenario() -> None:
        async with serving("a", "b") as (specs, backends):
            fleet = ServerFleet({"a": specs["a"]}, config=QUICK)
            assert await hosts_of(fleet) == {"a"}
            await fleet.set_servers({"a": specs["b"]})
            box = await fleet.create()
            assert len(await backends["b"].list()) == 1
            await box.kill()
            await fleet.close()

    asyncio.run(scenario())


def test_the_list_is_followed_while_the_fleet_is_at_work() -> None:
    async def scenario() -> None:
        async with serving("a", "b") as (specs, _):
            lists: list[Specs | None] = [None, specs, None]
            fleet = ServerFleet(
                {"a": specs["a"]}, config=QUICK, poll=lambda: lists.pop(0) if lists else None, poll_s=0.01
            )
            await fleet.create()
            await until(lambda: not lists and set(fleet.registry.hosts) == {"a", "b"})
            assert await hosts_of(fleet) == {"a", "b"}
            await fleet.close()

    asyncio.run(scenario())


def test_clients_of_the_same_servers_leave_each_other_s_sandboxes_alone() -> None:
    async def scenario() -> None:
        async with serving("a") as (specs, backends):
            one, other = (ServerFleet(specs, owner=name, config=QUICK) for name in ("one", "other"))
            mine, theirs = await one.create(), await other.create()
            one.mark_dead("a", "a cable")
            with pytest.raises(SandboxLostError):
                await mine.get_info()
            await until(lambda: one.registry.hosts["a"].is_dead is False)
            assert [info.metadata["owner"] for info in await backends["a"].list()] == ["other"]
            assert (await theirs.get_info()).state == "running"
            assert [len(row.reservations) for row in one.registry.scheduler.hosts.values()] == [0]
            await one.close()
            assert (await theirs.get_info()).state == "running"
            await other.close()

    asyncio.run(scenario())


def test_what_a_killed_client_left_is_ended_before_its_successor_makes_anything() -> None:
    async def scenario() -> None:
        async with serving("a", "b") as (specs, backends):
            killed = ServerFleet(specs, owner="run", config=QUICK)
            await asyncio.gather(*(killed.create() for _ in range(6)))
            successor = ServerFleet(specs, owner="run", config=QUICK)
            await successor.start()
            assert not any([await backend.list() for backend in backends.values()])
            await successor.close()
            await killed.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_server_that_is_down_at_the_start_is_used_when_it_answers() -> None:
    async def scenario() -> None:
        async with serving("a") as (specs, _):
            async with served(app_of(MemoryBackend())) as url:
                port = int(url.rpartition(":")[2])
            config = FleetConfig(heartbeat_s=0.05, heartbeat_timeout_s=60.0, missed_heartbeats=10_000)
            fleet = ServerFleet({**specs, "b": ServerSpec(url, TOKEN)}, config=config)
            problems = await asyncio.to_thread(fleet.problems)
            assert list(problems) == ["b"]
            assert await hosts_of(fleet) == {"a"}
            async with served(app_of(MemoryBackend()), port):
                await until(lambda: fleet.registry.hosts["b"].fetch_capacity is None)
                await until(lambda: not fleet.registry.hosts["b"].missed)
                fleet.registry.scheduler.hosts["b"].suspected_until_s = 0.0
                assert await hosts_of(fleet) == {"a", "b"}
                await fleet.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["cpus", "memory_bytes", "disk_bytes"])
def test_a_capacity_that_cannot_be_is_no_answer(name: str) -> None:
    whole = encode(Capacity(2, 1 << 30, 1 << 40))
    assert CAPACITY.validate_python(whole) == Capacity(2, 1 << 30, 1 << 40)
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises((ValueError, ConfigError)):
            CAPACITY.validate_python({**whole, name: wrong})
    with pytest.raises(ValueError):
        CAPACITY.validate_python({key: value for key, value in whole.items() if key != name})
