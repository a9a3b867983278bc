import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.config import ClusterConfig
from etude.controller.local import LocalHandle
from etude.controller.remote.trainers import Reply, SupervisedTrainer
from etude.controller.supervision import FaultJournal, Supervision
from etude.controller.training_part import TrainingPart
from etude.errors import PartLostError, UserError
from etude.model import LanguageModel
from etude.observe.metrics import MemorySink, MetricRow
from etude.observe.observer import RecordingObserver
from etude.protocols import Handle
from etude.records import Group, PolicyVersion
from etude.training import save_checkpoint
from tests.controller.remote.building import config, until

FAST = ClusterConfig(heartbeat_s=0.02, silent_s=60.0, backoff_s=0.0, give_up_after=4, max_replay_steps=3)


class Counting:
    """Stands for a RemoteTrainingPart: its weights are the names of the groups that it was trained on."""

    def __init__(self, directory: Path) -> None:
        self.learnt: list[str] = []
        self.published = False
        self.asked: list[str] = []
        self.dies_at: str | None = None
        self.outages: list[tuple[float, str]] = []
        """Of the weight store, told at the next publication."""
        self.handle: LocalHandle[Counting] | None = None
        self._directory = directory
        self._model = LanguageModel(config(directory).model, 300)
        self._model.initialise(0)

    async def call_part(self, method: str, *arguments: Any) -> Reply:
        self.asked.append(method)
        if method == self.dies_at:
            assert self.handle is not None
            self.handle.kill()
            await asyncio.sleep(1.0)
        rows: list[MetricRow] = []
        value: Any = None
        if method == "step":
            groups: Sequence[Group] = arguments[0]
            assert arguments[1] == {}, "there are no routes"
            self.learnt += [group.id for group in groups]
            value = {"loss": float(len(self.learnt))}
        elif method == "publish":
            self.published = True
        elif method == "save":
            state = {"stage": "rl", "step": len(self.learnt), "learnt": self.learnt}
            save_checkpoint(self._directory / "latest", self._model, state)
            rows = [{"kind": "checkpoint", "step": len(self.learnt), "written_s": 0.1}]
        elif method == "restore":
            self.learnt = list(torch.load(arguments[0] / "state.pt")["learnt"])
        version = PolicyVersion("run", len(self.learnt), "digest" if self.published else "")
        lines = [f"said at {method}"] if method == "save" else []
        return Reply(value, version, rows, lines, self.outages if method == "publish" else ())

    async def pulse(self) -> None:
        pass


class World:
    """A supervised trainer and all processes that it had."""

    def __init__(self, directory: Path, settings: ClusterConfig = FAST) -> None:
        self.parts: list[Counting] = []
        self.dies_at: str | None = None
        """Of all of them."""
        self.metrics, self.observer = MemorySink(), RecordingObserver()
        self.journal = FaultJournal(self.metrics, self.observer)

        async def spawn(avoid: frozenset[str]) -> Handle[Any]:
            part = Counting(directory)
            part.handle, part.dies_at = LocalHandle(part), self.dies_at
            self.parts.append(part)
            return part.handle

        self.trainer = SupervisedTrainer(
            spawn,
            lambda ref: pytest.fail("nobody asks for routes"),
            directory / "latest",
            Supervision(settings, self.journal),
            self.metrics,
            self.observer,
        )

    async def train(self, *names: str) -> None:
        for name in names:
            await self.trainer.call(TrainingPart.step, [Group(name, "task", 0, ())])


