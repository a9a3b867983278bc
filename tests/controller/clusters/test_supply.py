"""Clusters that do not receive new weights: they report it, and the run does not wait for them forever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from etude.controller.clusters.supply import Supply, WeightsLostError
from etude.errors import PartLostError, WeightUpdateError
from tests.controller.clusters.playing import NoWeights, World
from tests.controller.clusters.test_board import Clock

NEVER = 1_000_000


def new_supply() -> tuple[Supply, NoWeights, Clock]:
    link, clock = NoWeights(), Clock()
    return Supply(link, "http://relay", 10.0, clock), link, clock


def test_trouble_that_lasts_too_long_is_an_error_that_names_the_relay() -> None:
    supply, link, clock = new_supply()
    link.trouble = "the relay does not answer"
    supply.check()
    clock.now_s += 11
    with pytest.raises(WeightsLostError, match="does not answer") as caught:
        supply.check()
    assert (caught.value.field, caught.value.received) == ("weights.read_url", "http://relay")


def test_trouble_that_passes_is_forgotten() -> None:
    supply, link, clock = new_supply()
    for _ in range(5):
        link.trouble = "the relay does not answer"
        supply.check()
        clock.now_s += 9
        link.trouble = ""
        supply.check()


def test_a_version_that_could_not_be_had_is_trouble_until_another_arrives() -> None:
    supply, _, clock = new_supply()
    supply.record_failure(WeightUpdateError("damaged"))
    supply.check()
    clock.now_s += 9
    supply.check()
    supply.record_arrival()
    clock.now_s += 9
    supply.check()
    assert supply.trouble == ""


def test_versions_that_arrive_late_one_after_the_other_are_not_lost() -> None:
    """Each could not be had at first: whoever looks finds trouble every time."""
    supply, _, clock = new_supply()
    for _ in range(3):
        supply.record_failure(WeightUpdateError("the relay does not have it yet"))
        supply.check()
        clock.now_s += 9
        supply.check()
        supply.record_arrival()


def test_slow_weights_are_no_trouble() -> None:
    supply, _, clock = new_supply()
    clock.now_s += 1_000
    supply.check()


def test_a_cluster_without_weights_tells_the_run_gives_up_and_leaves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open() as world:
            cluster, task = world.join("stuck", sink=NoWeights(NEVER))
            await world.until(lambda: bool(world.lines))
            assert world.control.figures()["without_weights"] == 1
            assert "the cluster stuck: the relay is away" in world.lines[0]
            cluster._supply._patience_s = 0.1
            with pytest.raises(WeightsLostError, match="the relay is away") as caught:
                await asyncio.wait_for(task, 60)
            assert caught.value.received == "http://relay"
            assert not world.control.board.members

    asyncio.run(scenario())


def test_a_fetch_that_waits_is_trouble_too_and_its_end_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open() as world:
            sink = NoWeights()
            sink.trouble = "the relay does not answer"
            world.join("slow", sink=sink)
            await world.until(lambda: world.control.figures()["without_weights"] == 1)
            sink.trouble = ""
            await world.until(lambda: world.control.figures()["without_weights"] == 0)
            assert [line.partition(" the cluster slow")[0] for line in world.lines] == [
                "new weights do not reach",
                "new weights reach",
            ]

    asyncio.run(scenario())


def test_sessions_go_to_the_clusters_that_weights_reach(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path).open() as world:
            world.join("stuck", sink=NoWeights(NEVER), patience_s=60.0)
            await world.until(lambda: bool(world.lines))
            world.join("working")
            found = await asyncio.gather(*(world.session(number) for number in range(4)))
            assert {one.cluster for one in found} == {"working"}

    asyncio.run(scenario())


def test_a_run_does_not_wait_for_clusters_that_weights_never_reach(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path, patience_s=0.5, lease_s=4.0).open() as world:
            world.join("stuck", sink=NoWeights(NEVER), patience_s=60.0)
            await world.until(lambda: bool(world.lines))
            with pytest.raises(PartLostError, match="reached no cluster") as caught:
                await world.session()
            assert "stuck: the relay is away" in str(caught.value.received)

    asyncio.run(scenario())
