"""A host that did not answer is skipped for a while; snapshots exported from and imported into a fleet.

In virtual time, but for what goes through files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.simulation.virtual_time import run_virtual

from etude.sandbox.errors import SandboxLostError, SandboxMissingError
from etude.sandbox.fleet.fleet import Fleet
from etude.sandbox.fleet.registry import FleetConfig
from etude.sandbox.template import Template
from etude_quickstart.memory_backend import MemoryBackend
from tests.sandbox.fleet.fakes import FakeHost

QUIET = FleetConfig(heartbeat_s=3600.0, heartbeat_timeout_s=1.0)


def fleet_of(hosts: dict[str, Any], config: FleetConfig, clock: Callable[[], float] | None = None) -> Fleet:
    """A fleet over fakes, which are not whole backends."""
    return Fleet(hosts, config, clock or asyncio.get_running_loop().time)


async def hosts_of(fleet: Fleet, num: int) -> set[str]:
    boxes: list[Any] = await asyncio.gather(*(fleet.create() for _ in range(num)))
    return {box.host.name for box in boxes}


@pytest.mark.parametrize(
    ("error", "expected"),
    [(SandboxLostError("gone", field="sandbox"), {"b"}), (SandboxMissingError("ended"), {"a", "b"})],
)
def test_nothing_is_placed_where_a_sandbox_was_lost_a_moment_ago(error: Exception, expected: set[str]):
    now_s = [0.0]

    async def scenario() -> None:
        fleet = fleet_of({"a": FakeHost(), "b": FakeHost()}, QUIET, lambda: now_s[0])
        box: Any = await fleet.create()
        while box.host.name != "a":
            box = await fleet.create()

        async def fail(inner: Any) -> None:
            raise error

        with pytest.raises(type(error)):
            await box.attempt(fail)
        assert await hosts_of(fleet, 16) == expected
        now_s[0] += QUIET.heartbeat_s + QUIET.heartbeat_timeout_s + 1
        assert "a" in await hosts_of(fleet, 16)
        await fleet.close()

    run_virtual(scenario())


def test_nothing_is_placed_on_a_host_that_missed_a_heartbeat_until_it_answers():
    async def scenario() -> None:
        silent = FakeHost()
        config = FleetConfig(heartbeat_s=0.02, heartbeat_timeout_s=0.05, missed_heartbeats=1000)
        fleet = fleet_of({"silent": silent, "other": FakeHost()}, config)
        assert await hosts_of(fleet, 8) == {"silent", "other"}
        before = silent.creates
        silent.hung = True
        await asyncio.sleep(0.2)
        assert await hosts_of(fleet, 8) == {"other"}
        assert silent.creates == before
        silent.hung = False
        await asyncio.sleep(0.3)
        assert "silent" in await hosts_of(fleet, 8)
        await fleet.close()

    run_virtual(scenario())


def test_suspected_hosts_are_used_where_there_are_no_others():
    async def scenario() -> None:
        fleet = fleet_of({"a": FakeHost(), "b": FakeHost()}, QUIET)
        await fleet.start()
        for host in fleet.registry.hosts.values():
            fleet.registry.suspect(host, TimeoutError())
        assert await hosts_of(fleet, 8) == {"a", "b"}
        await fleet.close()

    run_virtual(scenario())


def test_a_start_that_finds_its_host_gone_keeps_the_next_ones_away():
    async def scenario() -> None:
        dead, living = FakeHost(), FakeHost()
        dead.refuses = SandboxLostError("the connection failed", field="sandbox.server")
        fleet = fleet_of({"dead": dead, "living": living}, QUIET)
        for _ in range(8):
            await fleet.create()
        assert dead.creates <= 1
        assert len(living.live) == 8
        await fleet.close()

    run_virtual(scenario())


def test_a_snapshot_leaves_one_fleet_and_enters_another(tmp_path: Path):
    async def scenario() -> None:
        first = Fleet({"a": MemoryBackend(), "b": MemoryBackend()})
        second = Fleet({"c": MemoryBackend(), "d": MemoryBackend()})
        sandbox = await first.create(Template({"kept.txt": "kept"}))
        info = await sandbox.create_snapshot()
        await first.export_snapshot(info.id, tmp_path / "snapshot")
        entered = await second.import_snapshot(tmp_path / "snapshot")
        assert entered.id in {known.id for known in await second.list_snapshots()}
        assert {len(row.reservations) for row in second.registry.scheduler.hosts.values()} == {0}
        copy = await second.create(snapshot=entered.id)
        assert await copy.files.read("kept.txt") == b"kept"
        await first.close()
        await second.close()

    asyncio.run(scenario())


def test_a_host_that_is_removed_while_a_start_on_it_is_under_way_is_only_a_lost_one():
    async def scenario() -> None:
        slow = FakeHost()
        other: Any = FakeHost()
        slow.create_s = 30.0
        fleet = fleet_of({"slow": slow}, QUIET)
        starting: Any = asyncio.ensure_future(fleet.create())
        await asyncio.sleep(0.02)
        assert not await fleet.remove_host("slow"), "something is being made there"
        await fleet.add_host("other", other)
        fleet.mark_dead("slow", "a cable")
        assert await fleet.remove_host("slow")
        assert (await starting).host.name == "other"
        assert list(fleet.registry.hosts) == ["other"]
        await fleet.close()

    run_virtual(scenario())
