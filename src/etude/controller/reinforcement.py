"""The RL stage: collects groups of rollouts, trains on them, and publishes the new weights to the engines.

    collect ── log (fsync) ── train ── publish ── activate ── gate ── save
       ^                                             |
       └────────── new weights in service ───────────┘

With `rl.max_staleness` 0 the collector samples on demand, so sampling and training take turns. Above 0 it
samples continuously, and `collect` waits only for the groups that a step still lacks; then new weights may
also be transferred while the next step is taken (`publication.py`). The loop is the same in both modes, and
independent of where the parts run. No checkpoint is saved with weights that did not pass the parity gate.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from etude.config import RewardConfig, RunConfig
from etude.controller.parity import ParityGate
from etude.controller.publication import Publication
from etude.controller.stopping import StopSignal
from etude.controller.utilisation import Utilisation
from etude.environment.runners import EpisodeRunner
from etude.evaluation.suite import check_infrastructure
from etude.observe import MetricSink, Observer, shares_by_cause, summarize_behaviour, summarize_voided
from etude.protocols import Handle, KvPolicy, Sampler, Trainer, WeightSink
from etude.records import Group, Trajectory
from etude.rollout import Collected, Collector, ContinuousCollector, GroupCollector
from etude.rollout.curriculum import CollectorState, TaskSource
from etude.rollout.pricing import measure_price
from etude.store.blobs import Blobs, blobs_of
from etude.store.trajectories import TrajectoryLog

KIND = "rl"
UTILISATION_KIND = "utilisation"
PRICE_KIND = "price"
"""Kind of the row that each validation writes."""
TASKS_KIND = "tasks"
"""Kind of the row that is written when the tasks are exhausted."""


AfterStep = Callable[[int], Awaitable[None]]
"""Callback with the number of steps taken, after the new weights are in service."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one step."""

    collected: Collected
    state_after: CollectorState
    """Collector state with which a resumed run continues after this step."""
    rollout_s: float
    """Time in which sessions ran, since the last batch."""


@dataclass(slots=True)
class LoopTimes:
    """Wall seconds of the stage, by activity."""

    elapsed_s: float = 0.0
    """Total."""
    rollout_s: float = 0.0
    """Time in which sessions ran."""
    train_s: float = 0.0
    train_tokens: float = 0.0


