"""Asynchronous collection: groups are sampled while the trainer trains.

    admit: by staleness, slots ── begin ── members run ── finished ── log (fsync) ── buffer
             ^                                |  ^                                      |
             |                new weights ────┘  └ stragglers: aborted, carried         v
             └──── on_weights_served <── publish <── train <── collect (waits) <─── pop_step

Sessions continue across weight updates: their tokens carry the versions that sampled them. `collect` waits
until a step has its groups, and for groups under way that no later step could train.

A group one of whose sessions is forked is one unit with the group of the fork: slots for the siblings are
reserved when it begins, it is finished when both groups are, and both are trained in one step.

On a reproducible schedule (`PacedSampler`) everything is decided in `before_next_step`, between two engine
steps with fixed numbers: an episode counts as ended when the schedule has recorded the ends of its sessions,
and the engine takes no step while the trainer is working. So two runs are equal, however long tools and
graders take.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace

from etude.algorithms.signal import Signal, signal_of
from etude.config import RlConfig
from etude.environment.fork_groups import ForkedEpisode
from etude.environment.member import MemberSampler
from etude.environment.runners import EpisodeRunner
from etude.kit.tasks import Tasks, start_watched
from etude.protocols import PacedSampler, Sampler
from etude.records import Group, Status, Task
from etude.rollout.buffer import GroupBuffer, StepGroups, all_groups, dropped_groups, trained_groups
from etude.rollout.collect import MAX_OVERSAMPLING, Collected, expected_share, update_share
from etude.rollout.collector_metrics import CollectorMetrics
from etude.rollout.curriculum import CollectorState, Curriculum, TaskSource
from etude.rollout.forks import Members, fork_group
from etude.rollout.paced_episodes import PacedEpisodes
from etude.store.trajectories import TrajectoryLog

StoredGroups = dict[int, tuple[Group, Group | None]]
"""Groups in the log by task number, each with the group of its fork."""


@dataclass(slots=True, eq=False)
class _Running:
    """A group that has begun."""

    number: int
    task: Task
    views: list[MemberSampler]
    """One per member."""
    sessions: dict[int, asyncio.Task[None]] = field(default_factory=dict[int, "asyncio.Task[None]"])
    """Members that have not finished, by index."""
    members: dict[int, ForkedEpisode] = field(default_factory=dict[int, ForkedEpisode])
    """Members that have, by index."""

    @property
    def num_graded(self) -> int:
        return sum(e.trajectory.status is not Status.INFRASTRUCTURE for e in self.members.values())


class ContinuousCollector:
    """Implements Collector and Pace for `rl.max_staleness` above 0. For one event loop."""

    def __init__(
        self,
        environment: EpisodeRunner,
        sampler: Sampler,
        tasks: TaskSource,
        config: RlConfig,
        run: str,
        seed: int,
        max_sessions: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_sessions`: most that run at once; one group always may. `clock`: in seconds, for metrics."""
        self.state = CollectorState()
        self._members = Members(environment, config, run, seed, tasks)
        self._sampler = sampler
        self._tasks = tasks
        self._config = config
        self._run = run
        self._max_sessions = max_sessions
        self._serving = 0
        self._metrics = CollectorMetrics(clock)
        self._log: TrajectoryLog | None = None
        """None outside of `running`; the next three attributes are valid within it only."""
        self._buffer: GroupBuffer
        self._curriculum: Curriculum
        self._stored: StoredGroups
        self._running: dict[int, _Running] = {}
        """Groups with running sessions, by number."""
        self._num_sessions = 0
        """Occupied slots: of running sessions and of the siblings of sessions that will be forked."""
        self._ending = Tasks()
        """Sessions that were cancelled and are still cleaning up."""
        self._paced = PacedEpisodes()
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._trainer_waits = asyncio.Event()
        """Set while the trainer waits for groups that are not finished."""

    # ---- Collector ------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self, log: TrajectoryLog, first_step: int, num_steps: int) -> AsyncIterator[None]:
        """See Collector.running. Groups in the log that are not resolved are not sampled again."""
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
        self._stored = read_stored_groups(log, self.state, first_step - config.max_staleness)
        self._curriculum = Curriculum(self._tasks, config.curriculum, self.state)
        if isinstance(self._sampler, PacedSampler):
            self._paced.is_paced = self._sampler.set_pace(self)
        try:
            with _rare_garbage_collection():
                yield
        finally:
            if isinstance(self._sampler, PacedSampler):
                self._sampler.set_pace(None)
            self._log = None
            self._paced.clear()
            self._trainer_waits.set()
            await self._cancel_all()

    def on_weights_served(self, step: int) -> None:
        self._serving = step
        if self._log is not None:
            self._buffer.serving = step
            self._advance()

    async def collect(self) -> Collected:
        """See Collector.collect. Raises the unexpected error of a session, if there was one."""
        self._advance()
        while not self._is_ready():
            self._trainer_waits.set()
            self._changed.clear()
            await self._changed.wait()
        self._trainer_waits.clear()
        if self._failure is not None:
            raise self._failure
        popped = self._buffer.pop_step()
        for waiting in (*popped.trained, *popped.stale):
            self._abort_stragglers(waiting.number)
        self._resolve(popped)
        figures = self._metrics.pop_figures(popped, with_forks=self._config.forks.share > 0)
        figures |= self._curriculum.figures()
        if not self._paced.is_paced:  # else the engine takes no step until the next weights are served
            self._advance()
        exhausted = self._curriculum.is_over and self._buffer.is_empty
        return Collected(
            trained_groups(popped), dropped_groups(popped), all_groups(popped.stale), figures, exhausted
        )

    # ---- Pace -----------------------------------------------------------------------------------

    def on_session_ended(self, session_id: str) -> None:
        if (on_counted := self._paced.record_end(session_id)) is not None:
            self._guard(on_counted)

    async def before_next_step(self) -> None:
        """See Pace.before_next_step: groups begin, stragglers end, the trainer takes a step if it can."""
        self._guard(self._advance)
        while self._ending or not self._trainer_waits.is_set():
            if self._ending:
                await self._ending.wait()
            else:
                await self._trainer_waits.wait()
        await asyncio.sleep(0)  # new sessions are opened before the next step

    def on_schedule_ended(self) -> None:
        """See Pace.on_schedule_ended: from now on episodes count as soon as they finish."""
        for callback in (*self._paced.stop_pacing(), self._advance):
            self._guard(callback)

    # ---- admission ------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Begins as many groups as may begin, and wakes the trainer if its step can be taken."""
        while not (blocked_by := self._blocked_by()):
            self._begin()
        lacks_oldest = self._trainer_waits.is_set() and self._buffer.lacks_only_oldest
        self._metrics.occupancy.update(self._num_sessions, blocked_by, lacks_oldest)
        if self._is_ready():
            self._trainer_waits.clear()
            self._changed.set()

    def _blocked_by(self) -> str:
        """Why no further group may begin; empty if one may."""
        if self._failure is not None:
            return "failure"
        if not self._buffer.num_may_begin(self._useful_each):
            return "staleness"
        most = self._members.num_asked + (self._config.forks.size - 1 if self._config.forks.share else 0)
        if self._num_sessions and self._num_sessions + most > self._max_sessions:
            return "slots"
        return "" if self._curriculum.has_next() else "tasks"

    @property
    def _useful_each(self) -> float:
        """Groups with a signal expected of one task number, fork groups included."""
        return expected_share(self.state.useful_share) * (1 + self._config.forks.share)

    def _num_slots(self, number: int, index: int) -> int:
        """Slots that a member occupies: a forked session has ended by the time its siblings begin."""
        return self._config.forks.size if self._members.is_forked(number, index) else 1

    def _is_ready(self) -> bool:
        more_tasks = not self._curriculum.is_over
        return self._failure is not None or self._buffer.is_ready(self._useful_each, more_tasks)

    def _begin(self) -> None:
        number, task = self._curriculum.begin()
        self._buffer.begin(number)
        stored = self._stored.pop(number, None)
        if stored is not None:
            self._metrics.count_from_log()
            self._put(number, *stored)
            return
        asked = range(self._members.num_asked)
        views = [self._paced.new_view(self._sampler) for _ in asked]
        running = self._running[number] = _Running(number, task, views)
        for index in asked:
            self._num_sessions += self._num_slots(number, index)
            running.sessions[index] = start_watched(self._episode(running, index), self._fail)

    async def _episode(self, running: _Running, index: int) -> None:
        view = running.views[index]
        try:
            episode = await self._members.play(running.task, running.number, index, view)
            on_counted = functools.partial(self._add_member, running, index, episode)
            waits = self._paced.hold_back(view, on_counted)
        finally:
            view.end()
        if self._log is not None and not waits:
            on_counted()
            self._advance()

    def _guard(self, callback: Callable[[], None]) -> None:
        """Runs a callback for the schedule: its error is the collector's and must not stop the engine."""
        try:
            callback()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Makes `collect` raise the error."""
        self._failure = self._failure or error
        self._trainer_waits.clear()
        self._changed.set()

    # ---- members and groups ---------------------------------------------------------------------

    def _add_member(self, running: _Running, index: int, episode: ForkedEpisode) -> None:
        """Adds a finished member to its group; one that was aborted is ignored."""
        if running.sessions.pop(index, None) is None:
            return
        self._num_sessions -= self._num_slots(running.number, index)
        running.members[index] = episode
        self._metrics.add_episode(episode)
        if self._buffer.is_waiting(running.number):
            self._metrics.count_carried()
            self._store(running)
        elif not running.sessions or running.num_graded >= self._config.group_size:
            self._complete(running)

    def _complete(self, running: _Running) -> None:
        """Finishes a group that has enough members, unless late members could give it a signal that it lacks.

        It always waits for the forked member, whose episode takes longer than all others.
        """
        if running.sessions and self._config.stragglers == "abort":
            self._abort_late(running)
        if any(self._members.is_forked(running.number, index) for index in running.sessions):
            return
        if running.sessions and signal_of(self._group(running), self._config) is Signal.NONE:
            return
        self._store(running)

    def _store(self, running: _Running) -> None:
        """Stores the group durably, and only then adds it to the buffer."""
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
            self._abort_late(running)

    def _abort_late(self, running: _Running) -> None:
        """Ends the members that have not finished, except a forked one."""
        late = [n for n in running.sessions if not self._members.is_forked(running.number, n)]
        if late:
            rewards = (episode.trajectory.reward for episode in running.members.values())
            self._metrics.record_late_gap([reward.task for reward in rewards if reward is not None])
        for index in late:
            session = running.sessions.pop(index)
            self._metrics.count_aborted(running.views[index].num_tokens)
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

    # ---- after a step's groups are chosen -------------------------------------------------------

    def _resolve(self, popped: StepGroups) -> None:
        """Updates the curriculum: the step's groups are resolved, whatever happens in training."""
        resolved = [*popped.trained, *popped.dropped, *popped.stale]
        self._curriculum.resolve((unit.number, unit.group) for unit in resolved)
        useful = sum(unit.num_task for unit in resolved)
        if resolved:
            share = useful / sum(len(unit.groups) for unit in resolved)
            self.state.useful_share = update_share(self.state.useful_share, share)
        for unit in popped.stale:
            self._metrics.add_stale(unit.group)


