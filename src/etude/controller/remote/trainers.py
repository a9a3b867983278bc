"""The process of the trainer, and its client in the run's process.

A new process starts from the newest complete checkpoint. The client keeps the batches trained on since: the
new process trains on them again, with identical results step for step, and so restores the lost weights. A
batch is dropped once a checkpoint that contains it is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from etude.config import RunConfig
from etude.controller.compute import keep_freed_memory, place_model, set_threads, use_numerics
from etude.controller.engines import make_snapshots, served_adapter
from etude.controller.models import open_model
from etude.controller.ranks import Routes, routes_of
from etude.controller.remote.weights import DirectoryWeights
from etude.controller.supervision import Spawn, Supervision, Supervisor
from etude.controller.training_part import TrainingPart
from etude.errors import CheckpointError
from etude.observe import MemorySink, MetricRow, MetricSink, Observer, RecordingObserver, RunDirectory
from etude.protocols import Handle
from etude.records import Group, PolicyVersion
from etude.tokens.tokenizer import Tokenizer
from etude.training.checkpoints import find_resumable, read_state
from etude.training.checkpoints.keeper import KIND as CHECKPOINT_KIND
from etude.training.intake import RouteFetcher
from etude.weights import WeightPublisher, open_publisher

STAGE = "rl"
"""Stage of the checkpoints from which a trainer can be restored."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A method's return value, and the metric rows and messages since the last reply."""

    value: Any
    version: PolicyVersion
    rows: list[MetricRow]
    lines: list[str]
    outages: Sequence[tuple[float, str]] = ()
    """Outages of the weight store since the last reply: seconds, and the cause."""


