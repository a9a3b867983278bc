"""Client of the rollout workers: an EpisodeRunner over processes that run sessions.

    collector ──play─> RemoteEpisodes ──order──> the worker with the fewest sessions
              <─trajectory, routes stored┘ <──── packed episode

The sessions of a worker that dies restart on another one, under the same names. Expert routes arrive with the
trajectory, packed as clusters pack it; they are stored here, durably in the run's blob store, before the
trajectory is read. So a run has a single writer, workers need no access to the run's directory, and cancelled
or lost sessions leave nothing behind.
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
from etude.environment.runners import EnvironmentTimes, EpisodeRequest, EpisodeRunner, add_times, latest_times
from etude.errors import InfrastructureError, PartLostError
from etude.inference.exchange import Build
from etude.kit.tasks import Tasks
from etude.protocols import Handle, Sampler, TokenProgress
from etude.records import Status, Trajectory
from etude.store.bundles import unpack_trajectory


@dataclass(slots=True, eq=False)
class _Worker:
    """One worker, across restarts of its process."""

    supervisor: Supervisor[RolloutPart]
    client: str = ""
    """The process's client name at the engines; empty while there is no process."""
    tallies: dict[int, TokenProgress | None] = field(default_factory=dict[int, "TokenProgress | None"])
    """Running sessions by ticket, each with the tally that receives its progress."""
    times: EnvironmentTimes = field(default_factory=EnvironmentTimes)
    """Times of the process, as last reported."""
    sending: asyncio.Task[None] | None = None
    """Sends the process each new table of engines."""
    is_leaving: bool = False
    """Whether it gets no more sessions."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is leaving and runs no sessions."""
    num_cancelled: int = 0
    """Sessions that it did not finish before it left; they restart on other workers."""


