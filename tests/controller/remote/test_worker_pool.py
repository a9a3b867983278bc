"""Rollout workers that join and leave while sessions go on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from etude.config import ClusterConfig
from etude.controller.remote.worker_pool import KIND, WorkerPool
from etude.controller.supervision import FaultJournal
from etude.errors import PartLostError, ResourceError, RunDirectoryError
from etude.observe.metrics import MemorySink
from etude.observe.observer import RecordingObserver
from etude.observe.workers import WorkerFiles
from etude.protocols import Resources
from etude.records import Trajectory
from tests.controller.remote.building import FAST, until
from tests.controller.remote.working import Workers


class FewRooms:
    """Room for so many workers more."""

    def __init__(self, num_free: int) -> None:
        self.num_free = num_free
        self.taken: set[str] = set()
        self.changed = asyncio.Condition()

    async def make_room(self, part: Resources) -> None:
        """See Executor.make_room."""
        if part.part not in self.taken:
            async with self.changed:
                await self.changed.wait_for(lambda: self.num_free > 0)
            self.num_free -= 1
            self.taken.add(part.part)

    def release_room(self, part: str) -> None:
        """See Executor.release_room."""
        if part in self.taken:
            self.taken.remove(part)
            self.num_free += 1

    async def add(self, count: int) -> None:
        """A machine joins."""
        async with self.changed:
            self.num_free += count
            self.changed.notify_all()


class Pool:
    """Workers, their pool, and what is told of it."""

    def __init__(self, directory: Path, workers: Workers, num_free: int, **settings: Any) -> None:
        self.workers, self.rooms, self.metrics = workers, FewRooms(num_free), MemorySink()
        self.files = WorkerFiles(directory)
        self.hindered: list[Exception] = []
        """What the next starts raise."""
        self.pool = WorkerPool(
            workers.episodes,
            self._spawning,
            lambda name: Resources(part=name),
            list(workers.names),
            self.rooms,
            FAST.model_copy(update={"workers": len(workers.names), **settings}),
            self.files,
            FaultJournal(self.metrics, RecordingObserver(), {}, KIND),
        )

    def _spawning(self, needs: Resources) -> Any:
        spawn = self.workers.spawning(needs.part)

        async def hindered(avoid: frozenset[str]) -> Any:
            if self.hindered:
                raise self.hindered.pop(0)
            return await spawn(avoid)

        return hindered

    @property
    def up(self) -> list[str]:
        """Workers that are at work, as is told."""
        standing = self.files.read_status()["workers"]
        return sorted(name for name, state in standing.items() if state == "up")

    def events(self) -> list[tuple[str, str]]:
        """What has happened to whom."""
        return [(row["name"], row["mode"]) for row in self.metrics.rows]


@contextlib.asynccontextmanager
async def pooled(
    directory: Path, num_workers: int = 1, num_free: int = 0, **settings: Any
) -> AsyncIterator[Pool]:
    workers = Workers(directory, num_workers)
    await workers.start()
    pool = Pool(directory, workers, num_free, **settings)
    try:
        async with pool.pool:
            yield pool
    finally:
        await workers.shutdown()


def check(trajectories: list[Trajectory], num_sessions: int) -> None:
    """Each session is there once, with a reward, and at the first attempt."""
    assert [one.id.index for one in trajectories] == list(range(num_sessions))
    assert all(one.reward is not None for one in trajectories)
    assert {one.attempt for one in trajectories} == {0}


@pytest.mark.slow
def test_workers_join_when_more_are_asked_for_and_take_sessions(tmp_path: Path) -> None:
    async def run() -> None:
        async with pooled(tmp_path, num_free=2) as pool:
            await until(lambda: pool.files.read_status()["workers"] == {"worker-0": "up"})
            pool.files.write_request(3)
            await until(lambda: pool.up == ["worker-0", "worker-1", "worker-2"])
            sessions = [asyncio.ensure_future(pool.workers.run(index)) for index in range(6)]
            await until(lambda: set(pool.workers.running().values()) == {2})
            await pool.workers.made.serve(0)
            check(await asyncio.gather(*sessions), 6)
            assert pool.workers.episodes.times.num_episodes == 6
            assert pool.events() == [("worker-1", "joined"), ("worker-2", "joined")]
        with pytest.raises(RunDirectoryError, match="no run with rollout workers is in progress here"):
            pool.files.read_status()

    asyncio.run(run())


@pytest.mark.slow
def test_a_worker_that_is_told_to_leave_in_mid_session_plays_it_to_its_end(tmp_path: Path) -> None:
    async def run() -> None:
        async with pooled(tmp_path, num_workers=2) as pool:
            sessions = [asyncio.ensure_future(pool.workers.run(index)) for index in range(4)]
            await until(lambda: pool.workers.running() == {"worker-0": 2, "worker-1": 2})
            leaving = pool.workers.newest("worker-1")
            pool.files.write_request(1)
            await until(lambda: pool.files.read_status()["workers"]["worker-1"] == "draining")
            sessions += [asyncio.ensure_future(pool.workers.run(index)) for index in (4, 5)]
            await until(lambda: pool.workers.running()["worker-0"] == 4)
            await pool.workers.made.serve(0)  # which the worker that leaves must hear of
            check(await asyncio.gather(*sessions), 6)
            await until(lambda: pool.events() == [("worker-1", "left")])
            assert pool.up == ["worker-0"]
            assert (pool.metrics.rows[0]["sessions"], pool.metrics.rows[0]["handed_on"]) == (2, 0)
            assert leaving._environment.times.num_episodes == 2
            times = pool.workers.episodes.times
            assert (times.num_episodes, times.num_infrastructure_failures) == (6, 0)
            assert pool.workers.made.journal.counts == {}

    asyncio.run(run())


@pytest.mark.slow
def test_sessions_that_a_worker_cannot_end_in_time_are_handed_on_and_count_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with pooled(tmp_path, num_workers=2, drain_s=0.05) as pool:
            sessions = [asyncio.ensure_future(pool.workers.run(index)) for index in range(4)]
            await until(lambda: pool.workers.running() == {"worker-0": 2, "worker-1": 2})
            pool.files.write_request(1)
            await until(lambda: pool.events() == [("worker-1", "left")])
            assert pool.metrics.rows[0]["handed_on"] == 2
            assert pool.workers.newest("worker-0")._sessions.keys() == {0, 2, 4, 5}
            await pool.workers.made.serve(0)
            check(await asyncio.gather(*sessions), 4)
            times = pool.workers.episodes.times
            assert (times.num_episodes, times.num_infrastructure_failures) == (4, 0)
            names = set(pool.workers.made.newest("engine-0").part._exchanges)
            assert not any(name.startswith("worker-1") for name in names), "engines have forgotten it"

    asyncio.run(run())


def test_a_defect_in_a_worker_s_leaving_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any) -> None:
        raise ArithmeticError("a defect")

    async def run() -> None:
        async with pooled(tmp_path, num_workers=2) as pool:
            monkeypatch.setattr(pool.workers.episodes, "_fetch_last_times", fail)
            pool.files.write_request(1)
            told = [("worker-1", "did not leave in good order"), ("worker-1", "left")]
            await until(lambda: pool.events() == told)
            assert pool.up == ["worker-0"]

    asyncio.run(run())


def test_a_worker_that_dies_while_it_drains_loses_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with pooled(tmp_path, num_workers=2) as pool:
            sessions = [asyncio.ensure_future(pool.workers.run(index)) for index in range(4)]
            await until(lambda: pool.workers.running() == {"worker-0": 2, "worker-1": 2})
            pool.files.write_request(1)
            await until(lambda: pool.files.read_status()["workers"]["worker-1"] == "draining")
            pool.workers.handles["worker-1"][-1].kill()
            await until(lambda: ("worker-1", "left") in pool.events())
            await pool.workers.made.serve(0)
            trajectories = await asyncio.gather(*sessions)
            assert [one.id.index for one in trajectories] == [0, 1, 2, 3]
            assert all(one.reward is not None for one in trajectories)
            assert sorted(one.attempt for one in trajectories) == [0, 0, 1, 1]

    asyncio.run(run())


def test_as_many_join_as_there_is_room_for_up_to_the_most(tmp_path: Path) -> None:
    async def run() -> None:
        async with pooled(tmp_path, num_free=1, most_workers=4) as pool:
            await until(lambda: pool.up == ["worker-0", "worker-1"])
            await until(lambda: pool.files.read_status()["workers"].get("worker-2") == "joining")
            await pool.rooms.add(5)
            await until(lambda: len(pool.up) == 4)
            assert pool.rooms.num_free == 3
            pool.files.write_request(2)
            await until(lambda: pool.rooms.num_free == 5)
            assert pool.up == ["worker-0", "worker-1"]
            pool.files.write_request("auto")
            await until(lambda: len(pool.up) == 4)

    asyncio.run(run())


def test_who_waits_for_room_waits_no_longer_when_fewer_are_wanted(tmp_path: Path) -> None:
    async def run() -> None:
        async with pooled(tmp_path) as pool:
            pool.files.write_request(2)
            await until(lambda: pool.files.read_status()["workers"].get("worker-1") == "joining")
            pool.files.write_request(1)
            await until(lambda: pool.files.read_status()["workers"] == {"worker-0": "up"})
            await pool.rooms.add(1)
            await asyncio.sleep(0.05)
            assert (pool.up, pool.rooms.num_free) == (["worker-0"], 1)

    asyncio.run(run())


def test_a_worker_that_cannot_be_started_is_tried_again_and_then_left_until_somebody_asks(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        async with pooled(tmp_path, num_free=4, give_up_after=2) as pool:
            pool.hindered = [ResourceError("no sandboxes here") for _ in range(2)]
            pool.files.write_request(2)
            refusals = [("worker-1", "did not join"), ("worker-1", "none joins any more")]
            await until(lambda: pool.events() == refusals)
            await asyncio.sleep(0.05)
            assert pool.events() == refusals
            assert pool.rooms.num_free == 4
            pool.files.write_request(3)
            await until(lambda: len(pool.up) == 3)

    asyncio.run(run())


def test_a_worker_that_joins_takes_the_place_of_one_that_was_given_up(tmp_path: Path) -> None:
    async def run() -> None:
        settings = FAST.model_copy(update={"give_up_after": 1})
        workers = Workers(tmp_path, 1, settings)
        await workers.start()
        workers.handles["worker-0"][-1].kill()
        await until(lambda: "given up" in workers.made.journal.counts)
        with pytest.raises(PartLostError, match="will not be started again"):
            await workers.run(0)
        joining = asyncio.ensure_future(workers.episodes.join("worker-1", workers.spawning("worker-1")))
        session = asyncio.ensure_future(workers.run(0))
        await workers.made.serve(0)
        assert (await session).reward is not None
        await joining
        await workers.shutdown()

    asyncio.run(run())


def test_a_disk_that_is_full_for_a_while_keeps_no_worker_from_joining_and_is_written_to_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(standing: Mapping[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def run() -> None:
        async with pooled(tmp_path, num_free=2) as pool:
            with monkeypatch.context() as disk:
                disk.setattr(pool.files, "write_status", full)
                pool.files.write_request(2)
                await until(lambda: ("worker-1", "joined") in pool.events())
            await until(lambda: pool.up == ["worker-0", "worker-1"])

    asyncio.run(run())


def test_less_than_one_worker_is_refused_and_so_is_a_file_that_says_nothing(tmp_path: Path) -> None:
    files = WorkerFiles(tmp_path)
    with pytest.raises(RunDirectoryError, match="no run with rollout workers"):
        files.write_request(2)
    files.write_status({"wanted": "auto", "workers": {}})
    with pytest.raises(RunDirectoryError, match=r"needs at least one.*received 0"):
        files.write_request(0)
    assert files.read_request() == "auto"
    for text in ("", "{}", "[]", '{"wanted": 0}', '{"wanted": true}', '{"wanted": "many"}'):
        (tmp_path / "workers-wanted.json").write_text(text)
        assert files.read_request() == "auto"
    files.write_request(2)
    assert files.read_request() == 2


def test_the_most_workers_are_no_fewer_than_those_to_begin_with() -> None:
    with pytest.raises(ValueError, match="workers: must be 1 to most_workers=4, received 0"):
        ClusterConfig(most_workers=4)
    with pytest.raises(ValueError, match="workers: must be 1 to most_workers=4, received 5"):
        ClusterConfig(workers=5, most_workers=4)