class RemoteTrainingPart:
    """A TrainingPart that loads its model itself and buffers its metrics and messages for the caller."""

    def __init__(
        self, config: RunConfig, model: Path, tokenizer: Tokenizer, run: RunDirectory, weights: Path
    ) -> None:
        """`config`: resolved. `model`: directory of the trained model. `weights`: where they are published,
        if not to the store that `config.weights` names."""
        num_threads = set_threads(config.num_threads)
        keep_freed_memory()
        self._metrics, self._observer = MemorySink(), RecordingObserver()
        self._outages: list[tuple[float, str]] = []
        loaded = place_model(open_model(config, model), config)
        use_numerics(loaded, config)
        with contextlib.ExitStack() as stack:
            publisher: WeightPublisher
            if config.weights.url:
                publisher = stack.enter_context(open_publisher(config.weights, on_wait=self._record_outage))
            elif config.engine.backend == "vllm":
                publisher = make_snapshots(weights, tokenizer, loaded, served_adapter(config))
            else:
                publisher = DirectoryWeights(weights)
            self._part = stack.enter_context(
                TrainingPart(config, loaded, tokenizer, run, publisher, self._metrics, self._observer)
            )
            self._stack = stack.pop_all()
        torch.set_num_threads(max(1, num_threads // config.parallel.ranks))

    def call_part(self, method: str, *arguments: Any) -> Reply:
        """Calls a method of the TrainingPart by name."""
        value = getattr(self._part, method)(*arguments)
        rows, self._metrics.rows = self._metrics.rows, []
        lines, self._observer.lines = self._observer.lines, []
        outages, self._outages = self._outages, []
        return Reply(value, self._part.version, rows, lines, outages)

    def _record_outage(self, waited_s: float, cause: str) -> None:
        """Called in an upload's thread: the entry goes with the current reply or the next."""
        self._outages.append((waited_s, cause))

    async def pulse(self) -> None:
        """Returns if the process is alive."""

    def close(self) -> None:
        """Waits for pending writes: a checkpoint, a version on its way to the weight store."""
        self._stack.close()


@dataclass(frozen=True, slots=True)
class _Trained:
    """A batch, and the trainer's step after it."""

    step: int
    groups: Sequence[Group]
    routes: Routes


class SupervisedTrainer(Handle[TrainingPart]):
    """A handle to the trainer that survives the loss of its process. For one event loop.

    A call that a lost process did not answer is repeated with the next process, once that has the same
    weights.
    """

    def __init__(
        self,
        spawn: Spawn[RemoteTrainingPart],
        fetch_routes: RouteFetcher,
        latest: Path,
        supervision: Supervision,
        metrics: MetricSink,
        observer: Observer,
    ) -> None:
        """`latest`: the newest resumable checkpoint."""
        self._fetch_routes = fetch_routes
        self._latest = latest
        self._settings, self._journal = supervision.settings, supervision.journal
        self._metrics, self._observer = metrics, observer
        self._supervisor = Supervisor("trainer", spawn, self._prepare, supervision)
        self._calling = asyncio.Lock()
        self._version: PolicyVersion | None = None
        """As of the last reply."""
        self._is_published = False
        """Whether those weights have been published."""
        self._trained: deque[_Trained] = deque()
        """Batches since the newest checkpoint that is known to be on disk."""
        self._unsaved_steps = 0
        """Steps since the last checkpoint was begun."""

    async def start(self) -> None:
        """Starts the process. Raises what it raises."""
        await self._supervisor.start()

    async def send(self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """See Handle.send. Raises PartLostError only when the trainer is given up, or when this very call
        lost `give_up_after` processes in a row."""
        assert not named, "a trainer's arguments are positional"
        async with self._calling:
            if method == "step":
                groups: Sequence[Group] = arguments[0]
                arguments = (groups, routes_of(groups, self._fetch_routes))
            reply = await self._supervisor.call_with_restarts(
                method, lambda handle: handle.call(RemoteTrainingPart.call_part, method, *arguments)
            )
            self._forward(reply)
            self._version = reply.version
            self._is_published = method == "publish" or (self._is_published and method != "step")
            if method == "step":
                self._trained.append(_Trained(reply.version.step, *arguments))
                self._unsaved_steps += 1
            elif method == "save":
                self._unsaved_steps = 0
            elif method == "is_due":
                return reply.value or self._unsaved_steps >= self._settings.max_replay_steps
            return reply.value

    async def stop(self) -> None:
        await self._supervisor.close()

    def kill(self) -> None:
        """See Handle.kill: kills the process; another one replaces it."""
        if self._supervisor.handle is not None:
            self._supervisor.declare_lost(self._supervisor.handle, "was killed")

    def _forward(self, reply: Reply) -> None:
        for row in reply.rows:
            if row["kind"] == CHECKPOINT_KIND and "written_s" in row:
                while self._trained and self._trained[0].step <= row["step"]:
                    self._trained.popleft()
            values = {name: value for name, value in row.items() if name not in ("kind", "step")}
            self._metrics.write(row["kind"], row["step"], values)
        for line in reply.lines:
            self._observer.say(line)
        for waited_s, cause in reply.outages:
            self._journal.record("weight store", "away", cause, down_s=waited_s)

    async def _prepare(self, handle: Handle[RemoteTrainingPart]) -> None:
        """Brings a new process to the run's current step; the first one starts at the beginning."""
        if self._version is None:
            return
        newest = await asyncio.to_thread(find_resumable, self._latest, self._metrics, self._observer)
        restored = 0
        if newest is not None and (read_state(newest) or {}).get("stage") == STAGE:
            reply = await handle.call(RemoteTrainingPart.call_part, "restore", newest)
            restored = reply.version.step
        replayed = [batch for batch in self._trained if batch.step > restored]
        if [batch.step for batch in replayed] != list(range(restored + 1, self._version.step + 1)):
            raise CheckpointError(
                f"holds step {restored}, but not all batches up to step {self._version.step} are kept",
                field="checkpoint",
                received=str(newest),
                fix="continue with --resume, which samples them again",
            )
        for batch in replayed:
            await handle.call(RemoteTrainingPart.call_part, "step", batch.groups, batch.routes)
        if self._is_published:
            await handle.call(RemoteTrainingPart.call_part, "publish")
        self._observer.say(f"trainer: back at step {self._version.step}, {len(replayed)} trained again")
