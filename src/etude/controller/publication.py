"""Publication of the trainer's weights to the engines: between two steps, or overlapped with the next step.

    in turn      step k ── publish ── stage ── activate ── gate ── step k + 1
    overlapped   step k ── publish ─┬──────────────── step k + 1 ── publish ...
                                    └─ stage ── activate ── gate

Overlapped, the trainer waits for `publish` alone, which copies its weights: they are encoded, uploaded and
staged while it trains, and come into service when all engines that are up have them. At most one publication
is in progress: the next one starts when it has ended, so the versions in service lag one step more. The
admission of sessions is notified of the version in service, and so keeps its staleness bound.
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

PARITY_KIND = "parity"
KIND = "publication"

_AGAIN = Backoff(base_s=0.5, factor=4.0, attempts=3)
"""Between attempts to publish."""
_MOST_UNMEASURED = 3
"""Publications in a row that the parity gate may miss because the trainer's weights have changed."""


class Publication:
    """Brings the trainer's weights into service, step after step. For one event loop.

    In turn, the trainer waits until its weights are in service and have passed the gate. Overlapped, they are
    transferred while it takes its next step: a publication that fails is retried with the trainer's weights
    at that time. The gate needs both sides at the same version: it measures where the trainer still waits
    when the version comes into service, before anything is saved, and at the latest after three publications
    that it missed.
    """

    def __init__(
        self,
        trainer: Handle[Trainer],
        sink: WeightSink,
        gate: ParityGate | None,
        in_service: Callable[[int], None],
        metrics: MetricSink,
        observer: Observer,
        utilisation: Utilisation,
        kv: KvPolicy,
        wall_s: Callable[[], float],
        clock: Callable[[], float],
        overlap: bool,
    ) -> None:
        """`gate`: checks each publication. `in_service`: called with the step of the weights that are now in
        service. `observer`: reports failed publications. `kv`: what to do with running sessions' keys and
        values. `wall_s`: wall time of the run, for its metrics. `clock`: in seconds, for metrics only."""
        self._trainer, self._sink, self._gate = trainer, sink, gate
        self._in_service = in_service
        self._metrics, self._observer, self._utilisation = metrics, observer, utilisation
        self._kv: KvPolicy = kv
        self._wall_s, self._clock = wall_s, clock
        self._overlaps = overlap
        self._task: asyncio.Task[None] | None = None
        self._copied = asyncio.Event()
        """Set once the trainer's weights are copied, or the publication has ended."""
        self._trainer_lock = asyncio.Lock()
        """Held while the trainer's weights change, or must not change."""
        self._has_moved_on = False
        """Whether the trainer's weights may differ from those in transfer or in service."""
        self._served: PolicyVersion | None = None
        self._unmeasured = 0
        """Number of publications in a row that the gate missed, up to the one in service."""
        names = ("publication_s", "publications_failed", "parity_missed")
        self._counted: dict[str, float] = dict.fromkeys(names, 0.0)
        """Metrics since the last `pop_metrics`."""

    async def publish(self, step: int) -> None:
        """Brings the trainer's weights, those after `step` steps, into service: before it returns, or,
        overlapped, in the background once the previous publication has ended.

        Raises ParityError where weights do not pass the gate, and any failure that retries did not overcome.
        """
        self._utilisation.enter("publish")
        if not self._overlaps:
            version = await self._publish()
            if self._gate is not None:
                self._utilisation.enter("parity")
                await self._pass_gate(self._gate, version)
            self._in_service(version.step)
            return
        await self._finish()
        if self._served is None or self._served.step != step:  # else a second attempt has covered it
            self._copied.clear()
            self._has_moved_on = False
            self._task = asyncio.create_task(self._publish_overlapped())
            await self._copied.wait()
            if self._served is None or self._task.done():
                await self._finish()
        if self._unmeasured >= _MOST_UNMEASURED:
            await self.complete()

    async def complete(self) -> None:
        """Waits until the newest weights are served and gated. Raises as `publish`. Between steps only."""
        await self._finish()
        if self._gate is not None and self._unmeasured and self._served is not None:
            await self._measure(self._gate, self._served)

    @contextlib.asynccontextmanager
    async def changing_weights(self) -> AsyncIterator[None]:
        """Context within which the trainer's weights may change. Waits for a measurement of the gate."""
        self._utilisation.enter("parity" if self._trainer_lock.locked() else "train")
        async with self._trainer_lock:
            self._has_moved_on = True
            yield

    async def while_collecting(self, collecting: Coroutine[Any, Any, T]) -> T:
        """Awaits `collecting` and returns its result; raises as `publish` if the publication fails before."""
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
        """Cancels the publication in progress. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks(task)  # the error that ended the run is raised already

    def pop_metrics(self) -> Mapping[str, float]:
        """Metrics of overlapped publications since the last call: seconds from the copy of weights to their
        activation, failed publications, and those that the gate missed."""
        if not self._overlaps:
            return {}
        metrics, self._counted = self._counted, dict.fromkeys(self._counted, 0.0)
        return metrics

    async def _finish(self) -> None:
        """Waits for the publication in progress; raises what it raises."""
        if self._task is not None:
            await self._task
            self._task = None

    async def _publish_overlapped(self) -> None:
        """Publishes the trainer's weights in the background, and measures parity if they are unchanged."""
        began = self._clock()
        try:
            version = await self._publish_with_retries()
        finally:
            self._copied.set()
        self._counted["publication_s"] += self._clock() - began
        self._served = version
        self._in_service(version.step)
        if self._gate is None:
            return
        if self._has_moved_on:
            self._unmeasured += 1
            self._counted["parity_missed"] += 1
        else:
            await self._measure(self._gate, version)

    async def _publish_with_retries(self) -> PolicyVersion:
        def on_failure(error: EtudeError, pause_s: float | None) -> None:
            self._counted["publications_failed"] += 1
            if pause_s is not None:
                self._observer.say(f"a publication failed and will be tried again: {error}")
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
        """Lets the gate measure while the trainer's weights are locked."""
        before = self._utilisation.state
        async with self._trainer_lock:
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
