import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from etude.config import ClusterConfig
from etude.controller.local import LocalHandle
from etude.controller.remote.evaluation import BackgroundEvaluation, EvaluationPart, Judgement
from etude.controller.supervision import FaultJournal, Supervision
from etude.environment.episodes import EpisodeLimits
from etude.errors import WeightUpdateError
from etude.inference.exchange import Build
from etude.observe.metrics import MemorySink
from etude.observe.observer import RecordingObserver
from etude.protocols import Handle
from etude.records import PolicyVersion, Task, WeightManifest
from tests.controller.remote.building import FAST, until
from tests.controller.remote.working import Workers
from tests.environment.playing import TASK

BUILD = Build("machine", "little", {}, "model")


class Judge:
    """In place of an EvaluationPart: judges when it is told to."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.may_end = asyncio.Event()
        self.error: Exception | None = None
        self.dies: Callable[[], None] = lambda: None

    async def begin(self) -> Build:
        return BUILD

    async def pulse(self) -> None:
        """Is well."""

    async def judge(self, manifest: WeightManifest, tasks: Sequence[Task]) -> Judgement:
        self.asked.append(manifest.version.step)
        self.dies()
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        step = manifest.version.step
        return {"pass_rate": step / 100, "greedy": 0.5}, [str(manifest.version)]


class Bench:
    """An BackgroundEvaluation over judges of this process."""

    def __init__(self, every_steps: int, settings: ClusterConfig = FAST) -> None:
        self.handles: list[LocalHandle[Judge]] = []
        self.are_mortal = False
        """Whether judges that are made from now on die when they are asked."""
        self.metrics, self.observer = MemorySink(), RecordingObserver()
        self.journal = FaultJournal(self.metrics, self.observer)
        self.step = 0
        self.background = BackgroundEvaluation(
            self._spawn,
            BUILD,
            [TASK],
            every_steps,
            lambda: WeightManifest(PolicyVersion("run", self.step), (), ""),
            Supervision(settings, self.journal),
            self.metrics,
            self.observer,
        )

    async def _spawn(self, avoid: frozenset[str]) -> Handle[Any]:
        self.handles.append(LocalHandle(Judge(), name="evaluation"))
        if self.are_mortal:
            self.handles[-1].part.dies = self.handles[-1].kill
        return self.handles[-1]

    def look_at(self, *steps: int) -> None:
        """These come into service, one after the other."""
        for self.step in steps:
            self.background.judge_if_due(float(self.step))

    @property
    def judged(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.metrics.rows if row["kind"] == "evaluation"]


def test_every_so_many_steps_the_version_in_service_is_judged_and_nobody_waits() -> None:
    async def run() -> None:
        bench = Bench(every_steps=5)
        await bench.background.start()
        bench.background.resume_from(7)
        judge = bench.handles[0].part
        bench.look_at(8, 9, 10, 11)
        await until(lambda: judge.asked == [10])
        bench.look_at(14, 16)
        assert [line for line in bench.observer.lines if "is skipped" in line], (
            "step 16: the last is not over"
        )
        judge.may_end.set()
        await bench.background.wait()
        assert [(row["step"], row["wall_s"], row["split"]) for row in bench.judged] == [(10, 10.0, "during")]
        assert bench.judged[0]["versions"] == str(PolicyVersion("run", 10))
        bench.look_at(17, 18, 19, 20)
        await bench.background.wait()
        assert [row["pass_rate"] for row in bench.judged] == [0.1, 0.2]
        await bench.background.close()

    asyncio.run(run())


def test_an_evaluation_whose_process_dies_is_begun_anew() -> None:
    async def run() -> None:
        bench = Bench(every_steps=1)
        await bench.background.start()
        bench.look_at(1)
        await until(lambda: bench.handles[0].part.asked == [1])
        bench.handles[0].kill()
        await until(lambda: len(bench.handles) == 2)
        bench.handles[1].part.may_end.set()
        await bench.background.wait()
        assert [row["step"] for row in bench.judged] == [1]
        assert bench.journal.counts == {"lost": 1, "restarted": 1}
        await bench.background.close()

    asyncio.run(run())


def test_an_evaluation_that_no_process_outlives_is_given_up() -> None:
    async def run() -> None:
        # None is ever given up: each is counted as healthy before it dies.
        bench = Bench(every_steps=1, settings=FAST.model_copy(update={"healthy_s": 1e-9}))
        bench.are_mortal = True
        await bench.background.start()
        bench.look_at(1)
        await bench.background.wait()
        assert len(bench.handles) >= FAST.give_up_after
        assert bench.journal.counts["evaluation failed"] == 1
        bench.are_mortal = False
        bench.look_at(2)
        settled = asyncio.ensure_future(bench.background.wait())
        while not settled.done():
            bench.handles[-1].part.may_end.set()
            await asyncio.sleep(0.01)
        assert [row["step"] for row in bench.judged] == [2]
        await bench.background.close()

    asyncio.run(run())


@pytest.mark.parametrize("error", [WeightUpdateError("these weights are gone"), ArithmeticError("a defect")])
def test_an_evaluation_that_fails_is_counted_and_the_next_one_is_made(error: Exception) -> None:
    async def run() -> None:
        bench = Bench(every_steps=1)
        await bench.background.start()
        judge = bench.handles[0].part
        judge.may_end.set()
        judge.error = error
        bench.look_at(1)
        await bench.background.wait()
        judge.error = None
        bench.look_at(2)
        await bench.background.wait()
        assert [row["step"] for row in bench.judged] == [2]
        assert bench.journal.counts == {"evaluation failed": 1}
        await bench.background.close()

    asyncio.run(run())


@pytest.mark.slow
def test_a_version_is_judged_by_its_own_tokens_whatever_is_in_service_elsewhere(tmp_path: Path) -> None:
    async def run() -> None:
        workers = Workers(tmp_path)
        made = workers.made
        limits: EpisodeLimits = workers.limits
        part = EvaluationPart(workers.config, made.tokenizer, made.weights.root, limits, "evaluation")
        await part.begin()
        manifests = [made.publish(step) for step in (1, 2)]
        tasks = [TASK, TASK]
        judged = [await part.judge(manifest, tasks) for manifest in manifests]
        again = await part.judge(manifests[0], tasks)
        assert [versions for _, versions in judged] == [[str(one.version)] for one in manifests]
        assert again == judged[0]
        assert set(again[0]) == {"pass_rate", "greedy"}
        await part.close()

    asyncio.run(run())
