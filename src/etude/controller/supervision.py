"""Supervision of a run's processes: heartbeats, restarts with back-off, quarantine of machines.

    starting ──prepared──> ready ──dies, or is silent──> waiting ──back-off──> starting
        └──────fails──────────────────────────────────────> │
                                                            └──too often in a row──> given up

A part is ready only when `prepare` has restored its state: an engine serves the version in service, a trainer
is at the run's step. Until then its handle is not handed out. Waits are measured by this process's monotonic
clock alone; clocks of other machines are never read.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from etude.config import ClusterConfig
from etude.errors import EtudeError, PartLostError
from etude.kit.retry import Backoff
from etude.kit.tasks import Changes, end_tasks, run_together
from etude.observe import MetricSink, Observer
from etude.protocols import Handle

KIND = "fault"
"""Kind of the metric rows: one per event of a part."""


PartT = TypeVar("PartT", bound="Pulsing")
T = TypeVar("T")


class Pulsing(Protocol):
    """A part that answers heartbeats."""

    async def pulse(self) -> Any:
        """Returns its progress. Raises where the part has failed."""


Spawn = Callable[[frozenset[str]], Awaitable[Handle[PartT]]]
"""Starts the part's process; avoids the given machines where possible."""
Prepare = Callable[[Handle[PartT]], Awaitable[None]]
"""Brings a new process of the part to the run's current state."""


@dataclass(frozen=True, slots=True)
class FaultJournal:
    """Records faults and restarts: as metric rows, messages and counts."""

    metrics: MetricSink
    observer: Observer
    counts: dict[str, int] = field(default_factory=dict[str, int])
    """Events by name, of all parts. Those of earlier processes are added to."""
    kind: str = KIND
    """Of the rows."""

    def record(self, part: str, event: str, cause: str = "", **values: float) -> None:
        """Counts one event of a part, reports it and writes its row."""
        self.counts[event] = self.counts.get(event, 0) + 1
        number = sum(self.counts.values())
        self.metrics.write(self.kind, number, {"name": part, "mode": event, **values})
        self.observer.say(f"{part}: {event}" + (f" ({cause})" if cause else ""))


