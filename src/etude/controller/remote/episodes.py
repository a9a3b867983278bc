"""Rollout workers where sessions are asked for: a Player over processes that run them.

    collector ──play─> RemoteEpisodes ──order──> the worker with the fewest sessions
              <─trajectory, routes kept──┘ <──── packed episode

A worker that dies takes its sessions with it: they begin anew with another, under the same names. Routes come
with the trajectory, packed as clusters pack it; they are written down here, durably where the run keeps them,
before anybody reads the trajectory. So a run has one writer, no worker needs to see the run's directory, and
what a cancelled or a lost session sampled leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from etude.agent.recording import KeepRoutes
from etude.controller.remote.fleet import EngineFleet, check_build
from etude.controller.remote.patient import EngineTable
from etude.controller.remote.rollout_part import DoneEpisode, Progress, RolloutPart
from etude.controller.supervision import Spawn, SupervisedParts, Supervision, Supervisor
from etude.environment.fork_groups import ForkedEpisode
from etude.environment.runners import EnvironmentTimes, Order, Player, add_times, latest_times
from etude.errors import InfrastructureError, PartLostError
from etude.inference.exchange import Build
from etude.kit.tasks import Tasks
from etude.protocols import Handle, Sampler, TokenTally
from etude.records import Status, Trajectory
from etude.store.bundles import unpack_trajectory


@dataclass(slots=True, eq=False)
class _Worker:
    """One worker, process after process."""

    supervisor: Supervisor[RolloutPart]
    client: str = ""
    """The process's name with the engines; empty while there is none."""
    tallies: dict[int, TokenTally | None] = field(default_factory=dict[int, "TokenTally | None"])
    """Sessions it runs, by ticket, and who wants to know how far they are."""
    times: EnvironmentTimes = field(default_factory=EnvironmentTimes)
    """Of the process, as far as it has reported."""
    telling: asyncio.Task[None] | None = None
    """Tells the process of the engines."""
    is_leaving: bool = False
    """Whether it gets no more sessions."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is leaving and runs no session any more."""
    num_handed_on: int = 0
    """Sessions that it did not end before it left."""


