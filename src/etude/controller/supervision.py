"""Keeping the parts of a run going: heartbeats, restarts with back-off, quarantine.

    starting ──prepared──> ready ──dies, or is silent──> waiting ──back-off──> starting
        └──────fails──────────────────────────────────────> │
                                                            └──too often in a row──> given up

A part is ready only when `prepare` has brought it to where it must be: an engine to the version in service,
a trainer to the step that the run is at. Until then nobody gets its handle. Waits are measured by this
process's monotonic clock alone; no time of another machine is ever looked at.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from etude.config import ClusterConfig
from etude.errors import EtudeError, PartLostError
from etude.kit.retry import Backoff
from etude.kit.tasks import Changes, end_tasks, run_together
from etude.observe import MetricSink, Observer
from etude.protocols import Handle

KIND = "fault"
"""Of the rows of metrics: one per event of a part."""


PartT = TypeVar("PartT", bound="Pulsing")
T = TypeVar("T")


class Pulsing(Protocol):
    """A part that says that it is well."""

    async def pulse(self) -> Any:
        """How far it has come. Raises where it is not well."""


Spawn = Callable[[frozenset[str]], Awaitable[Handle[PartT]]]
"""Starts the part's process; not on those machines, if it can be helped."""
Prepare = Callable[[Handle[PartT]], Awaitable[None]]
"""Brings a new process of the part to where the run is."""
Clock = Callable[[], float]


class FaultJournal:
    """What failed and what was done about it: rows of metrics, words, counts."""

    def __init__(
        self,
        metrics: MetricSink,
        observer: Observer,
        counts: dict[str, int] | None = None,
        kind: str = KIND,
    ) -> None:
        """`counts`: of earlier sittings; they are counted on. `kind`: of the rows."""
        self.counts = counts if counts is not None else {}
        """Events by name, of all parts."""
        self._metrics = metrics
        self._observer = observer
        self._kind = kind

    def note(self, part: str, event: str, cause: str = "", **values: float) -> None:
        """Counts one event of a part, tells it and writes its row."""
        self.counts[event] = self.counts.get(event, 0) + 1
        number = sum(self.counts.values())
        self._metrics.write(self._kind, number, {"name": part, "mode": event, **values})
        self._observer.say(f"{part}: {event}" + (f" ({cause})" if cause else ""))


class Supervision:
    """What all supervisors of a run have in common: how patient they are, where they note faults, when a part
    has come up or is given up, and which machines have failed so often of late that nothing should be started
    on them."""

    def __init__(self, settings: ClusterConfig, journal: FaultJournal, clock: Clock = time.monotonic) -> None:
        self.settings = settings
        self.journal = journal
        self.clock = clock
        self.changes = Changes()
        """Of any part."""
        self._failures: dict[str, deque[float]] = {}
        self._until: dict[str, float] = {}

    def failed(self, node: str) -> None:
        """A part on that machine failed. The machine without a name, this process's, is never avoided."""
        if not node:
            return
        now = self.clock()
        failures = self._failures.setdefault(node, deque(maxlen=self.settings.quarantine_after))
        failures.append(now)
        recent = sum(now - at <= self.settings.quarantine_s for at in failures)
        if recent == self.settings.quarantine_after and node not in self.avoided():
            self._until[node] = now + self.settings.quarantine_s
            self.journal.note(f"machine {node[:8]}", "quarantined", f"{recent} failures")

    def avoided(self) -> frozenset[str]:
        """Machines in quarantine now."""
        now = self.clock()
        return frozenset(node for node, until in self._until.items() if now < until)

    async def wait_until(self, holds: Callable[[], bool], within_s: float | None, name: str) -> None:
        """Waits for the change after which `holds`. Raises PartLostError where none comes in time. `name`: of
        what is waited for."""
        try:
            async with asyncio.timeout(within_s):
                await self.changes.until(holds)
        except TimeoutError:
            raise PartLostError(
                f"did not come back within {within_s:.0f} s",
                field=name,
                fix="look at what ended it, and go on with --resume; cluster.patience_s allows longer",
            ) from None


