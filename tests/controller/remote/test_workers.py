import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from etude.environment.fork_groups import ForkedEpisode
from etude.environment.member import MemberSampler
from etude.environment.runners import EnvironmentTimes, EpisodeRequest, add_times, latest_times
from etude.errors import PartLostError, StoreError
from etude.protocols import Sampler
from etude.records import BlobRef, SamplingParams, Status
from etude.store.blobs import MemoryBlobs
from tests.controller.remote.building import FAST, until
from tests.controller.remote.working import Workers, identity
from tests.environment.playing import TASK


@pytest.mark.slow
def test_a_worker_begins_without_torch() -> None:
    heavy = "{'torch', 'transformers', 'pandas'} & set(sys.modules)"
    code = f"import sys, etude.controller.remote.rollout_part\nassert not {heavy}, {heavy}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_worker_runs_the_session_that_would_run_here(tmp_path: Path) -> None:
    async def run() -> None:
        workers = Workers(tmp_path)
        await workers.start()
        await workers.made.serve(0)
        there = await asyncio.gather(*(workers.run(index) for index in range(6)))
        blobs = MemoryBlobs()
        here = [await workers.run_here(index, blobs) for index in range(6)]
        for one, other in zip(there, here, strict=True):
            assert (one.id, one.status, one.cause) == (other.id, other.status, other.cause)
            assert one.reward == other.reward
            assert one.reward is not None
            for mine, theirs in zip(one.segments, other.segments, strict=True):
                assert mine.tokens.tobytes() == theirs.tokens.tobytes()
                assert mine.routes is not None
                assert theirs.routes is not None
                routes = workers.blobs.get(mine.routes)
                assert routes.tobytes() == blobs.get(theirs.routes).tobytes(), "kept where the run keeps them"
        assert not any(len(workers.newest(name)._blobs) for name in workers.handles), "and nowhere else"
        assert workers.episodes.times.num_episodes == 6
        assert [workers.newest(name)._environment.times.num_episodes for name in workers.handles] == [3, 3]
        await workers.shutdown()

    asyncio.run(run())


