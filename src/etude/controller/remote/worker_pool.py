"""How many rollout workers there are: they join and leave while the run goes on.

    fewer than wanted ──> room is asked for ──there is──> a worker joins
    more than wanted ──> the newest drains ──its sessions have ended──> its room is given back

Wanted is what somebody asked for by hand; else what the configuration says: `workers`, and above that as
many as there is room for, up to `most_workers`. One at a time waits for room, which comes when somebody else
gives it up or a machine joins. A worker whose machine goes down is brought back when there is room again;
until then the others play its sessions.
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
"""Of the rows of metrics: one per event of a worker that joins or leaves."""


@dataclass(slots=True, eq=False)
class _Member:
    """A worker that joins, is there, or leaves."""

    name: str
    is_joined: bool = False
    """Whether it has been ready once."""
    is_leaving: bool = False
    change: asyncio.Task[None] | None = None
    """Has it join or leave."""


class WorkerPool:
    """Keeps the number of workers. Use as an async context manager around the run; for one event loop."""

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
        """`names`: of the workers that are there. `spawning`: how a worker that takes those resources is
        started, once `executor` has room. `needs`: what the worker of a name takes."""
        self._episodes, self._spawning, self._needs = episodes, spawning, needs
        self._executor, self._settings = executor, settings
        self._files, self._journal = files, journal
        self._members = {name: _Member(name, is_joined=True) for name in names}
        """In the order of their joining."""
        self._failures = StartFailures(settings)
        self._resumes_s = 0.0
        """When joining is tried again, after a failure."""
        self._told: dict[str, Any] = {}
        self._is_told = True
        """Whether that could be written."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._files.begin()
        self._look()  # tells what there is
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        changes = [one.change for one in self._members.values() if one.change is not None]
        await end_tasks(self._task, *changes)
        self._files.end()
        if not self._task.cancelled():
            self._task.result()  # which failed

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.heartbeat_s):
                    await self._wake.wait()
            self._wake.clear()
            self._look()

    def _look(self) -> None:
        """Begins whatever brings the number nearer to what is wanted."""
        wanted = self._files.wanted()
        if wanted != self._told.get("wanted"):
            # The cause may have been removed before another number was asked for.
            self._failures, self._resumes_s = StartFailures(self._settings), 0.0
        target = wanted if wanted != "auto" else max(self._settings.workers, self._settings.most_workers)
        staying = [one for one in self._members.values() if not one.is_leaving]
        if len(staying) > target:
            # Those that are not at work go first, then the newest: sorting keeps the order of equals.
            staying.sort(key=self._is_at_work, reverse=True)
            for member in staying[target:]:
                self._let_go(member)
        elif len(staying) < target and self._may_join(staying):
            member = _Member(self._free_name())
            self._members[member.name] = member
            member.change = asyncio.create_task(self._join(member))
        self._tell(wanted)

    def _is_at_work(self, member: _Member) -> bool:
        return member.is_joined and self._episodes.is_up(member.name)

    def _may_join(self, staying: list[_Member]) -> bool:
        """One at a time waits for room, and not at once after one that failed."""
        all_joined = all(one.is_joined for one in staying)
        return all_joined and not self._failures.exhausted and time.monotonic() >= self._resumes_s

    def _free_name(self) -> str:
        """The first: what the run reserved for the workers that it began with is used again."""
        return next(name for n in itertools.count() if (name := f"{WORKER}{n}") not in self._members)

    def _let_go(self, member: _Member) -> None:
        """Has a worker leave, or wait for room no more."""
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
            self._forget(member)
            if not isinstance(error, Exception):
                raise
            self._note_failure(member, error)
            return
        member.is_joined = True
        self._failures = StartFailures(self._settings)
        self._journal.note(member.name, "joined", waited_s=time.monotonic() - began_s)
        self._wake.set()

    def _note_failure(self, member: _Member, error: Exception) -> None:
        self._failures.failed(0.0)
        self._resumes_s = time.monotonic() + self._failures.wait_s
        event = "none joins any more" if self._failures.exhausted else "did not join"
        self._journal.note(member.name, event, str(error) or repr(error))

    async def _leave(self, member: _Member) -> None:
        began_s, num_sessions = time.monotonic(), self._episodes.num_sessions(member.name)
        num_handed_on = 0
        try:
            num_handed_on = await self._episodes.leave(member.name, self._settings.drain_s)
        except Exception as error:  # whatever it is: it is gone, and another may join
            self._journal.note(member.name, "did not leave in good order", str(error) or repr(error))
        finally:
            self._forget(member)
        took_s = time.monotonic() - began_s
        self._journal.note(member.name, "left", took_s=took_s, sessions=num_sessions, handed_on=num_handed_on)
        self._wake.set()

    def _forget(self, member: _Member) -> None:
        self._executor.give_room(member.name)
        del self._members[member.name]

    def _tell(self, wanted: WantedWorkers) -> None:
        """Writes down what there is, where that has changed or could not be written before."""
        standing = {
            "wanted": wanted,
            "workers": {one.name: self._state_of(one) for one in self._members.values()},
        }
        if standing != self._told or not self._is_told:
            self._told = standing
            try:
                self._files.tell(standing)
                self._is_told = True
            except OSError:  # a full disk keeps no worker from coming or going
                self._is_told = False

    def _state_of(self, member: _Member) -> str:
        if not member.is_joined:
            return "joining"
        if member.is_leaving:
            return "draining"
        return "up" if self._episodes.is_up(member.name) else "away"