@dataclass(slots=True)
class StartFailures:
    """How long to wait before the next start: doubles with every failure in a row."""

    settings: ClusterConfig
    count: int = 0
    """In a row."""

    def failed(self, lived_s: float) -> None:
        """Counts a failure of a part that lived so long."""
        self.count = 1 if lived_s >= self.settings.healthy_s else self.count + 1

    @property
    def exhausted(self) -> bool:
        """Whether it has failed too often in a row to be started again."""
        return self.count >= self.settings.give_up_after

    @property
    def wait_s(self) -> float:
        """Before the next start."""
        return Backoff(self.settings.backoff_s, self.settings.most_backoff_s).pause_s(self.count)


class Supervisor(Generic[PartT]):
    """Keeps one part going, process after process. For one event loop."""

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
        """`on_loss`: called with the cause when the part is no longer ready. `on_pulse`: called with
        what its heartbeats answer. `journal`: where its faults are noted, if not with the others'."""
        self.name = name
        self.handle: Handle[PartT] | None = None
        """The part while it is ready, else None."""
        self.failure: PartLostError | None = None
        """Why it is started no more."""
        self._spawn, self._prepare = spawn, prepare
        self._settings, self._supervision = supervision.settings, supervision
        self._journal = journal or supervision.journal
        self._on_loss, self._on_pulse = on_loss, on_pulse
        self._clock = supervision.clock
        self._failures = StartFailures(supervision.settings)
        self._task: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[str] | None = None
        """Of the process at hand: set, with the cause, when it is given up."""

    async def start(self) -> None:
        """Starts the part for the first time. What is wrong then is raised, and not tried again, but for a
        process that dies on the way."""
        try:
            handle = await self._begin()
        except PartLostError as error:
            self._note_failed_start(error)
            again = await self._begin_again(str(error))
            if again is None:
                assert self.failure is not None
                raise self.failure from error
            handle = again
        self._task = asyncio.create_task(self._watch_over(handle))

    async def ready(self, within_s: float | None = None) -> Handle[PartT]:
        """The part, once it is ready. Raises PartLostError if it is started no more, or not in time."""
        await self._supervision.wait_until(
            lambda: self.handle is not None or self.failure is not None, within_s, self.name
        )
        if self.handle is None:
            assert self.failure is not None
            raise self.failure
        return self.handle

    async def persist(self, what: str, ask: Callable[[Handle[PartT]], Awaitable[T]]) -> T:
        """What the part answers to `ask`, though processes are lost at it. `what`: names that for people.

        Raises PartLostError where the part does not come back, and where `give_up_after` processes in a row
        were lost: it would not get on.
        """
        num_lost = 0
        while True:
            handle = await self.ready(self._settings.patience_s)
            try:
                return await ask(handle)
            except PartLostError as error:
                self.lose(handle, str(error))
                num_lost += 1
                if num_lost >= self._settings.give_up_after:
                    raise PartLostError(
                        f"its process was lost at `{what}` {num_lost} times in a row",
                        field=self.name,
                        received=str(error),
                        fix="remove the cause, then continue with --resume",
                    ) from error

    def lose(self, handle: Handle[PartT], cause: str) -> None:
        """Gives a process of the part up: it is killed and another one started. Does nothing if that is what
        is happening already."""
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

    async def _begin(self) -> Handle[PartT]:
        """A process that is prepared, and from now on ready."""
        handle = await self._spawn(self._supervision.avoided())
        try:
            await self._prepare(handle)
        except BaseException as error:
            handle.kill()
            if isinstance(error, EtudeError):
                self._supervision.failed(handle.node)
            raise
        self.handle = handle
        self._lost = asyncio.get_running_loop().create_future()
        self._supervision.changes.tell()
        return handle

    async def _watch_over(self, handle: Handle[PartT]) -> None:
        try:
            await self._keep_going(handle)
        except Exception as error:  # such as a full disk that takes no row: nobody may wait for ever
            last, self.handle = self.handle, None
            if last is not None:
                last.kill()
            self._give_up("cannot be watched over", repr(error))

    async def _keep_going(self, handle: Handle[PartT]) -> None:
        while True:
            began = self._clock()
            cause = await self._until_lost(handle)
            lost_at = self._clock()
            self.handle = None
            handle.kill()
            if self._on_loss is not None:
                self._on_loss(cause)
            self._journal.note(self.name, "lost", cause, lived_s=lost_at - began)
            self._supervision.failed(handle.node)
            self._failures.failed(lost_at - began)
            again = await self._begin_again(cause)
            if again is None:
                return
            handle = again
            self._journal.note(self.name, "restarted", down_s=self._clock() - lost_at)

    async def _begin_again(self, cause: str) -> Handle[PartT] | None:
        """Another process, however many starts it takes; None once the part is given up."""
        while not self._failures.exhausted:
            await asyncio.sleep(self._failures.wait_s)
            try:
                return await self._begin()
            except EtudeError as error:
                cause = str(error)
                self._note_failed_start(error)
            except Exception as error:  # a fault of ours, which another process would meet as well
                cause = repr(error)
                break
        self._journal.note(self.name, "given up", cause)
        self._give_up(f"failed {self._failures.count} times in a row", cause)
        return None

    def _give_up(self, what: str, cause: str) -> None:
        """Raises in all that wait for the part, now or later."""
        self.failure = PartLostError(
            f"{what}, and is started no more",
            field=self.name,
            received=cause,
            fix="remove the cause, then continue with --resume",
        )
        self._supervision.changes.tell()

    def _note_failed_start(self, error: EtudeError) -> None:
        self._journal.note(self.name, "not started", str(error))
        self._failures.failed(0.0)

    async def _until_lost(self, handle: Handle[PartT]) -> str:
        """Sends heartbeats until one is not answered in time, or somebody gives the process up; the cause."""
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
            except Exception as error:  # whatever a part says that is not well
                return f"{type(error).__name__}: {error}"
            if self._on_pulse is not None:
                self._on_pulse(answer)


