"""Weights that travel while the next step is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import pytest
from benchmarks.simulation.virtual_time import run_virtual

from etude.controller.parity import ParityGate
from etude.controller.publication import Publication
from etude.controller.utilisation import Utilisation
from etude.errors import ParityError, PartLostError, StoreError, WeightUpdateError
from etude.observe.metrics import MemorySink
from etude.observe.observer import RecordingObserver
from etude.protocols import Handle, KvPolicy, Trainer
from etude.records import PolicyVersion, WeightManifest
from etude.training.parity import ParityFigures


class TimedTrainer(Handle[Trainer]):
    """A trainer whose weights are a number."""

    def __init__(self, fails: dict[int, Exception] | None = None) -> None:
        """`fails`: number of a call of publish, from 1 -> what it raises."""
        self.step = 0
        self.num_published = 0
        self._fails = fails or {}
        self._turn = asyncio.Lock()

    async def send(self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        assert method == "publish"
        async with self._turn:
            self.num_published += 1
            if self.num_published in self._fails:
                raise self._fails[self.num_published]
            return WeightManifest(PolicyVersion("run", self.step), (), "memory:")

    async def take_step(self, seconds: float) -> None:
        async with self._turn:
            await asyncio.sleep(seconds)
            self.step += 1

    async def stop(self) -> None: ...

    def kill(self) -> None: ...


class TimedSink:
    """A WeightSink that takes its time, and may fail."""

    def __init__(self, stage_s: float, fails: dict[int, Exception] | None = None) -> None:
        """`fails`: number of a staging, from 1 -> what it raises."""
        self.served: list[tuple[int, float]] = []
        """(step, when it came into service)"""
        self.staging = self.most_staging = self.num_staged = 0
        self._stage_s, self._fails = stage_s, fails or {}

    async def stage(self, manifest: WeightManifest) -> None:
        self.num_staged += 1
        number = self.num_staged
        self.staging += 1
        self.most_staging = max(self.most_staging, self.staging)
        try:
            await asyncio.sleep(self._stage_s)
            if number in self._fails:
                raise self._fails[number]
        finally:
            self.staging -= 1

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        assert kv == "recompute"
        self.served.append((version.step, asyncio.get_running_loop().time()))

    def current(self) -> PolicyVersion | None:
        return PolicyVersion("run", self.served[-1][0]) if self.served else None


class NotingGate:
    """Stands in for a ParityGate: knows whether both sides have the same weights."""

    def __init__(self, trainer: TimedTrainer, measure_s: float = 0.0, bad_step: int = -1) -> None:
        self.measured: list[int] = []
        self._trainer, self._measure_s, self._bad = trainer, measure_s, bad_step

    async def measure(self, version: PolicyVersion) -> ParityFigures:
        assert self._trainer.step == version.step, "the two sides have other weights"
        await asyncio.sleep(self._measure_s)
        assert self._trainer.step == version.step, "a step was taken meanwhile"
        self.measured.append(version.step)
        return ParityFigures(0.0, 0.0, 0.0, 0.0, num_tokens=4, num_sequences=1)

    def judge(self, figures: ParityFigures, version: PolicyVersion) -> None:
        if version.step == self._bad:
            raise ParityError("too far apart", field="parity.limit")


class World:
    """A publication of either kind, between a trainer and a sink."""

    def __init__(
        self,
        stage_s: float = 5.0,
        overlapped: bool = True,
        with_gate: bool = False,
        sink_fails: dict[int, Exception] | None = None,
        trainer_fails: dict[int, Exception] | None = None,
        **gate: Any,
    ) -> None:
        self.trainer, self.sink = TimedTrainer(trainer_fails), TimedSink(stage_s, sink_fails)
        self.gate = NotingGate(self.trainer, **gate) if with_gate else None
        self.in_service: list[int] = []
        self.metrics, self.observer = MemorySink(), RecordingObserver()
        clock = asyncio.get_running_loop().time
        self.utilisation = Utilisation(clock, dict)
        self.publication = Publication(
            self.trainer,
            self.sink,
            cast(ParityGate | None, self.gate),
            self.in_service.append,
            self.metrics,
            self.observer,
            self.utilisation,
            "recompute",
            clock,
            clock,
            overlapped,
        )

    async def train(self, num_steps: int, train_s: float, collect_s: float = 0.0) -> float:
        """Steps as the loop takes them; virtual seconds."""
        began = asyncio.get_running_loop().time()
        if not self.in_service:
            await self.publication.publish(0)
        for step in range(self.trainer.step + 1, self.trainer.step + num_steps + 1):
            await self.publication.while_collecting(asyncio.sleep(collect_s))
            async with self.publication.changing_weights():
                await self.trainer.take_step(train_s)
            await self.publication.publish(step)
        return asyncio.get_running_loop().time() - began


def in_virtual_time(play: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await play()

    run_virtual(main())


def test_steps_go_on_while_weights_travel() -> None:
    async def play() -> None:
        overlapped, in_turn = World(), World(overlapped=False)
        took = await overlapped.train(4, train_s=10.0)
        assert took == pytest.approx(5.0 + 4 * 10.0), "only the first publication is waited for"
        assert overlapped.utilisation.total["publish"] == pytest.approx(5.0)
        await overlapped.publication.complete()
        assert overlapped.in_service == [0, 1, 2, 3, 4]
        assert overlapped.sink.served[2][1] == pytest.approx(5.0 + 20.0 + 5.0)
        assert await in_turn.train(4, train_s=10.0) == pytest.approx(5.0 + 4 * 15.0)
        assert in_turn.in_service == [0, 1, 2, 3, 4]
        assert in_turn.utilisation.total["publish"] == pytest.approx(25.0)

    in_virtual_time(play)


def test_at_most_one_publication_is_under_way() -> None:
    async def play() -> None:
        world = World(stage_s=7.0)
        await world.train(5, train_s=1.0)
        await world.publication.complete()
        assert world.sink.most_staging == 1
        assert world.in_service == [0, 1, 2, 3, 4, 5]

    in_virtual_time(play)


@pytest.mark.parametrize("error", [WeightUpdateError("a wrong base"), StoreError("no answer")])
def test_a_publication_that_fails_is_tried_again(error: Exception) -> None:
    async def play() -> None:
        world = World(stage_s=1.0, sink_fails={2: error})
        await world.train(2, train_s=1.0, collect_s=10.0)
        await world.publication.complete()
        assert world.in_service == [0, 1, 2]
        assert world.publication.pop_metrics()["publications_failed"] == 1.0
        assert [row["failed"] for row in world.metrics.rows] == [str(error)]
        assert "tried again" in world.observer.lines[0]

    in_virtual_time(play)


def test_the_second_attempt_covers_the_step_that_was_taken_meanwhile() -> None:
    async def play() -> None:
        world = World(stage_s=1.0, sink_fails={2: WeightUpdateError("a wrong base")})
        await world.train(2, train_s=1.2)  # the second attempt waits for the second step
        await world.publication.complete()
        assert world.in_service == [0, 2], "and the step's own publication has nothing left to do"
        assert world.trainer.num_published == 3

    in_virtual_time(play)


def test_weights_that_cannot_be_copied_are_tried_again_beside_the_next_step() -> None:
    async def play() -> None:
        world = World(stage_s=1.0, trainer_fails={2: StoreError("the upload before failed")})
        await world.train(2, train_s=10.0)
        await world.publication.complete()
        assert world.in_service[-1] == 2

    in_virtual_time(play)


def test_what_fails_for_good_wakes_whoever_waits_for_groups() -> None:
    async def play() -> None:
        error = StoreError("no space")
        world = World(stage_s=1.0, sink_fails=dict.fromkeys(range(2, 10), error))
        with pytest.raises(StoreError, match="no space"):
            await world.train(2, train_s=1.0, collect_s=1e6)
        assert asyncio.get_running_loop().time() < 1.1e6
        await world.publication.close()
        lost = World(stage_s=1.0, sink_fails={2: PartLostError("no engine is left")})
        with pytest.raises(PartLostError):
            await lost.train(3, train_s=1.0)
        assert lost.sink.num_staged == 2, "nobody is left to try again with"
        await lost.publication.close()

    in_virtual_time(play)


def test_giving_up_leaves_nothing_running() -> None:
    async def play() -> None:
        world = World(stage_s=50.0)
        await world.train(1, train_s=1.0)
        assert world.sink.staging == 1
        await world.publication.close()
        assert world.sink.staging == 0
        assert world.in_service == [0]
        await world.publication.close()

    in_virtual_time(play)


def test_the_gate_measures_where_the_trainer_still_waits() -> None:
    async def play() -> None:
        world = World(stage_s=2.0, with_gate=True, measure_s=1.0)
        took = await world.train(3, train_s=1.0, collect_s=2.5)
        await world.publication.complete()
        assert world.gate is not None and world.gate.measured == [0, 1, 2, 3]
        assert took == pytest.approx(3.0 + 2.5 + 1.0 + 2 * (3.0 + 1.0)), "steps wait for a look to end"

    in_virtual_time(play)


def test_publications_that_the_gate_misses_are_counted_and_never_many() -> None:
    async def play() -> None:
        world = World(stage_s=2.0, with_gate=True)
        await world.train(9, train_s=5.0)
        assert world.gate is not None and world.gate.measured == [0, 4, 8]
        assert world.publication.pop_metrics()["parity_missed"] == 6.0
        await world.publication.complete()
        assert world.gate.measured == [0, 4, 8, 9], "before anything is saved the newest is looked at"
        await world.publication.complete()
        assert world.gate.measured == [0, 4, 8, 9]

    in_virtual_time(play)


def test_weights_that_do_not_pass_are_not_settled() -> None:
    async def play() -> None:
        world = World(stage_s=2.0, with_gate=True, bad_step=1)
        await world.train(1, train_s=5.0)
        with pytest.raises(ParityError):
            await world.publication.complete()
        await world.publication.close()

    in_virtual_time(play)
