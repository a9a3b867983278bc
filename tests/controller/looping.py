"""The RL loop over fake parts that record their calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.controller.local import LocalHandle
from etude.controller.reinforcement import ReinforcementLoop, Validation
from etude.observe.metrics import MemorySink
from etude.observe.observer import RecordingObserver
from etude.protocols import KvPolicy
from etude.records import Group, PolicyVersion, Scores, WeightManifest
from etude.rollout import GroupCollector
from etude.sandbox.interface import SandboxBackend
from etude.store.blobs import MemoryBlobs
from etude.store.trajectories import TrajectoryLog
from tests.environment.playing import FAILS, SOLVES, Turn, new_environment, script_of
from tests.fakes.scripted import ScriptedSampler
from tests.rollout.collecting import new_collector


class NotingTrainer:
    """Implements Trainer; its weights are the number of steps it took."""

    def __init__(self, events: list[str], log: TrajectoryLog, parity: Sequence[float] = ()) -> None:
        self.version = PolicyVersion("run", 0)
        self.trained: list[list[str]] = []
        self._events, self._log, self._parity = events, log, list(parity)

    def step(self, groups: Sequence[Group]) -> Mapping[str, float]:
        members = [member for group in groups for member in group.members]
        assert all(self._log.contains(member.id) for member in members), "trained before it was kept"
        self.trained.append([str(member.id) for member in members])
        self._events.append(f"train {len(groups)}")
        self.version = PolicyVersion("run", self.version.step + 1)
        metrics = {"train_s": 0.5, "train_tokens": 10.0}
        if self._parity:
            metrics |= {"parity_k3": self._parity[0] ** 2, "parity_tokens": 999.0}
            metrics |= {"parity_max": self._parity.pop(0)}
        return metrics

    def publish(self) -> WeightManifest:
        self._events.append(f"publish {self.version.step}")
        return WeightManifest(self.version, (), "memory:")

    def score(self, sequences: Sequence[NDArray[np.int32]]) -> list[Scores]:
        raise AssertionError("nobody asks for scores")

    def save(self, directory: Path) -> None:
        raise AssertionError("the loop saves nothing itself")

    def restore(self, directory: Path) -> None:
        raise AssertionError("the loop restores nothing itself")


class NotingSink:
    """Implements WeightSink."""

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self._staged: PolicyVersion | None = None
        self._current: PolicyVersion | None = None

    async def stage(self, manifest: WeightManifest) -> None:
        self._staged = manifest.version

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        assert version == self._staged
        assert kv == "recompute", "keys of other weights would break the parity of trainer and engine"
        self._current = version
        self._events.append(f"serve {version.step}")

    def current(self) -> PolicyVersion | None:
        return self._current


class StopAfter:
    """Stands in for a StopSignal: true once it was looked at so often."""

    def __init__(self, looks: int = 1_000) -> None:
        self._looks = looks
        self.elapsed_s = 1.5

    def __bool__(self) -> bool:
        self._looks -= 1
        return self._looks < 0


class World:
    """A loop, everything around it and what happened."""

    def __init__(
        self,
        path: Path,
        play: Callable[[str], Sequence[Turn]] | None = None,
        backend: SandboxBackend | None = None,
        stop_after: int = 1_000,
        parity: Sequence[float] = (),
        validation: Validation | None = None,
        **settings: Any,
    ) -> None:
        self.events: list[str] = []
        self.log = TrajectoryLog(path)
        self.trainer = NotingTrainer(self.events, self.log, parity)
        self.blobs, self.metrics, self.observer = MemoryBlobs(), MemorySink(), RecordingObserver()
        sampler = ScriptedSampler(script_of(play or every_other), route_shape=(2, 2))
        environment = new_environment(backend, self.blobs)
        settings = {"groups_per_step": 2, "group_size": 2, "max_refill_rounds": 0, **settings}
        self.collector: GroupCollector = new_collector(environment, sampler, **settings)
        self.loop = ReinforcementLoop(
            LocalHandle(self.trainer),
            NotingSink(self.events),
            self.collector,
            self.log,
            self.blobs,
            self.metrics,
            self.observer,
            StopAfter(stop_after),
            validation=validation,
        )

    def run(self, num_steps: int) -> int:
        """Runs the loop in an event loop of its own."""

        async def saved(step: int) -> None:
            self.events.append(f"saved {step}")

        async def go() -> int:
            self.observer.stage_begins("rl", num_steps)
            try:
                return await self.loop.run(num_steps, saved)
            finally:
                self.observer.stage_ends()

        return asyncio.run(go())


def every_other(session_id: str) -> Sequence[Turn]:
    """Members of odd index solve the task."""
    index = int(session_id.partition("~")[0].rpartition("/")[2])
    return SOLVES if index % 2 else FAILS
