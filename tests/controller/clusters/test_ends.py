"""The end of a run: every cluster is notified, whether it plays, is disconnected, or joins too late."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from etude.config import RunConfig
from etude.controller.clusters.client import ControlClient, ControlLostError
from etude.controller.clusters.joining import sample
from etude.controller.clusters.runner import RunnerAndSink, open_clusters
from etude.controller.clusters.sampling import OVER
from etude.observe.metrics import MemorySink
from etude.observe.observer import RecordingObserver
from etude.store.blobs import MemoryBlobs
from etude.store.trajectories import TrajectoryLog
from etude.weights.ending import EndMark, clear_over, mark_over, read_over
from etude.weights.folders import DirectoryFolder
from tests.controller.clusters.playing import TOKEN, Link, NoWeights, SlowRunner, World
from tests.environment.playing import new_environment, renderer


async def come_late(
    control: str, link: Link, store: Path | None = None, patience_s: float = 60.0, wait: bool = False
) -> list[str]:
    """What a cluster says that comes now."""
    observer = RecordingObserver()
    overrides = [] if store is None else [f'weights.read_url="{store}"']
    async with ControlClient(control, TOKEN, link) as client:
        counts = await asyncio.wait_for(
            sample(client, "late", overrides, observer, asyncio.Event(), patience_s=patience_s, wait=wait), 60
        )
    assert (counts.played, counts.failed) == (0, 0)
    return observer.lines


def cut() -> Link:
    link = Link()
    link.is_cut = True
    return link


def test_the_end_of_the_run_ends_its_clusters_which_say_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open() as world:
            _, task = world.join("a")
            await world.session()
            world.control.finish()
            await asyncio.wait_for(task, 30)
            assert world.observer.lines[-1] == f"a: {OVER}"

    asyncio.run(scenario())


def test_a_cluster_that_has_no_room_and_seldom_beats_learns_of_the_end_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path, lease_s=600.0).open() as world:
            slow = SlowRunner()
            _, task = world.join("a", runner=slow, max_sessions=1)
            session = asyncio.create_task(world.session())
            await world.until(lambda: slow.began == 1)
            world.control.finish()
            await asyncio.wait_for(task, 30)
            assert slow.cancelled == 1
            session.cancel()

    asyncio.run(scenario())


def test_a_cluster_that_comes_while_the_run_still_answers_is_told_that_it_is_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open() as world:
            world.control.finish()
            assert await come_late(world.server.url, Link()) == [f"late: {OVER}"]

    asyncio.run(scenario())


def test_a_cluster_that_comes_when_nobody_answers_learns_it_from_the_weight_store(tmp_path: Path) -> None:
    mark_over(DirectoryFolder(tmp_path), "run")
    assert asyncio.run(come_late("http://run", cut(), tmp_path)) == [f"late: {OVER}"]


def test_it_waits_all_the_same_if_it_is_told_to(tmp_path: Path) -> None:
    mark_over(DirectoryFolder(tmp_path), "run")
    with pytest.raises(ControlLostError):
        asyncio.run(come_late("http://run", cut(), tmp_path, patience_s=0.3, wait=True))


def test_a_cluster_that_comes_before_the_run_waits_for_it(tmp_path: Path) -> None:
    with pytest.raises(ControlLostError):
        asyncio.run(come_late("http://run", cut(), tmp_path, patience_s=0.3))


def test_a_cluster_that_was_cut_off_at_the_end_ends_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path / "run").open() as world:
            link, store = Link(), DirectoryFolder(tmp_path / "store")
            _, task = world.join("a", link, mark=EndMark(store), patience_s=60.0)
            await world.session()
            link.is_cut = True
            await asyncio.sleep(0.3)
            assert not task.done(), "the run may be away for a while"
            mark_over(store, "run")
            await asyncio.wait_for(task, 30)

    asyncio.run(scenario())


def test_a_store_that_is_away_says_nothing() -> None:
    assert not asyncio.run(EndMark(DirectoryFolder(Path("/proc/none"))).is_set())


def test_a_run_takes_the_mark_away_when_it_begins_and_leaves_it_when_it_is_over(tmp_path: Path) -> None:
    store = DirectoryFolder(tmp_path / "weights")
    config = RunConfig.model_validate(
        {"clusters": {"listen": "127.0.0.1:0", "lease_s": 0.2}, "weights": {"url": str(tmp_path / "weights")}}
    )

    async def sitting(*, ends: bool) -> None:
        opened = open_clusters(
            config,
            renderer(),
            RunnerAndSink(new_environment(), NoWeights()),
            MemoryBlobs().put,
            TrajectoryLog(tmp_path / "log"),
            tmp_path,
            MemorySink(),
            RecordingObserver(),
        )
        async with opened as runner_and_sink:
            assert read_over(store) is None
            if ends:
                await runner_and_sink.announce_end()
                assert read_over(store) == config.name

    mark_over(store, "the one before")
    asyncio.run(sitting(ends=False))
    assert read_over(store) is None, "it was interrupted, and may be resumed"
    asyncio.run(sitting(ends=True))
    assert read_over(store) == config.name
    clear_over(store)
    clear_over(store)
