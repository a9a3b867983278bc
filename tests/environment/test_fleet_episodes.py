"""Sessions of a run whose sandboxes are on a fleet: hosts join, retire and die while they play."""

from __future__ import annotations

import asyncio

from etude.records import SamplingParams, Status, Trajectory, TrajectoryId
from etude.sandbox.fleet.fleet import Fleet
from etude.sandbox.fleet.registry import FleetConfig
from etude_quickstart.memory_backend import MemoryBackend
from tests.environment.playing import SOLVES, TASK, new_environment, scripted

QUICK = FleetConfig(heartbeat_s=0.02, heartbeat_timeout_s=60, create_timeout_s=60, queue_wait_s=60)


def test_sessions_play_on_while_hosts_join_retire_and_die() -> None:
    async def run() -> list[Trajectory]:
        hosts = {name: MemoryBackend() for name in ("a", "b")}
        fleet = Fleet(dict(hosts), QUICK)
        environment = new_environment(fleet)

        async def play(index: int) -> Trajectory:
            identity = TrajectoryId("run", TASK.id, 0, 0, index)
            await asyncio.sleep(0.01 * index)
            return await environment.run(TASK, identity, scripted(SOLVES), (7, index), SamplingParams())

        playing = [asyncio.ensure_future(play(index)) for index in range(24)]
        await asyncio.sleep(0.03)
        await fleet.add_host("c", MemoryBackend())
        fleet.retire("a")
        await asyncio.sleep(0.03)
        fleet.mark_dead("b", "its power is gone")
        trajectories = await asyncio.gather(*playing)
        assert set(fleet.registry.hosts) == {"a", "b", "c"}
        await fleet.close()
        return trajectories

    trajectories = asyncio.run(run())
    assert {one.status for one in trajectories} == {Status.DONE}
    assert all(one.reward is not None and one.reward.total == 1.0 for one in trajectories)