class RemoteEpisodes(Player):
    """Implements TimedPlayer over supervised workers. For one event loop."""

    def __init__(
        self,
        spawns: Mapping[str, Spawn[RolloutPart]],
        build: Build,
        fleet: EngineFleet,
        keep_routes: KeepRoutes,
        supervision: Supervision,
    ) -> None:
        """`spawns`: how to start the process of each worker, by name. `build`: what they must all be.
        `fleet`: the engines that they sample with."""
        self._build, self._fleet = build, fleet
        self._supervision, self._settings = supervision, supervision.settings
        self._keep_routes = keep_routes
        self._tickets = itertools.count()
        self._past = EnvironmentTimes()
        """Of processes that are gone, and what was learned of sessions without one."""
        self._tidying = Tasks()
        self._supervised = SupervisedParts[RolloutPart](supervision)
        self._workers: dict[str, _Worker] = {}
        for name, spawn in spawns.items():
            self._add(name, spawn)

    async def start(self) -> None:
        """Starts all workers. Raises what any of them raises."""
        await self._supervised.start()

    async def shutdown(self) -> None:
        """Stops all workers."""
        for worker in self._workers.values():
            self._stop_telling(worker)
        await self._supervised.close()
        await asyncio.gather(*self._tidying)

    async def join(self, name: str, spawn: Spawn[RolloutPart]) -> None:
        """Adds a worker, of a new name or of one that has left; returns once it is ready. Raises what the
        worker raises, and PartLostError where its process does not come up however often it is started."""
        worker = self._add(name, spawn)
        try:
            await worker.supervisor.start()
        except BaseException:
            await self._end(worker)
            raise

    async def leave(self, name: str, within_s: float) -> int:
        """Takes a worker out. It gets no more sessions; those that have not ended after `within_s` begin anew
        with others, which is no failure of theirs. Returns how many those are. There must be another worker.
        """
        worker = self._workers[name]
        self._supervised.remove(name)
        worker.is_leaving = True
        try:
            if worker.tallies:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(within_s):
                        await worker.idle.wait()
            await self._hand_on(worker)
            await self._hear_last(worker)
        finally:
            await self._end(worker)
        return worker.num_handed_on

    def is_up(self, name: str) -> bool:
        """Whether that worker's process is at work."""
        return self._workers[name].supervisor.handle is not None

    def num_sessions(self, name: str) -> int:
        """How many sessions a worker runs."""
        return len(self._workers[name].tallies)

    @property
    def times(self) -> EnvironmentTimes:
        return add_times([self._past, *(worker.times for worker in self._workers.values())])

    # ---- sessions -------------------------------------------------------------------------------

    async def play(self, order: Order, sampler: Sampler) -> ForkedEpisode:
        """See Player.play. By whichever workers live long enough, with the fleet's engines.

        Raises PartLostError once there will be no worker any more.
        """
        tally = sampler if isinstance(sampler, TokenTally) else None
        while True:
            worker = await self._least_busy()
            try:
                done = await self._ask(worker, order, tally)
                if done is not None:
                    return await asyncio.to_thread(self._keep, done)
            except InfrastructureError as error:  # the worker is gone, or its routes could not be kept
                self._past.num_infrastructure_failures += 1
                order = replace(order, first_attempt=order.first_attempt + 1)
                if order.first_attempt >= self._settings.max_attempts:
                    cause = f"{type(error).__name__}: {error}"
                    failed = Trajectory(order.identity, (), (), Status.INFRASTRUCTURE, cause)
                    return ForkedEpisode(replace(failed, attempt=order.first_attempt - 1))

    async def _least_busy(self) -> _Worker:
        """The worker that is up and runs the fewest sessions, of several the first."""
        while True:
            staying = [worker for worker in self._workers.values() if not worker.is_leaving]
            up = [worker for worker in staying if worker.supervisor.handle is not None]
            if up:
                return min(up, key=lambda worker: len(worker.tallies))
            await self._supervised.any_ready()

    async def _ask(self, worker: _Worker, order: Order, tally: TokenTally | None) -> DoneEpisode | None:
        """What came of the order; None where the worker leaves before it is done."""
        handle, ticket = worker.supervisor.handle, next(self._tickets)
        assert handle is not None, "it was up just now"
        worker.tallies[ticket] = tally
        try:
            done = await handle.call(RolloutPart.run, ticket, order)
        except PartLostError as error:
            worker.supervisor.lose(handle, str(error))
            raise
        except asyncio.CancelledError:
            await self._cancel(handle, ticket, tally)
            raise
        finally:
            del worker.tallies[ticket]
            if worker.is_leaving and not worker.tallies:
                worker.idle.set()
        if done is None and worker.is_leaving:
            worker.num_handed_on += 1
            return None
        if done is None:  # somebody in its process ended the session: the process is ending
            raise PartLostError("ended the session", field=worker.supervisor.name)
        worker.times = latest_times(worker.times, done.times)
        if tally is not None:
            tally.tally(done.num_tokens)
        return done

    async def _cancel(self, handle: Handle[RolloutPart], ticket: int, tally: TokenTally | None) -> None:
        """Returns once the session has tidied up, or its worker is gone, even if asked to hurry."""

        async def cancel() -> None:
            with contextlib.suppress(PartLostError):  # then its session is gone as well
                num_tokens = await handle.call(RolloutPart.cancel, ticket)
                if tally is not None:
                    tally.tally(num_tokens)

        await asyncio.shield(self._tidying.start(cancel()))

    def _keep(self, done: DoneEpisode) -> ForkedEpisode:
        """Keeps the arrays for the run, and has the trajectories name them as they are kept."""
        first, *siblings = (unpack_trajectory(one).settle(self._keep_routes) for one in done.bundles)
        return ForkedEpisode(first, tuple(siblings), done.origin, done.refused)

    async def _hand_on(self, worker: _Worker) -> None:
        """Ends what a worker that leaves still runs; its sessions begin anew elsewhere."""
        handle = worker.supervisor.handle
        if handle is not None:
            await asyncio.gather(*(self._cancel(handle, *one) for one in list(worker.tallies.items())))
        if worker.tallies:
            await worker.idle.wait()

    async def _hear_last(self, worker: _Worker) -> None:
        """What a worker that leaves has counted since it was last heard."""
        handle = worker.supervisor.handle
        if handle is not None:
            with contextlib.suppress(PartLostError):  # then what it reported last counts
                worker.times = latest_times(worker.times, (await handle.call(RolloutPart.pulse)).times)

    # ---- processes ------------------------------------------------------------------------------

    def _add(self, name: str, spawn: Spawn[RolloutPart]) -> _Worker:
        async def prepare(handle: Handle[RolloutPart]) -> None:
            build, client = await handle.call(RolloutPart.begin)
            check_build(build, self._build, name)
            table = self._fleet.table()
            await handle.call(RolloutPart.follow, table)
            worker.client, worker.times = client, EnvironmentTimes()
            worker.telling = asyncio.create_task(self._tell_of_engines(worker, handle, table))

        def leave(cause: str) -> None:
            self._part_from(worker)

        def hear(progress: Progress) -> None:
            worker.times = latest_times(worker.times, progress.times)
            for ticket, num_tokens in progress.num_tokens.items():
                tally = worker.tallies.get(ticket)
                if tally is not None:
                    tally.tally(num_tokens)

        assert name not in self._workers, "names tell workers apart"
        supervisor = Supervisor(name, spawn, prepare, self._supervision, leave, hear)
        worker = self._workers[name] = _Worker(supervisor)
        self._supervised.add(supervisor)
        return worker

    async def _end(self, worker: _Worker) -> None:
        """Stops a worker's process, and knows the worker no more."""
        self._supervised.remove(worker.supervisor.name)
        try:
            await worker.supervisor.close()
        finally:
            self._part_from(worker)
            del self._workers[worker.supervisor.name]

    def _part_from(self, worker: _Worker) -> None:
        """Its process is gone, or about to be."""
        self._stop_telling(worker)
        self._past = add_times([self._past, worker.times])
        client, worker.client, worker.times = worker.client, "", EnvironmentTimes()
        if client:
            self._tidying.start(self._fleet.forget(client))

    async def _tell_of_engines(
        self, worker: _Worker, handle: Handle[RolloutPart], table: EngineTable
    ) -> None:
        """Sends a worker's process, which has `table`, every newer one, until it is gone."""
        try:
            while True:
                await self._fleet.changes.until(lambda: self._fleet.table() != table)  # noqa: B023
                table = self._fleet.table()
                await handle.call(RolloutPart.follow, table)
        except Exception as error:  # gone, or failed as it never should: the next one may do better
            worker.supervisor.lose(handle, f"could not be sent the engines: {error}")

    def _stop_telling(self, worker: _Worker) -> None:
        if worker.telling is not None:
            worker.telling.cancel()
            worker.telling = None
