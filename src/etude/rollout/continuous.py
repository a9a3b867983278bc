"""Collecting groups while the trainer is at it.

    admit: room by staleness, slots ── begin ── members run ── whole ── log (fsync) ── buffer
             ^                                     |  ^                                   |
             |                     new weights ────┘  └ stragglers: aborted, carried      v
             └───────────── in_service <── publish <── train <── collect (waits) <────── take

Sessions go on over weight updates: their tokens carry the versions that sampled them. `collect` waits until a
step has its groups, and for groups under way that no later step could train.

A group one of whose sessions is forked is one unit with the group of the fork: places for siblings are kept
from its beginning, it is whole when both are, and both are trained in one step.

On a reproducible schedule (`PacedSampler`) everything is decided in `turn`, between two engine steps that
the engine's clock names: an episode counts as ended when the schedule has taken note of its sessions, and no
step is taken while the trainer is at it. So two runs are equal, however long tools and graders take.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from etude.algorithms.signal import Signal, signal_of
from etude.config import RlConfig
from etude.environment.fork_groups import ForkedEpisode
from etude.environment.member import MemberSampler
from etude.environment.runners import Player
from etude.kit.tasks import Tasks, start_watched
from etude.protocols import PacedSampler, Sampler
from etude.records import Group, Status, Task
from etude.rollout.buffer import GroupBuffer, Taken, dropped_groups, groups_of, trained_groups
from etude.rollout.collect import MAX_OVERSAMPLING, Collected, expected_share, learn_share
from etude.rollout.curriculum import CollectorState, Curriculum, TaskSource
from etude.rollout.forks import Members, fork_group
from etude.rollout.kept import Kept, read_kept
from etude.rollout.noted import NotedEnds
from etude.rollout.tally import Tally
from etude.store.trajectories import TrajectoryLog


@dataclass(slots=True, eq=False)
class _Running:
    """A group that was begun."""

    number: int
    task: Task
    views: list[MemberSampler]
    """One per member that was asked for."""
    sessions: dict[int, asyncio.Task[None]] = field(default_factory=dict[int, "asyncio.Task[None]"])
    """Members that have not come yet, by index."""
    members: dict[int, ForkedEpisode] = field(default_factory=dict[int, ForkedEpisode])

    @property
    def num_graded(self) -> int:
        return sum(one.trajectory.status is not Status.INFRASTRUCTURE for one in self.members.values())


class ContinuousCollector:
    """Implements Collector and Pace for `rl.max_staleness` above 0. For one event loop."""

    def __init__(
        self,
        environment: Player,
        sampler: Sampler,
        tasks: TaskSource,
        config: RlConfig,
        run: str,
        seed: int,
        max_sessions: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_sessions`: so many run at once at most, or those of one group if that is more. `clock`: in
        seconds, for the figures only."""
        self.state = CollectorState()
        self._members = Members(environment, config, run, seed, tasks)
        self._sampler = sampler
        self._tasks = tasks
        self._config = config
        self._run = run
        self._max_sessions = max_sessions
        self._serving = 0
        self._tally = Tally(clock)
        self._log: TrajectoryLog | None = None
        """None where nothing is collected; then these three mean nothing either."""
        self._buffer: GroupBuffer
        self._curriculum: Curriculum
        self._kept: dict[int, Kept]
        self._running: dict[int, _Running] = {}
        """Groups of which sessions run, by number."""
        self._num_sessions = 0
        """That run, or that will: siblings of a session that is to be forked count from its beginning."""
        self._ending = Tasks()
        """Sessions that were cancelled and still tidy up."""
        self._ends = NotedEnds()
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._calm = asyncio.Event()
        """Set while the trainer waits for what is not there yet."""

    # ---- Collector ------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self, log: TrajectoryLog, first_step: int, num_steps: int) -> AsyncIterator[None]:
        """See Collector.running. Groups that are in the log, and not resolved, are not sampled again."""
        config = self._config
        most = (1 + config.max_refill_rounds) * math.ceil(MAX_OVERSAMPLING * config.groups_per_step)
        self._log = log
        self._buffer = GroupBuffer(
            config.max_staleness,
            config.groups_per_step,
            first_step,
            num_steps,
            most,
            config.stale == "mask",
        )
        self._buffer.serving = self._serving
        self._kept = read_kept(log, self.state, first_step - config.max_staleness)
        self._curriculum = Curriculum(self._tasks, config.curriculum, self.state)
        if isinstance(self._sampler, PacedSampler):
            self._ends.is_paced = self._sampler.set_pace(self)
        try:
            with _rare_collections():
                yield
        finally:
            if isinstance(self._sampler, PacedSampler):
                self._sampler.set_pace(None)
            self._log = None
            self._ends.clear()
            self._calm.set()
            await self._cancel_all()

    def in_service(self, step: int) -> None:
        self._serving = step
        if self._log is not None:
            self._buffer.serving = step
            self._advance()

    async def collect(self) -> Collected:
        """See Collector.collect. Raises what a session raised, if one did that should not have."""
        self._advance()
        while not self._is_ready():
            self._calm.set()
            self._changed.clear()
            await self._changed.wait()
        self._calm.clear()
        if self._failure is not None:
            raise self._failure
        taken = self._buffer.take()
        for waiting in (*taken.trained, *taken.stale):
            self._abort_stragglers(waiting.number)
        self._learn(taken)
        figures = self._tally.take(taken, with_forks=self._config.forks.share > 0)
        figures |= self._curriculum.figures()
        if not self._ends.is_paced:  # there no step is taken until the next weights are in service
            self._advance()
        exhausted = self._curriculum.is_over and self._buffer.is_empty
        return Collected(
            trained_groups(taken), dropped_groups(taken), groups_of(taken.stale), figures, exhausted
        )

    # ---- Pace -----------------------------------------------------------------------------------

    def ended(self, session_id: str) -> None:
        if (arrive := self._ends.note(session_id)) is not None:
            self._guard(arrive)

    async def turn(self) -> None:
        """See Pace.turn: groups begin, stragglers end, and the trainer takes its step, if it can."""
        self._guard(self._advance)
        while self._ending or not self._calm.is_set():
            if self._ending:
                await self._ending.wait()
            else:
                await self._calm.wait()
        await asyncio.sleep(0)  # sessions that were begun are opened before the next step

    def stopped(self) -> None:
        """See Pace.stopped: from now on episodes count as ended when they end."""
        for arrive in (*self._ends.stop(), self._advance):
            self._guard(arrive)

    # ---- admission ------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Begins what may begin, and wakes the trainer if its groups are there."""
        while not (blocked_by := self._blocked_by()):
            self._begin()
        lacks_oldest = self._calm.is_set() and self._buffer.lacks_only_oldest
        self._tally.note(self._num_sessions, blocked_by, lacks_oldest)
        if self._is_ready():
            self._calm.clear()
            self._changed.set()

    def _blocked_by(self) -> str:
        """What another group has to wait for; empty if it may begin."""
        if self._failure is not None:
            return "failure"
        if not self._buffer.room(self._useful_each):
            return "staleness"
        most = self._members.num_asked + (self._config.forks.size - 1 if self._config.forks.share else 0)
        if self._num_sessions and self._num_sessions + most > self._max_sessions:
            return "slots"
        return "" if self._curriculum.has_next() else "tasks"

    @property
    def _useful_each(self) -> float:
        """Groups with a signal that a number is expected to give, that of its fork included."""
        return expected_share(self.state.useful_share) * (1 + self._config.forks.share)

    def _places(self, number: int, index: int) -> int:
        """Sessions that a member is counted for: one that is forked has ended when its siblings begin."""
        return self._config.forks.size if self._members.is_forked(number, index) else 1

    def _is_ready(self) -> bool:
        more_tasks = not self._curriculum.is_over
        return self._failure is not None or self._buffer.is_ready(self._useful_each, more_tasks)

    def _begin(self) -> None:
        number, task = self._curriculum.begin()
        self._buffer.begin(number)
        kept = self._kept.pop(number, None)
        if kept is not None:
            self._tally.found_in_log()
            self._put(number, kept.task, kept.fork)
            return
        asked = range(self._members.num_asked)
        views = [self._ends.view(self._sampler) for _ in asked]
        running = self._running[number] = _Running(number, task, views)
        for index in asked:
            self._num_sessions += self._places(number, index)
            running.sessions[index] = start_watched(self._episode(running, index), self._fail)

    async def _episode(self, running: _Running, index: int) -> None:
        view = running.views[index]
        try:
            episode = await self._members.play(running.task, running.number, index, view)
            arrive = functools.partial(self._arrive, running, index, episode)
            waits = self._ends.hold(view, arrive)
        finally:
            view.end()
        if self._log is not None and not waits:
            arrive()
            self._advance()

    def _guard(self, work: Callable[[], None]) -> None:
        """Does what the schedule calls for: what fails there is ours, and no failure of the engine."""
        try:
            work()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Has `collect` raise the error."""
        self._failure = self._failure or error
        self._calm.clear()
        self._changed.set()

    # ---- members and groups ---------------------------------------------------------------------

    def _arrive(self, running: _Running, index: int, episode: ForkedEpisode) -> None:
        """A member has come; what comes after it was given up is left out."""
        if running.sessions.pop(index, None) is None:
            return
        self._num_sessions -= self._places(running.number, index)
        running.members[index] = episode
        self._tally.came(episode)
        if self._buffer.holds(running.number):
            self._tally.carried()
            self._keep(running)
        elif not running.sessions or running.num_graded >= self._config.group_size:
            self._complete(running)

    def _complete(self, running: _Running) -> None:
        """Enough members are there: the group is whole, unless those who are late could give it a signal.

        It never is without the one that is forked, whose episode takes longer than all others.
        """
        if running.sessions and self._config.stragglers == "abort":
            self._give_up(running)
        if any(self._members.is_forked(running.number, index) for index in running.sessions):
            return
        if running.sessions and signal_of(self._group(running), self._config) is Signal.NONE:
            return
        self._keep(running)

    def _keep(self, running: _Running) -> None:
        """Stores the group durably; only then it counts."""
        assert self._log is not None
        group = self._group(running)
        first = running.members.get(0)
        fork = first and fork_group(group, first, self._config.forks.size)
        self._log.append([group, fork] if fork is not None else [group])
        self._put(running.number, group, fork)
        if not running.sessions:
            del self._running[running.number]

    def _put(self, number: int, group: Group, fork: Group | None) -> None:
        signal = Signal.NONE if fork is None else signal_of(fork, self._config)
        self._buffer.put(number, group, signal_of(group, self._config), fork, signal)

    def _group(self, running: _Running) -> Group:
        members = tuple(running.members[index].trajectory for index in sorted(running.members))
        weight = self.state.price.weight
        name, asked = f"{self._run}/g{running.number}", self._members.num_asked
        return Group(name, "task", asked, members, price_weight=weight)

    def _abort_stragglers(self, number: int) -> None:
        running = self._running.pop(number, None)
        if running is not None:
            self._give_up(running)

    def _give_up(self, running: _Running) -> None:
        """Ends the members that have not come, but for one that is forked."""
        late = [n for n in running.sessions if not self._members.is_forked(running.number, n)]
        if late:
            rewards = (one.trajectory.reward for one in running.members.values())
            self._tally.ended_without([reward.task for reward in rewards if reward is not None])
        for index in late:
            session = running.sessions.pop(index)
            self._tally.aborted(running.views[index].num_tokens)
            self._num_sessions -= 1
            if not session.done():
                self._ending.add(session)
                session.cancel()

    async def _cancel_all(self) -> None:
        sessions = {*self._ending, *(s for r in self._running.values() for s in r.sessions.values())}
        for session in sessions:
            session.cancel()
        ended = await asyncio.gather(*sessions, return_exceptions=True)
        self._running.clear()
        for error in ended:
            if isinstance(error, Exception) and error is not self._failure:
                raise error

    # ---- after a step is put together -----------------------------------------------------------

    def _learn(self, taken: Taken) -> None:
        """The books as of this step: what it takes is resolved, whatever happens to it in training."""
        resolved = [*taken.trained, *taken.dropped, *taken.stale]
        self._curriculum.resolve((one.number, one.group) for one in resolved)
        useful = sum(one.num_task for one in resolved)
        if resolved:
            share = useful / sum(len(one.groups) for one in resolved)
            self.state.useful_share = learn_share(self.state.useful_share, share)
        for one in taken.stale:
            self._tally.dropped(one.group)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Python looks for cycles less often meanwhile.

    What sessions hold is alive as long as they are, so that a look finds next to nothing, and costs the more
    the more of them there are: a third of the time of thousands.
    """
    before = gc.get_threshold()
    gc.set_threshold(20_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