@pytest.mark.parametrize("dies_at", ["step", "publish", "score"])
def test_a_new_trainer_has_learnt_what_the_lost_one_had_and_answers_what_that_was_asked(
    tmp_path: Path, dies_at: str
) -> None:
    async def run() -> World:
        world = World(tmp_path)
        await world.trainer.start()
        await world.train("a")
        await world.trainer.call(TrainingPart.save, {})
        await world.train("b")
        await world.trainer.call(TrainingPart.publish)
        world.parts[0].dies_at = dies_at
        if dies_at == "step":
            await world.train("c")
        else:
            await world.trainer.send(dies_at, (), {})
        await world.trainer.stop()
        return world

    world = asyncio.run(run())
    _, second = world.parts
    again = ["restore", "step"]
    assert second.asked == [*again, "publish", dies_at], "its version is named before anybody asks for scores"
    assert second.learnt == (["a", "b", "c"] if dies_at == "step" else ["a", "b"])
    assert world.journal.counts == {"lost": 1, "restarted": 1}
    assert "trainer: back at step 2, 1 trained again" in world.observer.lines


def test_a_call_that_no_process_outlives_is_given_up_and_says_whose(tmp_path: Path) -> None:
    async def run() -> World:
        # None is ever given up: each is counted as healthy before it dies.
        world = World(tmp_path, FAST.model_copy(update={"healthy_s": 1e-9}))
        world.dies_at = "publish"
        await world.trainer.start()
        await world.train("a")
        with pytest.raises(PartLostError, match=r"trainer: .*`publish` 4 times"):
            await world.trainer.call(TrainingPart.publish)
        await world.trainer.stop()
        return world

    world = asyncio.run(run())
    assert len(world.parts) >= FAST.give_up_after


def test_outages_of_the_weight_store_are_counted(tmp_path: Path) -> None:
    async def run() -> World:
        world = World(tmp_path)
        await world.trainer.start()
        world.parts[0].outages = [(2.5, "does not answer"), (0.5, "no room")]
        await world.train("a")
        await world.trainer.call(TrainingPart.publish)
        await world.trainer.stop()
        return world

    world = asyncio.run(run())
    assert world.journal.counts == {"away": 2}
    assert "weight store: away (no room)" in world.observer.lines
    rows = [(row["name"], row["mode"], row["down_s"]) for row in world.metrics.rows]
    assert rows == [("weight store", "away", 2.5), ("weight store", "away", 0.5)]


def test_without_a_checkpoint_a_new_trainer_begins_at_the_beginning(tmp_path: Path) -> None:
    async def run() -> World:
        world = World(tmp_path)
        await world.trainer.start()
        await world.train("a", "b")
        world.trainer.kill()
        await until(lambda: len(world.parts) == 2)
        await world.train("c")
        await world.trainer.stop()
        return world

    world = asyncio.run(run())
    assert world.parts[1].asked == ["step", "step", "step"]
    assert world.parts[1].learnt == ["a", "b", "c"]


def test_batches_are_kept_until_a_checkpoint_holds_them_and_then_it_is_due(tmp_path: Path) -> None:
    async def run() -> World:
        world = World(tmp_path)
        await world.trainer.start()
        due: list[bool] = []
        for name in "abcd":
            await world.train(name)
            due.append(bool(await world.trainer.call(TrainingPart.is_due)))
        assert due == [False, False, True, True]
        await world.trainer.call(TrainingPart.save, {})
        assert not await world.trainer.call(TrainingPart.is_due)
        assert "said at save" in world.observer.lines
        assert [row["step"] for row in world.metrics.rows if row["kind"] == "checkpoint"] == [4]
        await world.trainer.stop()
        return world

    asyncio.run(run())


def test_steps_that_nobody_can_repeat_are_not_passed_over(tmp_path: Path) -> None:
    """Somebody took the checkpoint away that held batches which were let go."""

    async def run() -> None:
        world = World(tmp_path)
        await world.trainer.start()
        await world.train("a")
        await world.trainer.call(TrainingPart.save, {})
        await world.train("b")
        (tmp_path / "latest").rename(tmp_path / "elsewhere")
        world.trainer.kill()
        await until(lambda: "lost" in world.journal.counts)
        with pytest.raises(PartLostError, match=r"not all batches up to") as raised:
            await world.train("c")
        assert not isinstance(raised.value, UserError)
        await world.trainer.stop()

    asyncio.run(run())
