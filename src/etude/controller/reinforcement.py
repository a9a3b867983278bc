"""The RL stage: rollouts and training as producer and consumer around a bounded buffer.

    produce:  admit ── collect groups ── log (fsync) ── put
                ^                                        |
                |                                        v
    consume:  trained <── gate <── activate <── publish <── step ── take

The producer waits for `trained` before it samples what would be too stale; the consumer waits for batches.
With staleness bound 0 they alternate. Neither knows where the parts run. Nothing is sampled for training, and
nothing saved, with weights that did not pass the parity gate.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from etude.controller.parity import ParityGate
from etude.evaluation.suite import check_infrastructure
from etude.observe import MetricSink, Observer, summarize_behaviour
from etude.protocols import Handle, Trainer, WeightSink
from etude.records import BlobRef, Group, PolicyVersion, Trajectory
from etude.rollout.buffer import RolloutBuffer
from etude.rollout.collect import Collected, CollectorState, GroupCollector
from etude.rollout.together import run_together
from etude.store.trajectories import TrajectoryLog

KIND = "rl"
PARITY_KIND = "parity"


class BlobDiscarder(Protocol):
    """Lets go of routes once they are trained on."""

    def discard(self, ref: BlobRef) -> None: ...


class Stop(Protocol):
    """Looked at between two steps."""

    def __bool__(self) -> bool: ...

    @property
    def elapsed_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """What the producer hands over."""

    step: int
    collected: Collected
    state_after: CollectorState
    """Collector state from which the next batch is sampled."""
    rollout_s: float


@dataclass(slots=True)
class LoopTimes:
    """Wall seconds of the stage, by what it did."""

    rollout_s: float = 0.0
    train_s: float = 0.0
    publish_s: float = 0.0
    parity_s: float = 0.0
    train_tokens: float = 0.0


class ReinforcementLoop:
    """Runs RL steps until their number is reached or somebody stops it."""

    def __init__(
        self,
        trainer: Handle[Trainer],
        sink: WeightSink,
        collector: GroupCollector,
        log: TrajectoryLog,
        blobs: BlobDiscarder,
        metrics: MetricSink,
        observer: Observer,
        stop: Stop,
        gate: ParityGate | None = None,
    ) -> None:
        """`gate`: looks at each publication; none is looked at without it."""
        self.times = LoopTimes()
        self.first_step = 0
        self.parity = {"k3": 0.0, "max_abs_dlogp": 0.0}
        """Worst over all steps: the trainer's log-probabilities against those that were sampled, at the first
        update, when both have the same weights. A resumed run puts in what earlier sittings found."""
        self.reward = 0.0
        """Mean reward of the last step's sessions."""
        self._trainer = trainer
        self._sink = sink
        self._collector = collector
        self._log = log
        self._blobs = blobs
        self._metrics = metrics
        self._observer = observer
        self._stop = stop
        self._gate = gate
        self._committed = copy.copy(collector.state)

    @property
    def collector_state(self) -> Mapping[str, Any]:
        """State of the collector as of the last step that was trained: what a checkpoint stores."""
        return asdict(self._committed)

    async def publish(self) -> None:
        """Brings the trainer's weights into service. Raises ParityError where they do not pass the gate."""
        began = time.perf_counter()
        manifest = await self._trainer.call("publish")
        await self._sink.stage(manifest)
        await self._sink.activate(manifest.version, "recompute")
        served = time.perf_counter()
        self.times.publish_s += served - began
        if self._gate is not None:
            await self._pass_gate(self._gate, manifest.version)
            self.times.parity_s += time.perf_counter() - served

    async def _pass_gate(self, gate: ParityGate, version: PolicyVersion) -> None:
        figures = await gate.measure(version)
        if figures is not None:
            values = {**figures.to_json(), "wall_s": self._stop.elapsed_s}
            self._metrics.write(PARITY_KIND, version.step, values)
            gate.judge(figures, version)

    async def run(self, num_steps: int, after_step: AfterStep) -> int:
        """Goes on from `first_step`; returns how many steps are taken in all. `after_step` saves."""
        buffer: RolloutBuffer[Batch | None] = RolloutBuffer(0, self.first_step)
        await self.publish()
        _, taken = await run_together([self._produce(buffer, num_steps), self._consume(buffer, after_step)])
        return taken

    async def _produce(self, buffer: RolloutBuffer[Batch | None], num_steps: int) -> int:
        """Fills the buffer; returns the step that it did not sample for."""
        while True:
            step = await buffer.admit()
            if step >= num_steps or self._stop:
                await buffer.put(None)
                return step
            began = time.perf_counter()
            collected = await self._collector.collect()
            check_infrastructure(collected.trajectories)
            self._log.append([*collected.trained, *collected.dropped])
            elapsed = time.perf_counter() - began
            await buffer.put(Batch(step, collected, copy.copy(self._collector.state), elapsed))

    async def _consume(self, buffer: RolloutBuffer[Batch | None], after_step: AfterStep) -> int:
        """Trains on what the buffer gives; returns how many steps are taken in all."""
        step = self.first_step
        while (batch := await buffer.take()) is not None:
            trained = await self._trainer.call("step", batch.collected.trained)
            if self._gate is not None:
                self._gate.hold(batch.collected.trajectories)
            await self.publish()
            self._committed = batch.state_after
            step = batch.step + 1
            self._account(batch, trained)
            self._report(step, batch, trained)
            _discard_routes(self._blobs, batch.collected.trajectories)
            await after_step(step)
            await buffer.trained()
        return step

    def _account(self, batch: Batch, trained: Mapping[str, float]) -> None:
        self.times.rollout_s += batch.rollout_s
        self.times.train_s += trained["train_s"]
        self.times.train_tokens += trained["train_tokens"]
        self.parity["k3"] = max(self.parity["k3"], trained.get("parity_k3", 0.0))
        self.parity["max_abs_dlogp"] = max(self.parity["max_abs_dlogp"], trained.get("parity_max", 0.0))

    def _report(self, step: int, batch: Batch, trained: Mapping[str, float]) -> None:
        graded = [t for t in batch.collected.trajectories if t.reward is not None]
        groups = batch.collected
        self.reward = _mean([t.reward.total for t in graded if t.reward is not None])
        values = {
            "reward": self.reward,
            "pass_rate": _mean([t.reward.task for t in graded if t.reward is not None]),
            "trained_groups": float(len(groups.trained)),
            "dropped_all_passed": float(_count_verdict(groups.dropped, 1.0)),
            "dropped_all_failed": float(_count_verdict(groups.dropped, 0.0)),
            "episodes": float(len(graded)),
            "infrastructure_failures": float(len(groups.trajectories) - len(graded)),
            "rollout_s": batch.rollout_s,
            "wall_s": self._stop.elapsed_s,
            **summarize_behaviour(graded),
            **trained,
        }
        self._metrics.write(KIND, step, values)
        self._observer.stage_advances(step, values)


class AfterStep(Protocol):
    """Called with the number of steps taken, after the new weights are in service."""

    async def __call__(self, step: int) -> None: ...


def _discard_routes(blobs: BlobDiscarder, trajectories: Sequence[Trajectory]) -> None:
    for trajectory in trajectories:
        for segment in trajectory.segments:
            if segment.routes is not None:
                blobs.discard(segment.routes)


def _count_verdict(groups: Sequence[Group], verdict: float) -> int:
    """Groups of which every graded member got `verdict`."""
    return sum(all(m.reward is None or m.reward.task == verdict for m in group.members) for group in groups)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
