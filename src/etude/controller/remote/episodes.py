"""Rollout workers where sessions are asked for: an EpisodeRunner over processes that run them.

    collector ──run──> RemoteEpisodes ──order──> the worker with the fewest sessions
              <─trajectory, routes kept──┘ <──── packed episode

A worker that dies takes its sessions with it: they begin anew with another, under the same names. Routes come
with the trajectory, through Ray, whose object store is a cache; they are written down here, durably where the
run keeps them, before anybody hears of the trajectory. So a run has one writer, no worker needs to see the
run's directory, and what a cancelled or a lost session sampled leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray

from etude.config import ClusterConfig
from etude.controller.remote.fleet import EngineFleet, check_build
from etude.controller.remote.rollout_part import (
    DoneEpisode,
    Greeting,
    PackedEpisode,
    Progress,
    WorkerOrder,
    routes_of,
)
from etude.controller.supervision import FaultJournal, NodeHealth, Spawn, SupervisedParts, Supervisor
from etude.environment.fork_groups import ForkedEpisode, ForkPlan
from etude.environment.runners import EnvironmentTimes, add_times, latest_times
from etude.errors import InfrastructureError, PartLostError, StoreError
from etude.inference.exchange import Build
from etude.protocols import Handle, Sampler, TokenTally
from etude.records import BlobRef, SamplingParams, Task, Trajectory, TrajectoryId

RouteKeeper = Callable[[NDArray[Any]], BlobRef]
RecordFailure = Callable[[Task, TrajectoryId, SamplingParams, InfrastructureError, int], Trajectory]
"""Makes the record of an episode that was begun so often, and failed for that reason."""


@dataclass(slots=True, eq=False)
class _Worker:
    """One worker, process after process."""

    supervisor: Supervisor
    client: str = ""
    """The process's name with the engines; empty while there is none."""
    tallies: dict[int, TokenTally | None] = field(default_factory=dict[int, "TokenTally | None"])
    """Sessions it runs, by ticket, and who wants to know how far they are."""
    times: EnvironmentTimes = field(default_factory=EnvironmentTimes)
    """Of the process, as far as it has told."""
    engines_changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while there is something to tell the process of the engines."""
    telling: asyncio.Task[None] | None = None
    """Tells it."""


class RemoteEpisodes:
    """Implements TimedRunner and ForkingRunner over supervised workers. For one event loop."""

    def __init__(
        self,
        spawns: Mapping[str, Spawn],
        build: Build,
        fleet: EngineFleet,
        keep_routes: RouteKeeper,
        record_failure: RecordFailure,
        settings: ClusterConfig,
        journal: FaultJournal,
        nodes: NodeHealth,
    ) -> None:
        """`spawns`: how to start the process of each worker, by name. `build`: what they must all be.
        `fleet`: the engines that they sample with."""
        self._build, self._fleet = build, fleet
        self._keep_routes, self._record_failure = keep_routes, record_failure
        self._settings = settings
        self._tickets = itertools.count()
        self._past = EnvironmentTimes()
        """Of processes that are gone, and what was learned of sessions without one."""
        self._tidying: set[asyncio.Future[None]] = set()
        self._supervised = SupervisedParts(settings.patience_s)
        self._workers: dict[str, _Worker] = {}
        for name, spawn in spawns.items():
            self._add(name, spawn, journal, nodes)
        fleet.watch(self._note_engines)

    async def start(self) -> None:
        """Starts all workers. Raises what any of them raises."""
        await self._supervised.start()

    async def shutdown(self) -> None:
        """Stops all workers."""
        for worker in self._workers.values():
            self._stop_telling(worker)
        await self._supervised.close()
        await asyncio.gather(*self._tidying)

    @property
    def times(self) -> EnvironmentTimes:
        """See TimedRunner.times."""
        return add_times([self._past, *(worker.times for worker in self._workers.values())])

    async def run(
        self,
        task: Task,
        identity: TrajectoryId,
        sampler: Sampler,
        rng_key: tuple[int, ...],
        params: SamplingParams,
        training: bool = False,
    ) -> Trajectory:
        """See EpisodeRunner.run. Samples with the fleet's engines, whatever `sampler` is. Raises
        PartLostError once there will be no worker any more."""
        order = WorkerOrder(task, identity, rng_key, params, training)
        return (await self._carry_out(order, sampler)).trajectory

    async def run_forked(
        self,
        task: Task,
        identity: TrajectoryId,
        sampler: Sampler,
        rng_key: tuple[int, ...],
        params: SamplingParams,
        plan: ForkPlan,
    ) -> ForkedEpisode:
        """See ForkingRunner.run_forked; otherwise as `run`."""
        order = WorkerOrder(task, identity, rng_key, params, True, plan)
        return await self._carry_out(order, sampler)

    # ---- sessions -------------------------------------------------------------------------------

    async def _carry_out(self, order: WorkerOrder, sampler: Sampler) -> ForkedEpisode:
        """The episode, by whichever workers live long enough."""
        tally = sampler if isinstance(sampler, TokenTally) else None
        while True:
            worker = await self._least_busy()
            try:
                done = await self._ask(worker, order, tally)
                return await asyncio.to_thread(self._keep, done)
            except InfrastructureError as error:  # the worker is gone, or its routes could not be kept
                self._past.num_infrastructure_failures += 1
                order = replace(order, first_attempt=order.first_attempt + 1)
                if order.first_attempt >= self._settings.max_attempts:
                    asked = (order.task, order.identity, order.params)
                    return ForkedEpisode(self._record_failure(*asked, error, order.first_attempt))

    async def _least_busy(self) -> _Worker:
        """The worker that is up and runs the fewest sessions, of several the first."""
        while True:
            up = [worker for worker in self._workers.values() if worker.supervisor.handle is not None]
            if up:
                return min(up, key=lambda worker: len(worker.tallies))
            await self._supervised.any_ready()

    async def _ask(self, worker: _Worker, order: WorkerOrder, tally: TokenTally | None) -> DoneEpisode:
        handle, ticket = worker.supervisor.handle, next(self._tickets)
        assert handle is not None, "it was up just now"
        worker.tallies[ticket] = tally
        try:
            packed: PackedEpisode | None = await handle.call("run", ticket, order)
        except PartLostError as error:
            worker.supervisor.lose(handle, str(error))
            raise
        except asyncio.CancelledError:
            await self._cancel(handle, ticket, tally)
            raise
        finally:
            del worker.tallies[ticket]
        if packed is None:  # somebody in its process ended the session: the process is ending
            raise PartLostError("ended the session", field=worker.supervisor.name)
        done = packed.open()
        worker.times = latest_times(worker.times, done.times)
        if tally is not None:
            tally.tally(done.num_tokens)
        return done

    async def _cancel(self, handle: Handle[Any], ticket: int, tally: TokenTally | None) -> None:
        """Returns once the session has tidied up, or its worker is gone, even if asked to hurry."""

        async def cancel() -> None:
            with contextlib.suppress(PartLostError):  # then its session is gone as well
                num_tokens = await handle.call("cancel", ticket)
                if tally is not None:
                    tally.tally(num_tokens)

        await asyncio.shield(self._in_background(cancel()))

    def _keep(self, done: DoneEpisode) -> ForkedEpisode:
        """Keeps the routes for the run, and has the trajectories name them as they are kept."""
        kept: dict[str, BlobRef] = {}
        episode = done.episode
        for ref in routes_of((episode.trajectory, *episode.members)):
            if ref.url not in kept:
                kept[ref.url] = self._keep_routes(done.routes[ref.url])
                if kept[ref.url].digest != ref.digest:
                    raise StoreError(
                        "routes were damaged on their way here", field="routes", received=ref.digest
                    )
        members = tuple(_with_routes(one, kept) for one in episode.members)
        return replace(episode, trajectory=_with_routes(episode.trajectory, kept), members=members)

    # ---- processes ------------------------------------------------------------------------------

    def _add(self, name: str, spawn: Spawn, journal: FaultJournal, nodes: NodeHealth) -> None:
        async def prepare(handle: Handle[Any]) -> None:
            greeting: Greeting = await handle.call("begin")
            check_build(greeting.build, self._build, name)
            worker.engines_changed.clear()
            await handle.call("follow", self._fleet.table())
            worker.client, worker.times = greeting.client, EnvironmentTimes()
            worker.telling = asyncio.create_task(self._tell_of_engines(worker, handle))

        def leave(cause: str) -> None:
            self._stop_telling(worker)
            self._past = add_times([self._past, worker.times])
            client, worker.client, worker.times = worker.client, "", EnvironmentTimes()
            self._in_background(self._fleet.forget(client))

        def hear(progress: Progress) -> None:
            worker.times = latest_times(worker.times, progress.times)
            for ticket, num_tokens in progress.num_tokens.items():
                tally = worker.tallies.get(ticket)
                if tally is not None:
                    tally.tally(num_tokens)

        supervisor = Supervisor(name, spawn, prepare, self._settings, journal, nodes, leave, hear)
        worker = self._workers[name] = _Worker(supervisor)
        self._supervised.add(supervisor)

    def _note_engines(self) -> None:
        """The fleet's engines have changed: workers are told."""
        for worker in self._workers.values():
            worker.engines_changed.set()

    async def _tell_of_engines(self, worker: _Worker, handle: Handle[Any]) -> None:
        """Sends a worker's process every newer table, until it is gone."""
        try:
            while True:
                await worker.engines_changed.wait()
                worker.engines_changed.clear()
                await handle.call("follow", self._fleet.table())
        except Exception as error:  # gone, or failed as it never should: the next one may do better
            worker.supervisor.lose(handle, f"could not be told of engines: {error}")

    def _stop_telling(self, worker: _Worker) -> None:
        if worker.telling is not None:
            worker.telling.cancel()
            worker.telling = None

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self._tidying.add(task)
        task.add_done_callback(self._tidying.discard)
        return task


def _with_routes(trajectory: Trajectory, kept: Mapping[str, BlobRef]) -> Trajectory:
    segments = tuple(
        one if one.routes is None else replace(one, routes=kept[one.routes.url])
        for one in trajectory.segments
    )
    return replace(trajectory, segments=segments)