class ReinforcementLoop:
    """Runs RL steps until their number is reached, the tasks are exhausted, or it is stopped."""

    def __init__(
        self,
        trainer: Handle[Trainer],
        sink: WeightSink,
        collector: Collector,
        log: TrajectoryLog,
        blobs: Blobs,
        metrics: MetricSink,
        observer: Observer,
        stop: StopSignal,
        gate: ParityGate | None = None,
        kv: KvPolicy = "recompute",
        part_seconds: Callable[[], Mapping[str, float]] = dict,
        clock: Callable[[], float] = time.perf_counter,
        overlap: bool = False,
        validation: Validation | None = None,
    ) -> None:
        """`gate`: checks publications; None: they are not checked. `kv`: what to do with running sessions'
        keys and values. `part_seconds`: seconds that other parts have spent so far, by activity. `clock`: in
        seconds, for metrics only. `overlap`: whether new weights come into service while the next step is
        taken. `validation`: determines the weight of the price of solved sessions."""
        self.times = LoopTimes()
        self.utilisation = Utilisation(clock, part_seconds)
        self.first_step = 0
        self.parity = {"k3": 0.0, "max_abs_dlogp": 0.0}
        """Worst over all steps: the trainer's log-probabilities against the sampled ones, at the first
        update, when both have the same weights. A resumed run restores the values of earlier processes."""
        self.sessions: dict[str, float] = {"played": 0.0}
        """Number of sessions played, and of those voided by each cause; of all processes, as `parity`."""
        self.reward = 0.0
        """Mean reward of the last step's sessions."""
        self.exhausted = False
        """Whether it has ended because no tasks are left."""
        self._trainer, self._collector, self._log, self._blobs = trainer, collector, log, blobs
        self._metrics, self._observer, self._stop = metrics, observer, stop
        self._gate, self._clock, self._validation = gate, clock, validation
        self._publication = Publication(
            trainer,
            sink,
            gate,
            collector.on_weights_served,
            metrics,
            observer,
            self.utilisation,
            kv,
            lambda: stop.elapsed_s,
            clock,
            overlap,
        )
        self._committed = copy.deepcopy(collector.state)

    @property
    def collector_state(self) -> Mapping[str, Any]:
        """State of the collector as of the last step that was trained, for checkpoints."""
        return asdict(self._committed)

    async def complete_publication(self) -> None:
        """Waits until the newest weights are served and gated: before a save. Raises as `publish`."""
        await self._publication.complete()

    async def run(self, num_steps: int, after_step: AfterStep) -> int:
        """Runs from `first_step` to `num_steps`, a stop, or the end of the tasks; returns the number of steps
        taken in all. `after_step` saves."""
        began = self._clock()
        step = self.first_step
        try:
            await self._publication.publish(step)
            if step == 0 < num_steps:  # a baseline for the second validation's pass rate
                await self._validate(step)
            async with self._collector.running(self._log, step, num_steps):
                while step < num_steps and not self._stop:
                    batch = await self._collect()
                    if batch.collected.exhausted and not batch.collected.trained:
                        self._end_tasks(step, batch)
                        break
                    step += 1
                    await self._train(step, batch)
                    if step < num_steps:
                        await self._validate(step)
                    self.utilisation.enter("save")
                    await after_step(step)
                    self._metrics.write(UTILISATION_KIND, step, self.utilisation.pop_seconds())
            await self.complete_publication()
        finally:
            await self._publication.close()
        self.times.elapsed_s += self._clock() - began
        return step

    async def _collect(self) -> Batch:
        """Waits for the next step's groups, and appends them to the log."""
        began = self._clock()
        self.utilisation.enter("wait")
        collected = await self._publication.while_collecting(self._collector.collect())
        state = copy.deepcopy(self._collector.state)
        check_infrastructure(collected.trajectories)
        self._log.append([*collected.trained, *collected.dropped, *collected.stale])
        waited_s = self._clock() - began
        return Batch(collected, state, collected.figures.get("rollout_s", waited_s))

    def _end_tasks(self, step: int, batch: Batch) -> None:
        """Records that no tasks are left; groups dropped at the very end are in the log already."""
        self.exhausted, self._committed = True, batch.state_after
        values = {
            "numbers": float(batch.state_after.next_task),
            "passed_over": float(batch.state_after.num_passed_over),
            "dropped_at_end": float(len(batch.collected.dropped) + len(batch.collected.stale)),
            "wall_s": self._stop.elapsed_s,
        }
        self._metrics.write(TASKS_KIND, step, values)
        self._observer.say(f"no task is left after {step} steps")

    async def _train(self, step: int, batch: Batch) -> None:
        """Takes the step of this number, and publishes its weights."""
        async with self._publication.changing_weights():
            self.utilisation.enter("train")
            trained = await self._trainer.call(Trainer.step, batch.collected.trained)
        if self._gate is not None:
            self._gate.set_sequences(batch.collected.trajectories)
        await self._publication.publish(step)
        self._committed = batch.state_after
        self.times.rollout_s += batch.rollout_s
        self.times.train_s += trained["train_s"]
        self.times.train_tokens += trained["train_tokens"]
        for name, metric in (("k3", "parity_k3"), ("max_abs_dlogp", "parity_max")):
            value = trained.get(metric, 0.0)
            if math.isfinite(value):  # the report's JSON has no other numbers; the step's own row has them
                self.parity[name] = max(self.parity[name], value)
        self._report(step, batch, trained)
        if self._gate is not None:
            self._gate.judge_sampled(trained, step)
        self._discard_blobs(batch.collected.trajectories)

    async def _validate(self, step: int) -> None:
        """Plays validation tasks if they are due, and sets the weight of the price by their pass rate."""
        validation = self._validation
        if validation is None or step % validation.reward.price.validate_every:
            return
        self.utilisation.enter("wait")
        sessions = await validation.play()
        check_infrastructure(sessions)
        self._discard_blobs(sessions)
        pass_rate, price = measure_price(sessions, validation.reward)
        state = self._committed.price.after(pass_rate, price, validation.reward.price.max_fall)
        self._committed.price = self._collector.state.price = state
        values = {"validation_pass_rate": pass_rate, "validation_price": price, "price_weight": state.weight}
        self._metrics.write(PRICE_KIND, step, {**values, "wall_s": self._stop.elapsed_s})

    def _discard_blobs(self, trajectories: Sequence[Trajectory]) -> None:
        for ref in (ref for trajectory in trajectories for ref in blobs_of(trajectory)):
            self._blobs.discard(ref)

    def _report(self, step: int, batch: Batch, trained: Mapping[str, float]) -> None:
        groups = batch.collected
        # Siblings start from chosen states: the policy's metrics are those of whole sessions.
        sessions = [t for t in groups.trajectories if "forked_from" not in t.facts]
        graded = [t for t in sessions if t.reward is not None]
        self.sessions["played"] += len(sessions)
        for cause, share in shares_by_cause(sessions).items():
            self.sessions[cause] = self.sessions.get(cause, 0.0) + share * len(sessions)
        self.reward = _mean([t.reward.total for t in graded if t.reward is not None])
        values = {
            "reward": self.reward,
            "pass_rate": _mean([float(t.reward.task == 1.0) for t in graded if t.reward is not None]),
            "trained_groups": float(len(groups.trained)),
            "dropped_all_passed": float(_count_verdict(groups.dropped, passed=True)),
            "dropped_all_failed": float(_count_verdict(groups.dropped, passed=False)),
            "episodes": float(len(graded)),
            "infrastructure_failures": float(len(sessions) - len(graded)),
            "rollout_s": batch.rollout_s,
            "wall_s": self._stop.elapsed_s,
            **summarize_behaviour(graded),
            **summarize_voided(sessions),
            **groups.figures,
            **self._publication.pop_metrics(),
            **trained,
        }
        self._metrics.write(KIND, step, values)
        self._observer.stage_advances(step, values)


