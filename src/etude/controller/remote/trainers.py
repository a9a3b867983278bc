"""The trainer in a process of its own, and what stands for it in the run's process.

A new process begins with the newest whole checkpoint. The batches that were trained on since are still here:
it trains on them again, which is the same step for step, and so has the weights that were lost. A batch is
let go once a checkpoint that contains it is on disk.
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
from etude.controller.training_part import TrainingPart, TrainingPaths
from etude.errors import CheckpointError
from etude.observe import MemorySink, MetricRow, MetricSink, Observer, RecordingObserver
from etude.protocols import Handle
from etude.records import Group, PolicyVersion
from etude.tokens.tokenizer import Tokenizer
from etude.training.checkpoints import find_resumable, read_state
from etude.training.checkpoints.keeper import KIND as CHECKPOINT_KIND
from etude.training.intake import RouteFetcher
from etude.weights import WeightPublisher, open_publisher

STAGE = "rl"
"""Of the checkpoints that a trainer can go on from."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a method returned, and what there is to write down and to say since the last one."""

    value: Any
    version: PolicyVersion
    rows: list[MetricRow]
    lines: list[str]
    outages: Sequence[tuple[float, str]] = ()
    """Of the weight store, since the last reply: seconds, and why."""


class RemoteTrainingPart:
    """A TrainingPart that loads its model itself and keeps what it would write down for its caller."""

    def __init__(
        self, config: RunConfig, model: Path, tokenizer: Tokenizer, paths: TrainingPaths, weights: Path
    ) -> None:
        """`config`: settled. `model`: the directory of what is trained. `weights`: where they are published,
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
                publisher = stack.enter_context(open_publisher(config.weights, on_wait=self._note_outage))
            elif config.engine.backend == "vllm":
                publisher = make_snapshots(weights, tokenizer, loaded, served_adapter(config))
            else:
                publisher = DirectoryWeights(weights)
            self._part = stack.enter_context(
                TrainingPart(config, loaded, tokenizer, paths, publisher, self._metrics, self._observer)
            )
            self._stack = stack.pop_all()
        torch.set_num_threads(max(1, num_threads // config.parallel.ranks))

    def do(self, method: str, *arguments: Any) -> Reply:
        """Calls a method of the part."""
        value = getattr(self._part, method)(*arguments)
        rows, self._metrics.rows = self._metrics.rows, []
        lines, self._observer.lines = self._observer.lines, []
        outages, self._outages = self._outages, []
        return Reply(value, self._part.version, rows, lines, outages)

    def _note_outage(self, waited_s: float, cause: str) -> None:
        """In a thread that uploads: what it appends goes with this reply or the next."""
        self._outages.append((waited_s, cause))

    async def pulse(self) -> None:
        """Returns if the process is alive."""

    def close(self) -> None:
        """Waits for what is being written: a checkpoint, a version on its way to the weight store."""
        self._stack.close()


@dataclass(frozen=True, slots=True)
class _Trained:
    """A batch, and the step that the trainer was at after it."""

    step: int
    groups: Sequence[Group]
    routes: Routes


class SupervisedTrainer(Handle[TrainingPart]):
    """A RemoteTrainingPart, process after process. For one event loop.

    A call that a lost process did not answer is made again to the next one, which is brought to the same
    weights first.
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
        """As of the last answer."""
        self._is_published = False
        """Whether those weights have been published."""
        self._trained: deque[_Trained] = deque()
        """Since the newest checkpoint that is known to be on disk."""
        self._unsaved_steps = 0
        """Since the last checkpoint was begun."""

    async def start(self) -> None:
        """Starts the process. Raises what it raises."""
        await self._supervisor.start()

    async def send(self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """See Handle.send. Raises PartLostError only when the trainer is started no more, and when
        `give_up_after` processes in a row were lost at this very call: the run would not get on."""
        assert not named, "a trainer's arguments go by position"
        async with self._calling:
            if method == "step":
                groups: Sequence[Group] = arguments[0]
                arguments = (groups, routes_of(groups, self._fetch_routes))
            reply = await self._supervisor.persist(
                method, lambda handle: handle.call(RemoteTrainingPart.do, method, *arguments)
            )
            self._write_down(reply)
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
        """See Handle.kill: the process is; another takes its place."""
        if self._supervisor.handle is not None:
            self._supervisor.lose(self._supervisor.handle, "was killed")

    def _write_down(self, reply: Reply) -> None:
        for row in reply.rows:
            if row["kind"] == CHECKPOINT_KIND and "written_s" in row:
                while self._trained and self._trained[0].step <= row["step"]:
                    self._trained.popleft()
            values = {name: value for name, value in row.items() if name not in ("kind", "step")}
            self._metrics.write(row["kind"], row["step"], values)
        for line in reply.lines:
            self._observer.say(line)
        for waited_s, cause in reply.outages:
            self._journal.note("weight store", "away", cause, down_s=waited_s)

    async def _prepare(self, handle: Handle[RemoteTrainingPart]) -> None:
        """Brings a new process to the step that the run is at; the first one stays at the beginning."""
        if self._version is None:
            return
        newest = await asyncio.to_thread(find_resumable, self._latest, self._metrics, self._observer)
        restored = 0
        if newest is not None and (read_state(newest) or {}).get("stage") == STAGE:
            reply = await handle.call(RemoteTrainingPart.do, "restore", newest)
            restored = reply.version.step
        again = [one for one in self._trained if one.step > restored]
        if [one.step for one in again] != list(range(restored + 1, self._version.step + 1)):
            raise CheckpointError(
                f"holds step {restored}, and the batches up to step {self._version.step} are not all kept",
                field="checkpoint",
                received=str(newest),
                fix="go on with --resume, which samples them again",
            )
        for one in again:
            await handle.call(RemoteTrainingPart.do, "step", one.groups, one.routes)
        if self._is_published:
            await handle.call(RemoteTrainingPart.do, "publish")
        self._observer.say(f"trainer: at step {self._version.step} again, {len(again)} trained once more")
