"""Sessions that clusters play for a run over loopback HTTP: each returns exactly once, despite failures."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.controller.clusters.client import ControlLostError
from etude.controller.clusters.wire import RunFingerprint
from etude.environment.fork_groups import ForkedEpisode
from etude.environment.runners import EpisodeRequest, EpisodeRunner
from etude.errors import ConfigError, PartLostError
from etude.records import Status, Trajectory, TrajectoryId
from tests.controller.clusters.playing import Link, NoWeights, SlowRunner, World, manifest_at, version_at
from tests.environment.playing import SOLVES, TASK, new_environment, run_episode, scripted
from tests.store.builders import same


def go(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def test_a_session_comes_back_as_if_it_had_been_played_here(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open() as world:
            world.join("far-away")
            found = await world.session()
            assert found.cluster == "far-away"
            assert found.reward is not None
            assert found.reward.task == 1.0
            (segment,) = found.segments
            assert segment.routes is not None
            assert world.blobs.get(segment.routes).shape[0] == len(segment.tokens)
            assert {span.version.step for span in segment.version_spans} == {0}
            assert len(world.inbox) == 1, "on disk until the log has it"
            here = await asyncio.to_thread(run_episode, new_environment(), scripted(SOLVES))
            assert np.array_equal(here.segments[0].tokens, segment.tokens)
            assert same(here.turns[0].calls, found.turns[0].calls)

    go(scenario())


def test_many_sessions_over_two_clusters_come_back_once_each(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open() as world:
            world.join("a"), world.join("b")
            found = await asyncio.gather(*(world.session(number) for number in range(16)))
            assert [one.id.group for one in found] == list(range(16))
            assert {one.cluster for one in found} == {"a", "b"}
            assert world.control.board.counts.kept == 16

    go(scenario())


def test_an_answer_that_is_lost_costs_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open() as world:
            link = Link()
            link.lose_answers = {"/session", "/join"}
            cluster, _ = world.join(link=link)
            assert (await world.session()).status is Status.DONE
            await world.until(lambda: cluster.counts.kept == 1)
            assert world.control.board.counts.kept == 1
            assert world.control.board.counts.repeated == 1

    go(scenario())


@pytest.mark.parametrize("fault", ["damage", "cut_bodies"])
def test_a_damaged_or_torn_upload_is_refused_counted_and_sent_again(tmp_path: Path, fault: str) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open() as world:
            link = Link()
            getattr(link, fault).add("/session")
            world.join(link=link)
            assert (await world.session()).status is Status.DONE
            assert world.control.traffic.damaged == 1
            assert world.control.board.counts.kept == 1

    go(scenario())


def test_a_full_disk_refuses_sessions_until_there_is_room(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open() as world:
            blocker = tmp_path / "inbox"
            blocker.write_text("a file where the directory should be")
            world.join()
            session = asyncio.create_task(world.session())
            await world.until(lambda: world.control.traffic.unwritten > 0)
            assert not session.done()
            blocker.unlink()
            assert (await session).status is Status.DONE

    go(scenario())


def test_a_cluster_that_vanishes_loses_its_session_to_another_and_what_it_brings_later_is_dropped(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with World(tmp_path, lease_s=1.0).open() as world:
            link, slow = Link(), SlowRunner()
            vanishing, _ = world.join("vanishing", link, slow)
            session = asyncio.create_task(world.session())
            await world.until(lambda: slow.began >= 1)
            link.is_cut = True
            await asyncio.sleep(1.3)
            world.join("other")
            assert (await session).cluster == "other"
            assert world.control.board.counts.lapsed >= 1
            link.is_cut = False
            await world.until(lambda: slow.cancelled == slow.began)
            assert vanishing.counts.kept == 0
            later = asyncio.create_task(world.session(1))
            slow.go.set()
            await later

    go(scenario())


def test_a_short_outage_costs_no_session(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open() as world:
            link, slow = Link(), SlowRunner()
            world.join("a", link, slow)
            session = asyncio.create_task(world.session())
            await world.until(lambda: slow.began == 1)
            link.is_cut = True
            slow.go.set()
            await asyncio.sleep(0.5)
            link.is_cut = False
            assert (await session).status is Status.DONE
            assert world.control.board.counts.given == 1

    go(scenario())


def test_a_cluster_that_is_killed_and_comes_back_under_its_name_takes_up_its_work(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path, lease_s=600.0).open() as world:
            link, slow = Link(), SlowRunner()
            _, task = world.join("a", link, slow)
            session = asyncio.create_task(world.session())
            await world.until(lambda: slow.began == 1)
            link.is_cut = True  # as kill -9 does: nobody says good-bye
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            world.join("a")
            assert (await session).status is Status.DONE, "its successor does not wait for its leases"

    go(scenario())


def test_draining_lets_sessions_end_and_leaves_the_rest_to_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open() as world:
            draining, slow = asyncio.Event(), SlowRunner()
            cluster, task = world.join("a", runner=slow, draining=draining, max_sessions=1)
            first = asyncio.create_task(world.session(0))
            await world.until(lambda: slow.began == 1)
            second = asyncio.create_task(world.session(1))
            draining.set()
            await asyncio.sleep(0.1)
            assert not task.done()
            slow.go.set()
            assert (await first).cluster == "a"
            await task
            assert cluster.counts.kept == 1
            world.join("b")
            assert (await second).cluster == "b"

    go(scenario())


def test_a_drain_that_takes_too_long_gives_its_sessions_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open() as world:
            draining, slow = asyncio.Event(), SlowRunner()
            _, task = world.join("a", runner=slow, draining=draining, drain_s=0.1)
            session = asyncio.create_task(world.session())
            await world.until(lambda: slow.began == 1)
            draining.set()
            await task
            assert slow.cancelled == 1
            world.join("b")
            assert (await session).cluster == "b"

    go(scenario())


def test_a_cluster_that_waits_for_its_run_can_be_asked_to_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open() as world:
            link, draining = Link(), asyncio.Event()
            link.is_cut = True
            _, task = world.join(link=link, draining=draining)
            await asyncio.sleep(0.1)
            draining.set()
            await asyncio.wait_for(task, 30)

    go(scenario())


def test_who_is_wanted_no_more_is_aborted_where_it_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open() as world:
            slow = SlowRunner()
            world.join(runner=slow)
            session = asyncio.create_task(world.session())
            await world.until(lambda: slow.began == 1)
            session.cancel()
            await world.until(lambda: slow.cancelled == 1)
            assert world.control.board.counts.withdrawn == 1
            slow.go.set()
            assert (await world.session(1)).status is Status.DONE

    go(scenario())


def test_sessions_go_only_to_weights_that_are_new_enough(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open(step=0) as world:
            sink = NoWeights()
            world.join("behind", sink=sink, sampled_step=1)
            await world.until(lambda: sink.current() is not None)
            sink.failures = 1_000
            await world.serve(1)
            session = asyncio.create_task(world.session())
            await world.until(lambda: any("cannot be fetched" in line for line in world.observer.lines))
            assert not session.done(), "the cluster serves what is too old"
            sink.failures = 0
            found = await session
            assert {span.version.step for s in found.segments for span in s.version_spans} == {1}

    go(scenario())


def test_a_version_with_the_same_weights_is_a_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open(step=0) as world:
            sink = NoWeights()
            world.join(sink=sink)
            await world.until(lambda: sink.current() is not None)
            same_weights = replace(manifest_at(1), version=replace(version_at(0), step=1))
            await world.sink.stage(same_weights)
            await world.sink.activate(same_weights.version)
            await world.until(lambda: (version := sink.current()) is not None and version.step == 1)

    go(scenario())


def test_a_lag_that_is_allowed_is_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path, max_version_lag=1).open(step=0) as world:
            sink = NoWeights()
            world.join("behind", sink=sink, sampled_step=0)
            await world.until(lambda: sink.current() is not None)
            sink.failures = 1_000
            await world.serve(1)
            found = await world.session()
            assert found.oldest_version is not None
            assert found.oldest_version.step == 0

    go(scenario())


def test_a_session_sampled_by_other_weights_than_were_published_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path, max_gives=1).open(step=0) as world:
            world.join("liar", sampled_step=5)
            found = await world.session()
            assert found.status is Status.INFRASTRUCTURE
            assert "weights" in found.cause
            assert found.reward is None
            assert world.control.traffic.damaged >= 1

    go(scenario())


def test_what_fails_there_is_played_again_elsewhere_and_at_last_reported(tmp_path: Path) -> None:
    class Failing(EpisodeRunner):
        async def play(self, request: EpisodeRequest, sampler: object) -> ForkedEpisode:
            raise OSError("no sandboxes here")

    async def scenario() -> None:
        async with World(tmp_path, max_gives=2).open() as world:
            failing, _ = world.join("failing", runner=Failing())
            found = await world.session()
            assert found.status is Status.INFRASTRUCTURE
            assert "no sandboxes here" in found.cause
            assert failing.counts.failed == 2
            world.join("working")
            await world.until(lambda: world.control.figures()["clusters"] == 2)
            assert (await world.session(1)).status is Status.DONE

    go(scenario())


def test_sessions_that_the_infrastructure_failed_are_no_result_while_others_may_try(tmp_path: Path) -> None:
    class Failed(EpisodeRunner):
        async def play(self, request: EpisodeRequest, sampler: object) -> ForkedEpisode:
            cause = "SandboxError: it died"
            return ForkedEpisode(Trajectory(request.identity, (), (), Status.INFRASTRUCTURE, cause))

    async def scenario() -> None:
        async with World(tmp_path, max_gives=2).open() as world:
            world.join("failing", runner=Failed())
            found = await world.session()
            assert (found.status, found.cause) == (Status.INFRASTRUCTURE, "SandboxError: it died")
            assert world.control.board.counts.given == 2

    go(scenario())


def test_a_cluster_that_would_play_other_sessions_is_refused_with_what_differs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open() as world:
            _, task = world.join(fingerprint=RunFingerprint({"model": "another", "tokenizer": "bytes"}))
            with pytest.raises(ConfigError, match="model") as caught:
                await task
            assert caught.value.field == "model"
            assert world.control.num_refused == 1

    go(scenario())


def test_a_wrong_token_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open() as world:
            for token in (None, "another"):
                _, task = world.join(token=token)
                with pytest.raises(ConfigError, match="token") as caught:
                    await task
                assert "another" not in str(caught.value.received)

    go(scenario())


def test_a_run_that_is_away_for_too_long_ends_the_cluster(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open() as world:
            link = Link()
            _, task = world.join(link=link, patience_s=0.5)
            await world.until(lambda: "/v1/beat" in link.paths)
            link.is_cut = True
            with pytest.raises(ControlLostError):
                await asyncio.wait_for(task, 60)

    go(scenario())


def test_a_run_without_clusters_ends_with_what_to_do(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path, patience_s=0.2, lease_s=4.0).open() as world:
            with pytest.raises(PartLostError, match="no cluster") as caught:
                await world.session()
            assert "etude sample" in str(caught.value)

    go(scenario())


def test_some_sessions_may_run_here(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path, local_sessions=1).open() as world:
            found = await world.session(sampler=scripted(SOLVES))
            assert found.cluster == "local"

    go(scenario())


def test_a_resumed_run_does_not_have_played_again_what_had_come(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open(step=0) as world:
            world.join("a")
            before = await world.session()
        async with World(tmp_path).open(step=0) as resumed:
            found = await resumed.session()
            assert np.array_equal(found.segments[0].tokens, before.segments[0].tokens)
            assert found.segments[0].routes is not None
            assert resumed.runner.num_from_inbox == 1
        async with World(tmp_path).open(step=3) as later:  # too old by now
            later.join("b", sampled_step=3)
            assert (await later.session()).cluster == "b"

    go(scenario())


def test_what_the_log_has_leaves_the_inbox(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open() as world:
            world.join()
            await world.session()
            world.inbox.sweep(lambda identity: identity.task == TASK.id)
            assert len(world.inbox) == 0
            assert not list((tmp_path / "inbox").iterdir())

    go(scenario())


def test_sessions_may_travel_through_a_store(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = tmp_path / "store"
        (store / "sessions").mkdir(parents=True)
        (store / "sessions" / "left.session").write_bytes(b"of a sitting that was killed")
        async with World(tmp_path / "run", trajectories_url=str(store)).open() as world:
            cluster, _ = world.join()
            assert (await world.session()).status is Status.DONE
            await world.until(lambda: cluster.counts.kept == 1)
            await world.until(lambda: not [p for p in store.rglob("*") if p.is_file()])

    go(scenario())


def test_the_clocks_of_run_and_clusters_are_never_compared(tmp_path: Path) -> None:
    async def scenario() -> None:
        def ahead() -> float:
            return time.monotonic() + 1e9

        async with World(tmp_path, ahead).open() as world:
            world.join("a")
            assert (await world.session()).status is Status.DONE
            counts = world.control.board.counts
            assert (counts.given, counts.kept, counts.lapsed) == (1, 1, 0)

    go(scenario())


def test_a_cluster_that_is_ended_just_as_it_is_about_to_beat_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path, lease_s=600.0).open() as world:
            for turns in range(5):
                link = Link()
                cluster, task = world.join(f"cluster-{turns}", link)
                await world.until(lambda link=link: link.paths.count("/v1/beat") >= 2)
                await asyncio.sleep(0.1)
                cluster._beat_now.set()
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task}, timeout=60)
                assert task.done()

    go(scenario())


def test_a_session_that_is_withdrawn_while_it_is_written_does_not_stay(tmp_path: Path) -> None:
    """No trajectory log would ever have it, so nothing would remove it."""

    async def scenario() -> None:
        async with World(tmp_path).open() as world:
            put, begun, go_on = world.inbox.put, threading.Event(), threading.Event()

            def slowly(identity: TrajectoryId, data: bytes) -> None:
                begun.set()
                go_on.wait(60)
                put(identity, data)

            world.inbox.put = slowly  # type: ignore[method-assign]
            world.join()
            session = asyncio.create_task(world.session())
            await world.until(begun.is_set)
            session.cancel()
            await world.until(lambda: world.control.board.counts.withdrawn == 1)
            go_on.set()
            await world.until(lambda: world.control.board.counts.late == 1)
            assert len(world.inbox) == 0
            assert list((tmp_path / "inbox").iterdir()) == []

    go(scenario())
