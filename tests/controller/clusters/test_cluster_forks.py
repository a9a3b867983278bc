"""A session that is to be forked is played where its siblings are: in the run's own cluster."""

import asyncio
from pathlib import Path

from etude.config import RlConfig
from etude.records import TrajectoryId
from etude.rollout.forks import Members
from tests.controller.clusters.playing import World
from tests.environment.playing import FAILS, SOLVES, TASK, script_of
from tests.fakes.scripted import ScriptedSampler
from tests.rollout.collecting import task_source


def test_forked_sessions_are_played_here_whatever_other_clusters_play(tmp_path: Path) -> None:
    world = World(tmp_path)
    config = RlConfig.model_validate({"group_size": 2, "forks": {"share": 1.0, "size": 3, "turn": "random"}})
    members = Members(world.runner, config, "run", 1, task_source)
    sampler = ScriptedSampler(script_of(lambda name: SOLVES if "/2~" in name else FAILS), route_shape=(2, 2))

    async def play() -> None:
        episode = await members.play(TASK, 0, 0, sampler)
        assert episode.origin is not None
        assert [m.id for m in episode.siblings] == [
            TrajectoryId("run", TASK.id, 0, 0, index) for index in (2, 3, 4)
        ]
        for member in episode.siblings:
            routes = member.segments[0].routes
            assert routes is not None
            assert len(world.blobs.get(routes)) == len(member.segments[0].tokens), "where the run keeps them"
        assert not sampler.open_sessions

    asyncio.run(play())
