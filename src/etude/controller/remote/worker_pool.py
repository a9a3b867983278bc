"""Scales the rollout workers of a run: workers join and leave while it continues.

    fewer than wanted ──> resources requested ──granted──> a worker joins
    more than wanted ──> the newest drains ──its sessions have ended──> its resources are released

The wanted number is what the user asked for (`WorkerFiles`); else the configuration's: `workers`, and above
that as many as there are resources for, up to `most_workers`. One worker at a time waits for resources, which
become free when other programs release them or a machine joins. A worker whose machine goes down is restarted
when there are resources again; until then the others play its sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from etude.config import ClusterConfig
from etude.controller.arrangement import WORKER
from etude.controller.remote.episodes import RemoteEpisodes
from etude.controller.remote.rollout_part import RolloutPart
from etude.controller.supervision import FaultJournal, Spawn, StartFailures
from etude.kit.tasks import end_tasks
from etude.observe.workers import WantedWorkers, WorkerFiles
from etude.protocols import Executor, Resources

KIND = "workers"
"""Kind of the metric rows: one per event of a worker that joins or leaves."""


@dataclass(slots=True, eq=False)
class _Member:
    """A worker that is joining, up, or leaving."""

    name: str
    is_joined: bool = False
    """Whether it has been ready once."""
    is_leaving: bool = False
    change: asyncio.Task[None] | None = None
    """The task that makes it join or leave."""


class WorkerPool:
    """Maintains the number of workers. Use as an async context manager around the run; for one event loop."""

    def __init__(
        self,
        episodes: RemoteEpisodes,
        spawning: Callable[[Resources], Spawn[RolloutPart]],
        needs: Callable[[str], Resources],
        names: list[str],
        executor: Executor,
        settings: ClusterConfig,
        files: WorkerFiles,
        journal: FaultJournal,
    ) -> None:
        """`names`: of the workers that are up. `spawning`: makes the function that starts a worker with those
        resources, once `executor` has them. `needs`: resources of the worker of a name."""
        self._episodes, self._spawning, self._needs = episodes, spawning, needs
        self._executor, self._settings = executor, settings
        self._files, self._journal = files, journal
        self._members = {name: _Member(name, is_joined=True) for name in names}
        """By name, in the order of joining."""
        self._failures = StartFailures(settings)
        self._resumes_s = 0.0
        """Monotonic time before which no worker joins, after a failure."""
        self._written: dict[str, Any] = {}
        """The state on disk; without its workers where it could not be written."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._files.clear_request()
        self._adjust()  # writes the first state
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        changes = [member.change for member in self._members.values() if member.change is not None]
        await end_tasks(self._task, *changes)
        self._files.remove()
        if not self._task.cancelled():
            self._task.result()  # raises what it raised

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.heartbeat_s):
                    await self._wake.wait()
            self._wake.clear()
            self._adjust()

    def _adjust(self) -> None:
        """Starts the changes that bring the number of workers closer to the wanted one."""
        wanted = self._files.read_request()
        if wanted != self._written.get("wanted"):
            # The cause may have been removed before another number was asked for.
            self._failures, self._resumes_s = StartFailures(self._settings), 0.0
        target = wanted if wanted != "auto" else max(self._settings.workers, self._settings.most_workers)
        staying = [member for member in self._members.values() if not member.is_leaving]
        if len(staying) > target:
            # Those that are not up leave first, then the newest: sorting keeps the order of equals.
            staying.sort(key=self._is_at_work, reverse=True)
            for member in staying[target:]:
                self._remove(member)
        elif len(staying) < target and self._may_join(staying):
            member = _Member(self._free_name())
            self._members[member.name] = member
            member.change = asyncio.create_task(self._join(member))
        self._write_state(wanted)

    def _is_at_work(self, member: _Member) -> bool:
        return member.is_joined and self._episodes.is_up(member.name)

    def _may_join(self, staying: list[_Member]) -> bool:
        """Whether another worker may join: one at a time, and after a pause where one has failed."""
        all_joined = all(member.is_joined for member in staying)
        return all_joined and not self._failures.exhausted and time.monotonic() >= self._resumes_s

    def _free_name(self) -> str:
        """The first free name: so the resources reserved for the initial workers are used again."""
        return next(name for n in itertools.count() if (name := f"{WORKER}{n}") not in self._members)

    def _remove(self, member: _Member) -> None:
        """Makes a worker leave, or stop waiting for resources."""
        member.is_leaving = True
        if member.is_joined:
            member.change = asyncio.create_task(self._leave(member))
        elif member.change is not None:
            member.change.cancel()

    async def _join(self, member: _Member) -> None:
        part, began_s = self._needs(member.name), time.monotonic()
        try:
            await self._executor.make_room(part)
            await self._episodes.join(member.name, self._spawning(part))
        except BaseException as error:
            self._release(member)
            if not isinstance(error, Exception):
                raise
            self._record_failure(member, error)
            return
        member.is_joined = True
        self._failures = StartFailures(self._settings)
        self._journal.record(member.name, "joined", waited_s=time.monotonic() - began_s)
        self._wake.set()

    def _record_failure(self, member: _Member, error: Exception) -> None:
        self._failures.record(0.0)
        self._resumes_s = time.monotonic() + self._failures.wait_s
        event = "none joins any more" if self._failures.exhausted else "did not join"
        self._journal.record(member.name, event, str(error) or repr(error))

    async def _leave(self, member: _Member) -> None:
        began_s, num_sessions = time.monotonic(), self._episodes.num_sessions(member.name)
        num_cancelled = 0
        try:
            num_cancelled = await self._episodes.leave(member.name, self._settings.drain_s)
        except Exception as error:  # of any kind: the worker has ended, and another may join
            self._journal.record(member.name, "did not leave in good order", str(error) or repr(error))
        finally:
            self._release(member)
        took_s = time.monotonic() - began_s
        self._journal.record(
            member.name, "left", took_s=took_s, sessions=num_sessions, handed_on=num_cancelled
        )
        self._wake.set()

    def _release(self, member: _Member) -> None:
        self._executor.release_room(member.name)
        del self._members[member.name]

    def _write_state(self, wanted: WantedWorkers) -> None:
        """Writes the state of the workers to `WorkerFiles`, if it has changed or could not be written."""
        state = {
            "wanted": wanted,
            "workers": {member.name: self._state_of(member) for member in self._members.values()},
        }
        if state != self._written:
            self._written = state
            try:
                self._files.write_status(state)
            except OSError:  # a full disk must not keep workers from joining or leaving
                self._written = {"wanted": wanted}

    def _state_of(self, member: _Member) -> str:
        if not member.is_joined:
            return "joining"
        if member.is_leaving:
            return "draining"
        return "up" if self._episodes.is_up(member.name) else "away"