class Supervision:
    """State that all supervisors of a run share: settings, fault journal, notification of parts that become
    ready or are given up, and the machines in quarantine: those that failed so often lately that no part
    should be started there."""

    def __init__(
        self, settings: ClusterConfig, journal: FaultJournal, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self.journal = journal
        self.clock = clock
        self.changes = Changes()
        """Notified when any part becomes ready or is given up."""
        self._failures: dict[str, deque[float]] = {}
        self._until: dict[str, float] = {}

    def record_failure(self, node: str) -> None:
        """Counts a failure of a part on that machine; the unnamed one, this process's, is exempt."""
        if not node:
            return
        now = self.clock()
        failures = self._failures.setdefault(node, deque(maxlen=self.settings.quarantine_after))
        failures.append(now)
        recent = sum(now - at <= self.settings.quarantine_s for at in failures)
        if recent == self.settings.quarantine_after and node not in self.quarantined():
            self._until[node] = now + self.settings.quarantine_s
            self.journal.record(f"machine {node[:8]}", "quarantined", f"{recent} failures")

    def quarantined(self) -> frozenset[str]:
        """Machines in quarantine now."""
        now = self.clock()
        return frozenset(node for node, until in self._until.items() if now < until)

    async def wait_until(self, holds: Callable[[], bool], within_s: float | None, name: str) -> None:
        """Waits until `holds` after some change. Raises PartLostError where it does not in time. `name`: of
        the parts that are waited for."""
        try:
            async with asyncio.timeout(within_s):
                await self.changes.until(holds)
        except TimeoutError:
            raise PartLostError(
                f"did not come back within {within_s:.0f} s",
                field=name,
                fix="find out what ended it, then continue with --resume; or raise cluster.patience_s",
            ) from None


@dataclass(slots=True)
class StartFailures:
    """Back-off between starts: the wait doubles with every failure in a row."""

    settings: ClusterConfig
    count: int = 0
    """Number of failures in a row."""

    def record(self, lived_s: float) -> None:
        """Counts a failure of a part that had lived for `lived_s`."""
        self.count = 1 if lived_s >= self.settings.healthy_s else self.count + 1

    @property
    def exhausted(self) -> bool:
        """Whether it has failed too often in a row to be started again."""
        return self.count >= self.settings.give_up_after

    @property
    def wait_s(self) -> float:
        """Wait before the next start."""
        return Backoff(self.settings.backoff_s, self.settings.most_backoff_s).pause_s(self.count)


class Supervisor(Generic[PartT]):
    """Runs one part and restarts its process when it is lost. For one event loop."""

    def __init__(
        self,
        name: str,
        spawn: Spawn[PartT],
        prepare: Prepare[PartT],
        supervision: Supervision,
        on_loss: Callable[[str], None] | None = None,
        on_pulse: Callable[[Any], None] | None = None,
        journal: FaultJournal | None = None,
    ) -> None:
        """`on_loss`: called with the cause when the part is no longer ready. `on_pulse`: called with the
        answers to its heartbeats. `journal`: of its faults, instead of the shared one."""
        self.name = name
        self.handle: Handle[PartT] | None = None
        """The part while it is ready, else None."""
        self.failure: PartLostError | None = None
        """Why it is no longer restarted."""
        self._spawn, self._prepare = spawn, prepare
        self._settings, self._supervision = supervision.settings, supervision
        self._journal = journal or supervision.journal
        self._on_loss, self._on_pulse = on_loss, on_pulse
        self._clock = supervision.clock
        self._failures = StartFailures(supervision.settings)
        self._task: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[str] | None = None
        """Of the current process: resolved with the cause when it is declared lost."""

    async def start(self) -> None:
        """Starts the part for the first time. Errors are raised rather than retried, except for a process
        that dies while it starts."""
        try:
            handle = await self._start_process()
        except PartLostError as error:
            self._record_failed_start(error)
            handle = await self._restart(str(error))
        self._task = asyncio.create_task(self._supervise(handle))

    async def ready(self, within_s: float | None = None) -> Handle[PartT]:
        """The part, once it is ready. Raises PartLostError if it was given up, or is not ready in time."""
        await self._supervision.wait_until(
            lambda: self.handle is not None or self.failure is not None, within_s, self.name
        )
        if self.handle is None:
            assert self.failure is not None
            raise self.failure
        return self.handle

    async def call_with_restarts(self, what: str, ask: Callable[[Handle[PartT]], Awaitable[T]]) -> T:
        """Calls the part through `ask`; repeats the call where its process is lost. `what`: name of the call,
        for messages.

        Raises PartLostError where the part does not come back, and where this call lost `give_up_after`
        processes in a row.
        """
        num_lost = 0
        while True:
            handle = await self.ready(self._settings.patience_s)
            try:
                return await ask(handle)
            except PartLostError as error:
                self.declare_lost(handle, str(error))
                num_lost += 1
                if num_lost >= self._settings.give_up_after:
                    raise PartLostError(
                        f"its process was lost at `{what}` {num_lost} times in a row",
                        field=self.name,
                        received=str(error),
                        fix="remove the cause, then continue with --resume",
                    ) from error

    def declare_lost(self, handle: Handle[PartT], cause: str) -> None:
        """Kills a process of the part and starts another one. Does nothing if it was replaced already."""
        if handle is self.handle:
            assert self._lost is not None, "made with the process"
            self.handle = None
            self._lost.set_result(cause)
            handle.kill()

    async def close(self) -> None:
        """Stops the part. Idempotent."""
        if self._task is not None:
            await end_tasks(self._task)
            self._task = None
        if self.handle is not None:
            handle, self.handle = self.handle, None
            await handle.stop()

    async def _start_process(self) -> Handle[PartT]:
        """Starts and prepares a process; marks the part as ready."""
        handle = await self._spawn(self._supervision.quarantined())
        try:
            await self._prepare(handle)
        except BaseException as error:
            handle.kill()
            if isinstance(error, EtudeError):
                self._supervision.record_failure(handle.node)
            raise
        self.handle = handle
        self._lost = asyncio.get_running_loop().create_future()
        self._supervision.changes.notify()
        return handle

    async def _supervise(self, handle: Handle[PartT]) -> None:
        try:
            while True:
                began = self._clock()
                cause = await self._until_lost(handle)
                lost_at = self._clock()
                self.handle = None
                handle.kill()
                if self._on_loss is not None:
                    self._on_loss(cause)
                self._journal.record(self.name, "lost", cause, lived_s=lost_at - began)
                self._supervision.record_failure(handle.node)
                self._failures.record(lost_at - began)
                handle = await self._restart(cause)
                self._journal.record(self.name, "restarted", down_s=self._clock() - lost_at)
        except Exception as error:  # such as a full disk that takes no row: no caller may wait for ever
            if error is self.failure:
                return
            last, self.handle = self.handle, None
            if last is not None:
                last.kill()
            self._give_up("cannot be monitored", repr(error))

    async def _restart(self, cause: str) -> Handle[PartT]:
        """Starts another process, with as many attempts as it takes. Raises `failure` once the part is given
        up."""
        while not self._failures.exhausted:
            await asyncio.sleep(self._failures.wait_s)
            try:
                return await self._start_process()
            except EtudeError as error:
                cause = str(error)
                self._record_failed_start(error)
            except Exception as error:  # a defect of our own, which another process would meet as well
                cause = repr(error)
                break
        self._journal.record(self.name, "given up", cause)
        raise self._give_up(f"failed {self._failures.count} times in a row", cause)

    def _give_up(self, what: str, cause: str) -> PartLostError:
        """Makes all callers that wait for the part raise the returned error, now or later."""
        self.failure = PartLostError(
            f"{what}, and will not be started again",
            field=self.name,
            received=cause,
            fix="remove the cause, then continue with --resume",
        )
        self._supervision.changes.notify()
        return self.failure

    def _record_failed_start(self, error: EtudeError) -> None:
        self._journal.record(self.name, "not started", str(error))
        self._failures.record(0.0)

    async def _until_lost(self, handle: Handle[PartT]) -> str:
        """Sends heartbeats until one fails or the process is declared lost; returns the cause."""
        assert self._lost is not None
        beats = asyncio.ensure_future(self._beat(handle))
        try:
            await asyncio.wait([beats, self._lost], return_when=asyncio.FIRST_COMPLETED)
            return self._lost.result() if self._lost.done() else beats.result()
        finally:
            await end_tasks(beats)

    async def _beat(self, handle: Handle[PartT]) -> str:
        while True:
            await asyncio.sleep(self._settings.heartbeat_s)
            try:
                async with asyncio.timeout(self._settings.silent_s):
                    answer = await handle.call(Pulsing.pulse)
            except TimeoutError:
                return f"answered no heartbeat for {self._settings.silent_s:.0f} s"
            except Exception as error:  # whatever a failed part raises
                return f"{type(error).__name__}: {error}"
            if self._on_pulse is not None:
                self._on_pulse(answer)


class SupervisedParts(Generic[PartT]):
    """The supervisors of several parts of one kind, some of which may be down. For one event loop."""

    def __init__(self, supervision: Supervision) -> None:
        self._supervision = supervision
        self._supervisors: dict[str, Supervisor[PartT]] = {}

    def add(self, supervisor: Supervisor[PartT]) -> None:
        """Adds a supervisor; the caller or `start` starts it."""
        self._supervisors[supervisor.name] = supervisor
        self._supervision.changes.notify()

    def remove(self, name: str) -> Supervisor[PartT] | None:
        """Removes and returns a supervisor, for the caller to close; None if there is none of that name."""
        return self._supervisors.pop(name, None)

    async def start(self) -> None:
        """Starts all of them. Raises what any of them raises."""
        await run_together(supervisor.start() for supervisor in self._supervisors.values())

    async def close(self) -> None:
        """Stops all of them."""
        await asyncio.gather(*(supervisor.close() for supervisor in self._supervisors.values()))

    def declare_lost(self, handle: Handle[PartT], cause: str) -> None:
        """As `Supervisor.declare_lost`, for the part that this process belongs to."""
        for supervisor in self._supervisors.values():
            supervisor.declare_lost(handle, cause)

    async def wait_any_ready(self) -> None:
        """Waits until a part is ready, possibly one that is added meanwhile. Raises PartLostError once all
        are given up, or none is ready in time."""

        def is_decided() -> bool:
            parts = self._supervisors.values()
            return any(part.handle for part in parts) or all(part.failure for part in parts)

        patience_s, names = self._supervision.settings.patience_s, ", ".join(self._supervisors)
        await self._supervision.wait_until(is_decided, patience_s, names)
        parts = self._supervisors.values()
        if not any(part.handle for part in parts):
            missing = PartLostError("no part of this kind is left", fix="add one")
            raise next((part.failure for part in parts if part.failure), missing)
