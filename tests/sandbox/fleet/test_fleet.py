"""A fleet over hosts that fail: placement, retries, death, forks, queueing.

In virtual time: how long anything may take counts for what waits, not for how busy this machine is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from benchmarks.simulation.virtual_time import run_virtual

from etude.errors import AgentError, ConfigError, SandboxError
from etude.sandbox.errors import (
    CapacityError,
    PathMissingError,
    SandboxLostError,
    SandboxMissingError,
    TemplateError,
)
from etude.sandbox.fleet.fleet import Fleet
from etude.sandbox.fleet.host import HostSpec
from etude.sandbox.fleet.hosts import Capacity, Pressure
from etude.sandbox.fleet.registry import FleetConfig
from etude.sandbox.template import Template
from etude.sandbox.types import Resources
from etude_quickstart.memory_backend import MemoryBackend
from tests.sandbox.fleet.fakes import FakeHost, SleeplessHost

GB = 1 << 30
ROOM = Capacity(64, 4 * GB, 64 * GB)
"""For four sandboxes of a gigabyte."""
BIG = Resources(memory_bytes=GB)
QUICK = FleetConfig(
    heartbeat_s=0.02,
    heartbeat_timeout_s=0.05,
    missed_heartbeats=2,
    create_timeout_s=0.5,
    queue_wait_s=0.3,
    max_queued=2,
)
FILES = Template({"a.txt": "one"})


def with_fleet(
    hosts: dict[str, Any], scenario: Callable[[Fleet], Awaitable[Any]], config: FleetConfig = QUICK
) -> Any:
    async def run() -> Any:
        specs = {name: HostSpec(host, ROOM, host) for name, host in hosts.items()}
        fleet = Fleet(specs, config, now_s)
        try:
            return await scenario(fleet)
        finally:
            for host in hosts.values():
                host.hung = False
            await fleet.close()

    return run_virtual(run())


def now_s() -> float:
    """Virtual seconds."""
    return asyncio.get_running_loop().time()


def places(fleet: Fleet) -> dict[str, int]:
    return {row.name: len(row.reservations) for row in fleet.registry.scheduler.hosts.values()}


async def until(condition: Callable[[], bool], limit_s: float = 2.0) -> None:
    end_s = now_s() + limit_s
    while not condition():
        assert now_s() < end_s, "it never came to be"
        await asyncio.sleep(0.005)


def test_sandboxes_spread_work_and_leave_no_place_taken():
    hosts = {"a": FakeHost(), "b": FakeHost()}

    async def scenario(fleet: Fleet) -> None:
        boxes = await asyncio.gather(*(fleet.create(FILES, BIG) for _ in range(8)))
        assert places(fleet) == {"a": 4, "b": 4}
        assert len({box.id for box in boxes}) == 8
        await boxes[0].files.write("a.txt", "two")
        assert await boxes[0].files.read("a.txt") == b"two"
        assert await boxes[1].files.read("a.txt") == b"one"
        infos = await fleet.list()
        assert {info.id for info in infos} == {box.id for box in boxes}
        same = await fleet.connect(boxes[0].id)
        assert await same.files.read("a.txt") == b"two"
        for box in boxes:
            await box.kill()
            await box.kill()
        assert places(fleet) == {"a": 0, "b": 0}
        with pytest.raises(SandboxMissingError):
            await boxes[0].files.read("a.txt")

    with_fleet(hosts, scenario)
    assert hosts["a"].closed and hosts["b"].closed


def test_a_failing_host_is_replaced_and_its_place_given_back():
    hosts = {"bad": FakeHost(), "good": FakeHost()}
    hosts["bad"].refuses = SandboxError("no kernel")

    async def scenario(fleet: Fleet) -> None:
        for _ in range(4):
            assert (await fleet.create(FILES, BIG)).id.startswith("good:")
        assert places(fleet) == {"bad": 0, "good": 4}

    with_fleet(hosts, scenario)
    assert hosts["bad"].creates == 1


def test_what_the_caller_or_the_agent_did_wrong_is_not_tried_again():
    for error in (TemplateError("no such image"), AgentError("the agent's doing")):
        hosts = {"a": FakeHost(), "b": FakeHost()}
        for host in hosts.values():
            host.refuses = error

        async def scenario(fleet: Fleet, error: Exception = error) -> None:
            with pytest.raises(type(error)):
                await fleet.create(FILES, BIG)
            assert places(fleet) == {"a": 0, "b": 0}

        with_fleet(hosts, scenario)
        assert sum(host.creates for host in hosts.values()) == 1


def test_a_start_that_every_host_fails_says_so_and_ends_soon():
    hosts = {"a": FakeHost(), "b": FakeHost()}
    for host in hosts.values():
        host.refuses = SandboxError("no kernel")

    async def scenario(fleet: Fleet) -> None:
        with pytest.raises(SandboxError, match="no kernel"):
            await fleet.create(FILES, BIG)

    with_fleet(hosts, scenario)


def test_an_agents_error_passes_through_and_keeps_its_sandbox():
    async def scenario(fleet: Fleet) -> None:
        box = await fleet.create(FILES, BIG)
        with pytest.raises(PathMissingError):
            await box.files.read("none")
        assert await box.files.read("a.txt") == b"one"

    with_fleet({"a": FakeHost()}, scenario)


def test_a_dead_host_ends_calls_in_flight_and_loses_its_sandboxes_at_once():
    hosts = {"a": FakeHost(), "b": FakeHost()}

    async def scenario(fleet: Fleet) -> None:
        boxes = [await fleet.create(FILES, BIG) for _ in range(4)]
        doomed = [box for box in boxes if box.id.startswith("a:")]
        hosts["a"].hung = True
        calls = [asyncio.ensure_future(box.files.read("a.txt")) for box in doomed]
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 2.0)
        assert all(isinstance(result, SandboxLostError) for result in results)
        began_s = now_s()
        for box in doomed:
            with pytest.raises(SandboxLostError, match="host a died"):
                await box.files.read("a.txt")
            await box.kill()
            with pytest.raises(SandboxLostError):
                await fleet.connect(box.id)
        assert now_s() == began_s
        assert places(fleet) == {"a": 0, "b": 2}
        assert [row.alive for row in fleet.registry.scheduler.hosts.values()] == [False, True]
        assert (await fleet.create(FILES, BIG)).id.startswith("b:")

    with_fleet(hosts, scenario)


def test_a_start_on_a_host_that_dies_is_made_elsewhere():
    hosts = {"a": FakeHost(), "b": FakeHost()}

    async def scenario(fleet: Fleet) -> None:
        await fleet.start()
        hosts["a"].hung = True
        boxes = await asyncio.gather(*(fleet.create(FILES, BIG) for _ in range(4)))
        assert all(box.id.startswith("b:") for box in boxes)

    with_fleet(hosts, scenario)


def test_a_host_that_returns_is_emptied_before_it_is_used():
    hosts = {"a": FakeHost(), "b": FakeHost()}

    async def scenario(fleet: Fleet) -> None:
        boxes = [await fleet.create(FILES, BIG) for _ in range(4)]
        assert len(hosts["a"].live) == 2
        lost = fleet.mark_dead("a", "its power supply")
        assert set(lost) == {box.id for box in boxes if box.id.startswith("a:")}
        await until(lambda: fleet.registry.scheduler.hosts["a"].alive)
        assert not hosts["a"].live
        assert {(await fleet.create(FILES, BIG)).id.split(":")[0] for _ in range(2)} == {"a"}

    with_fleet(hosts, scenario)


def test_a_start_that_times_out_or_is_cancelled_leaves_nothing_behind():
    hosts = {"a": FakeHost()}

    async def scenario(fleet: Fleet) -> None:
        await fleet.start()
        hosts["a"].create_s = 5.0
        with pytest.raises(SandboxError, match="did not answer"):
            await fleet.create(FILES, BIG)
        task = asyncio.ensure_future(fleet.create(FILES, BIG))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert places(fleet) == {"a": 0}
        assert not hosts["a"].live

    with_fleet(hosts, scenario)


def test_a_start_that_succeeds_too_late_is_undone():
    hosts = {"a": FakeHost()}

    async def scenario(fleet: Fleet) -> None:
        await fleet.start()
        original = hosts["a"].create

        async def stubborn(*args: Any, **kwargs: Any) -> Any:
            try:
                await asyncio.sleep(0.6)
            except asyncio.CancelledError:
                await asyncio.sleep(0.1)
            return await original(*args, **kwargs)

        hosts["a"].create = stubborn
        with pytest.raises(SandboxError):
            await fleet.create(FILES, BIG)
        await until(lambda: hosts["a"].creates == 1 and not hosts["a"].live)
        assert places(fleet) == {"a": 0}

    with_fleet(hosts, scenario)


def test_a_full_fleet_lets_requests_wait_in_order_and_not_for_ever():
    async def scenario(fleet: Fleet) -> None:
        boxes = [await fleet.create(FILES, BIG) for _ in range(4)]
        first = asyncio.ensure_future(fleet.create(FILES, BIG))
        await asyncio.sleep(0.01)
        second = asyncio.ensure_future(fleet.create(FILES, BIG))
        await asyncio.sleep(0.01)
        with pytest.raises(CapacityError, match="wait already"):
            await fleet.create(FILES, BIG)
        await boxes[0].kill()
        assert (await first).id.startswith("a:")
        with pytest.raises(CapacityError, match="waited"):
            await second
        assert places(fleet) == {"a": 4}

    with_fleet({"a": FakeHost()}, scenario)


def test_a_cancelled_request_leaves_the_queue():
    async def scenario(fleet: Fleet) -> None:
        boxes = [await fleet.create(FILES, BIG) for _ in range(4)]
        waiting = asyncio.ensure_future(fleet.create(FILES, BIG))
        await asyncio.sleep(0.01)
        waiting.cancel()
        # The place comes free in the very instant in which its taker gives up.
        await boxes[0].kill()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert places(fleet) == {"a": 3}
        await fleet.create(FILES, BIG)

    with_fleet({"a": FakeHost()}, scenario)


def test_a_new_host_serves_those_that_wait():
    async def scenario(fleet: Fleet) -> None:
        for _ in range(4):
            await fleet.create(FILES, BIG)
        waiting = asyncio.ensure_future(fleet.create(FILES, BIG))
        await asyncio.sleep(0.01)
        await fleet.add_host("b", HostSpec(FakeHost(), ROOM))
        assert (await waiting).id.startswith("b:")

    with_fleet({"a": FakeHost()}, scenario)


def test_sandboxes_that_end_by_themselves_free_their_places():
    hosts = {"a": FakeHost()}

    async def scenario(fleet: Fleet) -> None:
        box = await fleet.create(FILES, BIG)
        hosts["a"].live.clear()
        await until(lambda: places(fleet) == {"a": 0})
        with pytest.raises(SandboxMissingError):
            await box.files.read("a.txt")

    with_fleet(hosts, scenario)


def test_a_new_fleet_counts_what_already_runs():
    hosts = {"a": FakeHost()}

    async def scenario(fleet: Fleet) -> None:
        old = await hosts["a"].create(FILES, BIG)
        await fleet.start()
        assert places(fleet) == {"a": 1}
        box = await fleet.connect(f"a:{old.id}")
        assert await box.files.read("a.txt") == b"one"
        assert places(fleet) == {"a": 1}
        with pytest.raises(SandboxMissingError):
            await fleet.connect("nowhere:1")

    with_fleet(hosts, scenario)


def test_measured_pressure_reaches_the_scheduler():
    hosts = {"a": FakeHost(), "b": FakeHost()}
    hosts["a"].measured = Pressure(0.9, 0.9, 0.9)
    hosts["b"].measured = Pressure(0.0, 0.0, 0.0)

    async def scenario(fleet: Fleet) -> None:
        boxes = [await fleet.create(FILES, BIG) for _ in range(3)]
        assert all(box.id.startswith("b:") for box in boxes)

    with_fleet(hosts, scenario)


def test_forks_stay_until_the_host_is_full_and_then_move():
    hosts = {"a": FakeHost(), "b": FakeHost()}

    async def scenario(fleet: Fleet) -> None:
        box = await fleet.create(FILES, BIG)
        home = box.id.split(":")[0]
        await box.files.write("a.txt", "two")
        copies = await box.fork(8)
        boxes = [copy for copy in copies if not isinstance(copy, SandboxError)]
        assert [copy.id.split(":")[0] for copy in boxes[:3]] == [home] * 3
        assert len(boxes) == 7 and isinstance(copies[-1], CapacityError)
        for copy in boxes:
            assert await copy.files.read("a.txt") == b"two"
        assert places(fleet) == {"a": 4, "b": 4}
        assert len(hosts["a"].live) == len(hosts["b"].live) == 4

    with_fleet(hosts, scenario)


def test_a_fork_that_is_cancelled_while_copies_move_leaves_none_anywhere():
    hosts = {"a": FakeHost(), "b": FakeHost()}

    async def scenario(fleet: Fleet) -> None:
        box = await fleet.create(FILES, BIG)
        home = box.id.split(":")[0]
        away = "b" if home == "a" else "a"
        hosts[away].create_s = 600.0
        forking = asyncio.ensure_future(box.fork(5))
        await asyncio.sleep(1.0)
        assert len(hosts[home].live) == 6
        forking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forking
        assert places(fleet) == {home: 1, away: 0}
        assert (len(hosts[home].live), len(hosts[away].live)) == (1, 0)

    with_fleet(hosts, scenario)


def test_forks_that_cannot_move_are_errors_in_their_places():
    hosts = {"a": SleeplessHost(), "b": SleeplessHost()}

    async def scenario(fleet: Fleet) -> None:
        box = await fleet.create(FILES, BIG)
        copies = await box.fork(5)
        assert [isinstance(copy, CapacityError) for copy in copies] == [False] * 3 + [True] * 2
        assert sum(places(fleet).values()) == 4

    with_fleet(hosts, scenario)


def test_a_snapshot_is_restored_on_its_host():
    hosts = {"a": FakeHost(), "b": FakeHost()}

    async def scenario(fleet: Fleet) -> None:
        box = await fleet.create(FILES, BIG)
        await box.files.write("a.txt", "two")
        snapshot = await box.create_snapshot()
        assert [info.id for info in await fleet.list_snapshots()] == [snapshot.id]
        again = await fleet.create(resources=BIG, snapshot=snapshot.id)
        assert again.id.split(":")[0] == box.id.split(":")[0] == snapshot.id.split(":")[0]
        assert await again.files.read("a.txt") == b"two"
        await fleet.delete_snapshot(snapshot.id)
        assert await fleet.list_snapshots() == []

    with_fleet(hosts, scenario)


def test_capabilities_are_what_every_host_can_do():
    async def scenario(fleet: Fleet) -> None:
        able = fleet.capabilities()
        assert (able.backend, able.isolation, able.fork, able.migrate) == (
            "fleet",
            "none",
            "filesystem",
            None,
        )
        assert able.pause == frozenset()
        assert fleet.doctor() == ["a: is no real host", "b: is no real host"]

    with_fleet({"a": FakeHost(), "b": SleeplessHost()}, scenario)


def test_a_closed_fleet_and_bad_names_are_refused():
    async def scenario() -> None:
        fleet = Fleet({"a": FakeHost()}, QUICK, now_s)
        await fleet.close()
        await fleet.close()
        with pytest.raises(SandboxError, match="closed"):
            await fleet.create(FILES)
        for hosts in ({}, {"": FakeHost()}, {"a:b": FakeHost()}):
            with pytest.raises(ConfigError):
                Fleet(hosts)

    run_virtual(scenario())


def test_a_fleet_of_memory_backends_keeps_the_contract():
    async def scenario() -> None:
        fleet = Fleet({"a": MemoryBackend(), "b": MemoryBackend()})
        try:
            boxes = [await fleet.create(FILES) for _ in range(4)]
            await boxes[0].files.write("a.txt", "two")
            copies = [copy for copy in await boxes[0].fork(2) if not isinstance(copy, SandboxError)]
            assert [await copy.files.read("a.txt") for copy in copies] == [b"two", b"two"]
            snapshot = await boxes[0].create_snapshot()
            again = await fleet.create(snapshot=snapshot.id)
            await boxes[1].pause("filesystem")
            assert (await boxes[1].get_info()).state == "paused"
            await fleet.connect(boxes[1].id)
            assert (await boxes[1].get_info()).state == "running"
            assert [await box.files.read("a.txt") for box in (boxes[0], again)] == [b"two", b"two"]
            assert await boxes[0].diff() == {"a.txt": b"two"}
            assert sum(places(fleet).values()) == 7
        finally:
            await fleet.close()

    asyncio.run(scenario())