@contextlib.contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Makes Python's cyclic garbage collector run less often.

    Objects live as long as their session, so a collection frees next to nothing, and its cost grows with the
    number of sessions: with thousands it took a third of the time.
    """
    before = gc.get_threshold()
    gc.set_threshold(20_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def read_stored_groups(log: TrajectoryLog, state: CollectorState, min_step: int) -> StoredGroups:
    """Stored groups by task number, of the numbers that `state` has as neither trained on nor dropped.

    Groups are stored in the order in which they finished: once all of a part was sampled by versions before
    `min_step`, earlier parts are too old to be trained on and are not read. Members of one group that were
    stored one by one are joined; a fork's group is returned with its task's, in whose part it is stored.
    Raises StoreError on damage.
    """
    pending = set(state.pending)
    tasks: dict[int, Group] = {}
    forks: dict[int, Group] = {}
    for name in reversed(log.part_names()):
        groups = [group for group in log.read_part(name) if group.members]
        steps = [step for group in groups for step in _steps(group)]
        if steps and max(steps) < min_step:  # a part without sampled tokens has no age
            break
        for group in groups:
            number = group.members[0].id.group
            if number in pending or number >= state.next_task:
                found = forks if group.kind == "fork" else tasks
                later = found[number].members if number in found else ()
                members = sorted((*group.members, *later), key=lambda member: member.id.index)
                found[number] = replace(group, members=tuple(members))
    return {number: (group, forks.get(number)) for number, group in tasks.items()}


def _steps(group: Group) -> list[int]:
    """Steps of all policy versions that sampled the group."""
    spans = (span for m in group.members for segment in m.segments for span in segment.version_spans)
    return [span.version.step for span in spans]