def test_sessions_that_left_another_in_its_middle_come_with_it_and_the_routes_they_share(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        workers = Workers(tmp_path, num_workers=1)
        await workers.start()
        await workers.made.serve(0)
        worker = workers.newest("worker-0")
        play = worker._environment.play

        async def fork(request: EpisodeRequest, sampler: Sampler) -> ForkedEpisode:
            whole = (await play(request, sampler)).trajectory
            return ForkedEpisode(whole, (replace(whole, id=identity(7)),))

        worker._environment.play = fork
        request = EpisodeRequest(TASK, identity(0), (5, 0), SamplingParams(), training=True)
        forked = await workers.episodes.play(request, workers.made.fleet)
        (sibling,) = forked.siblings
        assert (forked.trajectory.id, sibling.id) == (identity(0), identity(7))
        for mine, theirs in zip(forked.trajectory.segments, sibling.segments, strict=True):
            assert mine.routes is not None
            assert theirs.routes is not None
            assert workers.blobs.get(mine.routes).tobytes() == workers.blobs.get(theirs.routes).tobytes()
        assert not len(worker._blobs)
        await workers.shutdown()

    asyncio.run(run())


def test_sessions_of_a_worker_that_dies_begin_anew_with_another_and_count_it(tmp_path: Path) -> None:
    async def run() -> None:
        workers = Workers(tmp_path)
        await workers.start()  # nothing is in service yet: sessions wait for it
        sessions = [asyncio.ensure_future(workers.run(index)) for index in range(4)]
        await until(lambda: workers.running() == {"worker-0": 2, "worker-1": 2})
        workers.handles["worker-0"][-1].kill()
        await until(lambda: len(workers.handles["worker-0"]) == 2)
        await until(lambda: sum(workers.running().values()) == 4)
        await workers.made.serve(0)
        trajectories = await asyncio.gather(*sessions)
        assert [one.id.index for one in trajectories] == [0, 1, 2, 3]
        assert sorted(one.attempt for one in trajectories) == [0, 0, 1, 1]
        assert all(one.reward is not None for one in trajectories)
        assert workers.episodes.times.num_infrastructure_failures == 2
        assert workers.made.journal.counts == {"lost": 1, "restarted": 1}
        await workers.shutdown()

    asyncio.run(run())


def test_engines_forget_what_a_worker_that_died_had_asked_of_them(tmp_path: Path) -> None:
    async def run() -> None:
        workers = Workers(tmp_path, num_workers=1)
        await workers.start()
        await workers.made.serve(0)
        await workers.run(0)
        engine = workers.made.newest("engine-0").part
        before = {name for name in engine._exchanges if name.startswith("worker-0")}
        assert len(before) == 1
        workers.handles["worker-0"][-1].kill()
        await until(lambda: not before & set(engine._exchanges))
        await workers.run(1)
        await workers.shutdown()

    asyncio.run(run())


def test_a_session_that_is_given_up_ends_where_it_runs(tmp_path: Path) -> None:
    async def run() -> None:
        workers = Workers(tmp_path, num_workers=1)
        await workers.start()
        view = MemberSampler(workers.made.fleet, defers_close=False)
        session = asyncio.ensure_future(workers.run(0, view))
        await until(lambda: workers.running() == {"worker-0": 1})
        workers.newest("worker-0")._views[0].num_tokens = 3  # as if it had sampled some
        await until(lambda: view.num_tokens == 3)
        session.cancel()
        with pytest.raises(asyncio.CancelledError):
            await session
        assert workers.running() == {"worker-0": 0}, "when it is over here it is over there"
        assert workers.made.journal.counts == {}
        await workers.shutdown()

    asyncio.run(run())


def test_the_tokens_of_a_session_are_told_to_who_wants_to_know(tmp_path: Path) -> None:
    async def run() -> None:
        workers = Workers(tmp_path, num_workers=1)
        await workers.start()
        await workers.made.serve(0)
        view = MemberSampler(workers.made.fleet, defers_close=False)
        trajectory = await workers.run(0, view)
        assert view.num_tokens == trajectory.num_sampled_tokens > 0
        await workers.shutdown()

    asyncio.run(run())


def test_workers_follow_engines_that_die_come_back_join_and_leave(tmp_path: Path) -> None:
    async def run() -> None:
        workers = Workers(tmp_path, num_workers=1)
        await workers.start()
        fleet = workers.made.fleet
        await workers.made.serve(0)
        first = await workers.run(0)
        workers.made.newest("engine-0").kill()
        again = await workers.run(0)
        assert again.segments[0].tokens.tobytes() == first.segments[0].tokens.tobytes()
        assert again.attempt == 0, "a lost engine is no lost session"
        await fleet.join("engine-1", workers.made.spawning("engine-1"))
        version = await workers.made.serve(1)
        await fleet.leave("engine-0")
        moved = await workers.run(0)
        assert moved.oldest_version == version
        assert any(name.startswith("worker-0") for name in workers.made.newest("engine-1").part._exchanges)
        await fleet.leave("engine-1")
        waiting = asyncio.ensure_future(workers.run(1))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await fleet.join("engine-0", workers.made.spawning("engine-0"))
        assert (await waiting).oldest_version == version
        await workers.shutdown()

    asyncio.run(run())


def test_a_worker_that_lost_an_engine_alone_finds_it_again(tmp_path: Path) -> None:
    async def run() -> None:
        workers = Workers(tmp_path, num_workers=1)
        await workers.start()
        await workers.made.serve(0)
        await workers.run(0)
        sampler = workers.newest("worker-0")._sampler
        sampler._engines["engine-0"].disconnect("a cable")
        await workers.run(1)
        assert workers.made.journal.counts == {}
        names = set(workers.made.newest("engine-0").part._exchanges)
        assert sum(name.startswith("worker-0") for name in names) == 1, "the line that broke is forgotten"
        await workers.shutdown()

    asyncio.run(run())


def test_a_session_whose_workers_die_each_time_is_the_infrastructures_failure(tmp_path: Path) -> None:
    async def run() -> None:
        workers = Workers(tmp_path, num_workers=1, settings=FAST.model_copy(update={"max_attempts": 2}))
        await workers.start()
        session = asyncio.ensure_future(workers.run(0))
        for number in (1, 2):
            await until(lambda: workers.running() == {"worker-0": 1})
            workers.handles["worker-0"][-1].kill()
            await until(lambda number=number: len(workers.handles["worker-0"]) > number or session.done())
        failed = await session
        assert failed.status is Status.INFRASTRUCTURE
        assert failed.reward is None
        assert failed.attempt == 1
        assert failed.num_sampled_tokens == 0
        await workers.shutdown()

    asyncio.run(run())


class FullAtFirst(MemoryBlobs):
    """A disk that has no room for the first array."""

    is_full = True

    def put(self, array: NDArray[Any]) -> BlobRef:
        if self.is_full:
            self.is_full = False
            raise StoreError("could not be written: no space left")
        return super().put(array)


@pytest.mark.slow
def test_a_session_whose_routes_cannot_be_kept_is_begun_anew(tmp_path: Path) -> None:
    async def run() -> None:
        workers = Workers(tmp_path, num_workers=1, blobs=FullAtFirst())
        await workers.start()
        await workers.made.serve(0)
        trajectory = await workers.run(0)
        assert trajectory.attempt == 1
        assert trajectory.reward is not None
        assert workers.made.journal.counts == {}, "the worker did nothing wrong"
        await workers.shutdown()

    asyncio.run(run())


def test_without_any_worker_left_sessions_say_so(tmp_path: Path) -> None:
    async def run() -> None:
        settings = FAST.model_copy(update={"give_up_after": 1})
        workers = Workers(tmp_path, num_workers=1, settings=settings)
        await workers.start()
        workers.handles["worker-0"][-1].kill()
        await until(lambda: "given up" in workers.made.journal.counts)
        with pytest.raises(PartLostError, match="will not be started again"):
            await workers.run(0)
        await workers.shutdown()

    asyncio.run(run())


def test_times_of_processes_add_up_and_the_later_of_two_reports_counts() -> None:
    early, late = EnvironmentTimes(1.0, 2.0, 3, 4), EnvironmentTimes(2.0, 2.0, 5, 4)
    assert add_times([early, late]) == EnvironmentTimes(3.0, 4.0, 8, 8)
    assert add_times([]) == EnvironmentTimes()
    assert latest_times(late, early) == late == latest_times(early, late)