class RemoteEpisodes(EpisodeRunner):
    """Implements TimedEpisodeRunner over supervised workers. For one event loop."""

    def __init__(
        self,
        spawns: Mapping[str, Spawn[RolloutPart]],
        build: Build,
        fleet: EngineFleet,
        keep_routes: KeepRoutes,
        supervision: Supervision,
    ) -> None:
        """`spawns`: functions that start each worker's process, by name. `build`: required of all processes.
        `fleet`: the engines that they sample with."""
        self._build, self._fleet = build, fleet
        self._supervision, self._settings = supervision, supervision.settings
        self._keep_routes = keep_routes
        self._tickets = itertools.count()
        self._ended_times = EnvironmentTimes()
        """Totals of ended processes, and of failures outside any process."""
        self._cleanup = Tasks()
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
            self._stop_sending(worker)
        await self._supervised.close()
        await asyncio.gather(*self._cleanup)

    async def join(self, name: str, spawn: Spawn[RolloutPart]) -> None:
        """Adds a worker, of a new name or of one that has left; returns once it is ready. Raises what the
        worker raises, and PartLostError where every attempt to start its process fails."""
        worker = self._add(name, spawn)
        try:
            await worker.supervisor.start()
        except BaseException:
            await self._end(worker)
            raise

    async def leave(self, name: str, within_s: float) -> int:
        """Removes a worker. It gets no more sessions; those that have not ended after `within_s` restart on
        other workers, which does not count as a failure. Returns their number. There must be another worker.
        """
        worker = self._workers[name]
        self._supervised.remove(name)
        worker.is_leaving = True
        try:
            if worker.tallies:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(within_s):
                        await worker.idle.wait()
            if (handle := worker.supervisor.handle) is not None:
                running = list(worker.tallies.items())
                await asyncio.gather(*(self._cancel(handle, ticket, tally) for ticket, tally in running))
            if worker.tallies:
                await worker.idle.wait()
            await self._fetch_last_times(worker)
        finally:
            await self._end(worker)
        return worker.num_cancelled

    def is_up(self, name: str) -> bool:
        """Whether that worker's process is ready."""
        return self._workers[name].supervisor.handle is not None

    def num_sessions(self, name: str) -> int:
        """How many sessions a worker runs."""
        return len(self._workers[name].tallies)

    @property
    def times(self) -> EnvironmentTimes:
        return add_times([self._ended_times, *(worker.times for worker in self._workers.values())])

    # ---- sessions -------------------------------------------------------------------------------

    async def play(self, request: EpisodeRequest, sampler: Sampler) -> ForkedEpisode:
        """See EpisodeRunner.play. Restarts the session on another worker when its worker is lost.

        Raises PartLostError once all workers are given up.
        """
        tally = sampler if isinstance(sampler, TokenProgress) else None
        while True:
            worker = await self._least_busy()
            try:
                done = await self._run_on(worker, request, tally)
                if done is not None:
                    return await asyncio.to_thread(self._unpack, done)
            except InfrastructureError as error:  # the worker was lost, or the routes could not be stored
                self._ended_times.num_infrastructure_failures += 1
                request = replace(request, first_attempt=request.first_attempt + 1)
                if request.first_attempt >= self._settings.max_attempts:
                    cause = f"{type(error).__name__}: {error}"
                    failed = Trajectory(request.identity, (), (), Status.INFRASTRUCTURE, cause)
                    return ForkedEpisode(replace(failed, attempt=request.first_attempt - 1))

    async def _least_busy(self) -> _Worker:
        """The ready worker with the fewest sessions; the first of several. Waits for one."""
        while True:
            staying = [worker for worker in self._workers.values() if not worker.is_leaving]
            up = [worker for worker in staying if worker.supervisor.handle is not None]
            if up:
                return min(up, key=lambda worker: len(worker.tallies))
            await self._supervised.wait_any_ready()

    async def _run_on(
        self, worker: _Worker, request: EpisodeRequest, tally: TokenProgress | None
    ) -> DoneEpisode | None:
        """Runs the order on a worker; None where the worker leaves before it is done."""
        handle, ticket = worker.supervisor.handle, next(self._tickets)
        assert handle is not None, "it was up just now"
        worker.tallies[ticket] = tally
        try:
            done = await handle.call(RolloutPart.run, ticket, request)
        except PartLostError as error:
            worker.supervisor.declare_lost(handle, str(error))
            raise
        except asyncio.CancelledError:
            await self._cancel(handle, ticket, tally)
            raise
        finally:
            del worker.tallies[ticket]
            if worker.is_leaving and not worker.tallies:
                worker.idle.set()
        if done is None and worker.is_leaving:
            worker.num_cancelled += 1
            return None
        if done is None:  # the session was cancelled inside its process: the process is ending
            raise PartLostError("ended the session", field=worker.supervisor.name)
        worker.times = latest_times(worker.times, done.times)
        if tally is not None:
            tally.report_tokens(done.num_tokens)
        return done

    async def _cancel(self, handle: Handle[RolloutPart], ticket: int, tally: TokenProgress | None) -> None:
        """Returns once the session has cleaned up, or its worker is lost; survives cancellation."""

        async def cancel() -> None:
            with contextlib.suppress(PartLostError):  # then its session has ended as well
                num_tokens = await handle.call(RolloutPart.cancel, ticket)
                if tally is not None:
                    tally.report_tokens(num_tokens)

        await asyncio.shield(self._cleanup.start(cancel()))

    def _unpack(self, done: DoneEpisode) -> ForkedEpisode:
        """Unpacks an episode; stores its arrays, so that the trajectories refer to the run's own blobs."""
        first, *siblings = (
            unpack_trajectory(bundle).store_blobs(self._keep_routes) for bundle in done.bundles
        )
        return ForkedEpisode(first, tuple(siblings), done.origin, done.refused)

    async def _fetch_last_times(self, worker: _Worker) -> None:
        """Fetches the final times of a leaving worker."""
        if (handle := worker.supervisor.handle) is not None:
            with contextlib.suppress(PartLostError):  # then its last report counts
                worker.times = latest_times(worker.times, (await handle.call(RolloutPart.pulse)).times)

    # ---- processes ------------------------------------------------------------------------------

    def _add(self, name: str, spawn: Spawn[RolloutPart]) -> _Worker:
        async def prepare(handle: Handle[RolloutPart]) -> None:
            build, client = await handle.call(RolloutPart.begin)
            check_build(build, self._build, name)
            table = self._fleet.table()
            await handle.call(RolloutPart.follow, table)
            worker.client, worker.times = client, EnvironmentTimes()
            worker.sending = asyncio.create_task(self._send_tables(worker, handle, table))

        def on_loss(cause: str) -> None:
            self._on_process_lost(worker)

        def on_pulse(progress: Progress) -> None:
            worker.times = latest_times(worker.times, progress.times)
            for ticket, num_tokens in progress.num_tokens.items():
                tally = worker.tallies.get(ticket)
                if tally is not None:
                    tally.report_tokens(num_tokens)

        assert name not in self._workers, "names are unique"
        supervisor = Supervisor(name, spawn, prepare, self._supervision, on_loss, on_pulse)
        worker = self._workers[name] = _Worker(supervisor)
        self._supervised.add(supervisor)
        return worker

    async def _end(self, worker: _Worker) -> None:
        """Stops a worker's process and removes the worker."""
        self._supervised.remove(worker.supervisor.name)
        try:
            await worker.supervisor.close()
        finally:
            self._on_process_lost(worker)
            del self._workers[worker.supervisor.name]

    def _on_process_lost(self, worker: _Worker) -> None:
        """Cleans up after a process that has ended or is about to."""
        self._stop_sending(worker)
        self._ended_times = add_times([self._ended_times, worker.times])
        client, worker.client, worker.times = worker.client, "", EnvironmentTimes()
        if client:
            self._cleanup.start(self._fleet.end_client(client))

    async def _send_tables(self, worker: _Worker, handle: Handle[RolloutPart], table: EngineTable) -> None:
        """Sends a worker's process, which has `table`, every newer table, until the process ends."""
        try:
            while True:
                await self._fleet.changes.until(lambda: self._fleet.table() != table)  # noqa: B023
                table = self._fleet.table()
                await handle.call(RolloutPart.follow, table)
        except Exception as error:  # lost, or an unexpected failure: the next process may work
            worker.supervisor.declare_lost(handle, f"could not be sent the engines: {error}")

    def _stop_sending(self, worker: _Worker) -> None:
        if worker.sending is not None:
            worker.sending.cancel()
            worker.sending = None