class SupervisedParts(Generic[PartT]):
    """Several parts of one kind, of which some may be away. For one event loop."""

    def __init__(self, supervision: Supervision) -> None:
        self._supervision = supervision
        self._supervisors: dict[str, Supervisor[PartT]] = {}

    def add(self, supervisor: Supervisor[PartT]) -> None:
        """One more, which is started elsewhere or by `start`."""
        self._supervisors[supervisor.name] = supervisor
        self._supervision.changes.tell()

    def remove(self, name: str) -> Supervisor[PartT] | None:
        """One less; it is closed elsewhere. None where there is none of that name."""
        return self._supervisors.pop(name, None)

    async def start(self) -> None:
        """Starts all of them. Raises what any of them raises."""
        await run_together(supervisor.start() for supervisor in self._supervisors.values())

    async def close(self) -> None:
        """Stops all of them."""
        await asyncio.gather(*(supervisor.close() for supervisor in self._supervisors.values()))

    def lose(self, handle: Handle[PartT], cause: str) -> None:
        """Another process takes the place of this one, if it has not already."""
        for supervisor in self._supervisors.values():
            supervisor.lose(handle, cause)

    async def any_ready(self) -> None:
        """Waits until one is up, be it one that is added meanwhile. Raises PartLostError once none will be,
        or none is in time."""

        def is_decided() -> bool:
            parts = self._supervisors.values()
            return any(one.handle for one in parts) or all(one.failure for one in parts)

        patience_s, names = self._supervision.settings.patience_s, ", ".join(self._supervisors)
        await self._supervision.wait_until(is_decided, patience_s, names)
        if not any(one.handle for one in self._supervisors.values()):
            missing = PartLostError("there is none of its kind", fix="let one join")
            raise next((one.failure for one in self._supervisors.values() if one.failure), missing)