@dataclass(frozen=True, slots=True)
class Validation:
    """Validation sessions, which determine the weight of the price of solved sessions. Only where rollouts
    and training take turns: nothing else samples meanwhile."""

    play: Callable[[], Awaitable[list[Trajectory]]]
    """One greedy session for each task, with the weights in service."""
    reward: RewardConfig


def make_collector(
    environment: EpisodeRunner,
    sampler: Sampler,
    tasks: TaskSource,
    config: RunConfig,
    clock: Callable[[], float] = time.perf_counter,
) -> Collector:
    """The collector of a configuration. `clock`: in seconds, for metrics only."""
    rl, name, seed = config.rl, config.name, config.seed
    if not rl.max_staleness:
        return GroupCollector(environment, sampler, tasks, rl, name, seed)
    return ContinuousCollector(environment, sampler, tasks, rl, name, seed, config.engine.num_slots, clock)


def overlaps_publication(config: RunConfig) -> bool:
    """Whether new weights come into service while the next step is taken. Not where trainer and engine take
    turns on the same devices: nothing can run during a step."""
    return config.is_apart and config.rl.max_staleness > 0 and config.rl.overlap_publication


def _count_verdict(groups: Sequence[Group], *, passed: bool) -> int:
    """Number of groups in which every graded member passed, or none did; partial credit is no pass."""
    return sum(
        all(m.reward is None or (m.reward.task == 1.0) == passed for m in group.members) for group in groups
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
