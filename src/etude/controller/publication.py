"""How the trainer's weights come into service: while everybody waits for them, or while the next step trains.

    in turn      step k ── publish ── stage ── activate ── gate ── step k + 1
    overlapped   step k ── publish ─┬──────────────── step k + 1 ── publish ...
                                    └─ stage ── activate ── gate

Overlapped, the trainer waits for `publish` alone, which copies its weights: they are encoded, uploaded and
staged while it goes on, and come into service when all engines that are up have them. At most one
publication is under way: the next one begins when it has come to its end, so the versions in service lag one
step more. The admission of sessions learns what is in service, and so keeps to its bound.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from etude.controller.parity import ParityGate
from etude.controller.utilisation import Utilisation
from etude.errors import EtudeError, SamplerError, StoreError, WeightUpdateError
from etude.kit.retry import Backoff, retry_async
from etude.kit.tasks import end_tasks
from etude.observe import MetricSink, Observer
from etude.protocols import Handle, KvPolicy, Trainer, WeightSink
from etude.records import PolicyVersion

T = TypeVar("T")
InService = Callable[[int], None]
"""Called with the step of the weights that sample from now on."""

PARITY_KIND = "parity"
KIND = "publication"

_AGAIN = Backoff(base_s=0.5, factor=4.0, attempts=3)
"""Of attempts to publish."""
_MOST_UNMEASURED = 3
"""Publications in a row that the parity gate may miss because the trainer has gone on."""


class Publication:
    """Brings the trainer's weights into service, step after step. For one event loop.

    In turn, the trainer waits until its weights are in service and have passed the gate. Overlapped, they
    travel while it takes its next step: a publication that fails is tried again with the weights that the
    trainer has then, and the gate, which needs both sides at one version, measures where the trainer still
    waits when the version comes into service, before anything is saved, and at the latest after three
    publications that it missed.
    """

    def __init__(
        self,
        trainer: Handle[Trainer],
        sink: WeightSink,
        gate: ParityGate | None,
        in_service: InService,
        metrics: MetricSink,
        observer: Observer,
        utilisation: Utilisation,
        kv: KvPolicy,
        wall_s: Callable[[], float],
        clock: Callable[[], float],
        overlap: bool,
    ) -> None:
        """`gate`: looks at each publication. `observer`: gets publications that failed. `kv`: what becomes
        of running sessions' keys and values. `wall_s`: of the run, for its metrics. `clock`: in seconds, for
        figures only."""
        self._trainer, self._sink, self._gate = trainer, sink, gate
        self._in_service = in_service
        self._metrics, self._observer, self._utilisation = metrics, observer, utilisation
        self._kv: KvPolicy = kv
        self._wall_s, self._clock = wall_s, clock
        self._overlaps = overlap
        self._task: asyncio.Task[None] | None = None
        self._copied = asyncio.Event()
        """Whether the trainer may go on, or the publication has ended."""
        self._trainer_held = asyncio.Lock()
        """Held to change its weights, or to need them as they are."""
        self._has_moved_on = False
        """Whether its weights may be others than those that are under way or in service."""
        self._served: PolicyVersion | None = None
        self._unmeasured = 0
        """Publications in a row that the gate missed, up to the one in service."""
        self._travel_s = 0.0
        self._failed = self._missed = 0
        """Since the last `take`."""

    async def publish(self, step: int) -> None:
        """Brings the trainer's weights, which are those after `step` steps, into service: now, or,
        overlapped, soon after the publication before this one.

        Raises ParityError where weights do not pass the gate, and what fails for good.
        """
        self._utilisation.enter("publish")
        if not self._overlaps:
            await self._publish_in_turn()
            return
        await self._finish()
        if self._served is None or self._served.step != step:  # else a second attempt has covered it
            self._copied.clear()
            self._has_moved_on = False
            self._task = asyncio.create_task(self._bring())
            await self._copied.wait()
            if self._served is None or self._task.done():
                await self._finish()
        if self._unmeasured >= _MOST_UNMEASURED:
            await self.settle()

    async def settle(self) -> None:
        """Returns once the newest weights are in service and have passed the gate. Raises what `publish`
        does. Between two steps only."""
        await self._finish()
        if self._gate is not None and self._unmeasured and self._served is not None:
            await self._measure(self._gate, self._served)

    @contextlib.asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Within it the trainer's weights may change. Waits for the gate, if it has the trainer."""
        self._utilisation.enter("parity" if self._trainer_held.locked() else "train")
        async with self._trainer_held:
            self._has_moved_on = True
            yield

    async def while_collecting(self, collecting: Coroutine[Any, Any, T]) -> T:
        """What `collecting` returns, unless new weights can not come into service: raises what `publish`
        does."""
        task = self._task
        if task is None:
            return await collecting
        working = asyncio.ensure_future(collecting)
        try:
            await asyncio.wait({working, task}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return await working
        finally:
            await end_tasks(working)

    async def close(self) -> None:
        """Gives up what is under way. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks(task)  # what ended the run is raised already

    def take(self) -> Mapping[str, float]:
        """Metrics since the last call, of overlapped publications: seconds from copies of weights to their
        service, and what did not go well."""
        if not self._overlaps:
            return {}
        taken = {
            "publication_s": self._travel_s,
            "publications_failed": float(self._failed),
            "parity_missed": float(self._missed),
        }
        self._travel_s, self._failed, self._missed = 0.0, 0, 0
        return taken

    async def _publish_in_turn(self) -> None:
        version = await self._publish()
        if self._gate is not None:
            self._utilisation.enter("parity")
            await self._pass_gate(self._gate, version)
        self._in_service(version.step)

    async def _finish(self) -> None:
        """Waits for the publication that is under way; raises what it does."""
        if self._task is not None:
            await self._task
            self._task = None

    async def _bring(self) -> None:
        """Publishes what the trainer has, until it is in service."""
        began = self._clock()
        try:
            version = await self._bring_with_patience()
        finally:
            self._copied.set()
        self._travel_s += self._clock() - began
        self._served = version
        self._in_service(version.step)
        if self._gate is None:
            return
        if self._has_moved_on:
            self._unmeasured += 1
            self._missed += 1
        else:
            await self._measure(self._gate, version)

    async def _bring_with_patience(self) -> PolicyVersion:
        def on_failure(error: EtudeError, pause_s: float | None) -> None:
            self._failed += 1
            if pause_s is not None:
                self._observer.say(f"a publication failed, and is tried again: {error}")
                step = self._served.step if self._served is not None else 0
                self._metrics.write(KIND, step, {"failed": str(error), "wall_s": self._wall_s()})
                self._copied.set()

        failures = (StoreError, WeightUpdateError, SamplerError)
        return await retry_async(self._publish, failures, _AGAIN, on_failure=on_failure)

    async def _publish(self) -> PolicyVersion:
        manifest = await self._trainer.call(Trainer.publish)
        self._copied.set()
        await self._sink.stage(manifest)
        await self._sink.activate(manifest.version, self._kv)
        return manifest.version

    async def _measure(self, gate: ParityGate, version: PolicyVersion) -> None:
        """Has the gate look while nobody changes the trainer's weights."""
        before = self._utilisation.state
        async with self._trainer_held:
            self._utilisation.enter("parity")
            try:
                await self._pass_gate(gate, version)
            finally:
                self._utilisation.enter(before)
        self._unmeasured = 0

    async def _pass_gate(self, gate: ParityGate, version: PolicyVersion) -> None:
        figures = await gate.measure(version)
        if figures is not None:
            self._metrics.write(PARITY_KIND, version.step, {**figures.to_json(), "wall_s": self._wall_s()})
            gate.judge(figures, version)
