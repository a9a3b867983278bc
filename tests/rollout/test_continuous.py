"""The continuous collector over a simulated engine and sandboxes, with a trainer that only waits."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from benchmarks.simulation.rollout import SessionShapes, SimulatedEngine, SimulatedEnvironment, run_virtual

from etude.config import RlConfig
from etude.environment.episodes import Environment
from etude.environment.fork_groups import ForkedEpisode
from etude.environment.runners import EpisodeRequest
from etude.errors import StoreError
from etude.protocols import Sampler
from etude.records import Group, PolicyVersion, Status, Trajectory, WeightManifest
from etude.rollout import Collected, ContinuousCollector
from etude.rollout.buffer import StepGroups
from etude.rollout.collector_metrics import CollectorMetrics
from etude.rollout.continuous import read_stored_groups
from etude.rollout.curriculum import CollectorState
from etude.store.trajectories import TrajectoryLog
from tests.environment.playing import renderer
from tests.store.builders import make_trajectory

SHAPES = SessionShapes(seed=1, turns_median=3.0, message_tokens_median=20.0, unsolvable_share=0.0)


@dataclass
class Played:
    """What a run gave."""

    batches: list[Collected] = field(default_factory=list[Collected])
    states: list[CollectorState] = field(default_factory=list[CollectorState])
    numbers: list[list[int]] = field(default_factory=list[list[int]])
    """Of the groups trained on, by step."""
    environment: Any = None
    elapsed_s: float = 0.0

    @property
    def trained(self) -> list[int]:
        return [number for step in self.numbers for number in step]


def number_of(group: Group) -> int:
    return group.members[0].id.group


def play(
    path: Path,
    num_steps: int = 6,
    train_s: float = 20.0,
    first_step: int = 0,
    state: CollectorState | None = None,
    shapes: SessionShapes = SHAPES,
    wrap: Callable[[SimulatedEnvironment], Any] = lambda environment: environment,
    stop_at_s: float | None = None,
    max_sessions: int = 1_000,
    **rl: Any,
) -> Played:
    """Steps until `num_steps`, or until everything is cut off at `stop_at_s`."""
    settings = {
        "max_staleness": 2, "groups_per_step": 3, "group_size": 4, "updates_per_step": 1, **rl
    }  # fmt: skip
    config = RlConfig.model_validate(settings)
    played = Played()

    async def run() -> None:
        environment = SimulatedEnvironment(shapes, renderer())
        played.environment = wrap(environment)
        engine = SimulatedEngine(environment.message, 16, 16 * 20.0)
        clock = asyncio.get_running_loop().time
        collector = ContinuousCollector(
            cast(Environment, played.environment), engine, shapes.task, config, "run", 3, max_sessions, clock
        )
        if state is not None:
            collector.state = CollectorState(**asdict(state))

        async def serve(step: int) -> None:
            version = PolicyVersion("run", step)
            await engine.stage(WeightManifest(version, (), "memory:"))
            await engine.activate(version)
            collector.on_weights_served(step)

        await serve(first_step)
        try:
            async with (
                asyncio.timeout(stop_at_s),
                collector.running(TrajectoryLog(path), first_step, num_steps),
            ):
                for step in range(first_step, num_steps):
                    batch = await collector.collect()
                    played.batches.append(batch)
                    after = CollectorState(**asdict(collector.state))
                    await asyncio.sleep(train_s)
                    played.states.append(after)
                    played.numbers.append([number_of(group) for group in batch.trained])
                    await serve(step + 1)
        except TimeoutError:
            assert stop_at_s is not None
        played.elapsed_s = clock()

    run_virtual(run())
    return played


def lags(played: Played, first_step: int = 0) -> list[int]:
    """Steps from each trained trajectory's oldest token to the version that it trained."""
    return [
        step - version.step
        for step, batch in enumerate(played.batches, first_step)
        for group in batch.trained
        for member in group.members
        if (version := member.oldest_version) is not None
    ]


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_the_bound_holds_for_every_trajectory_and_nothing_is_dropped_for_its_age(
    bound: int, tmp_path: Path
) -> None:
    played = play(tmp_path, max_staleness=bound)
    assert 0 < max(lags(played)) <= bound
    assert all(not batch.stale for batch in played.batches)
    assert all(batch.figures["left_out_share"] == 0.0 for batch in played.batches)
    assert all(len(batch.trained) >= 3 for batch in played.batches)


def test_sessions_go_on_over_an_exchange_of_weights(tmp_path: Path) -> None:
    played = play(tmp_path)
    spans = [
        {span.version.step for segment in member.segments for span in segment.version_spans}
        for batch in played.batches
        for group in batch.trained
        for member in group.members
    ]
    assert any(len(steps) > 1 for steps in spans)


@pytest.mark.slow
def test_sampling_and_training_overlap(tmp_path: Path) -> None:
    lockstep = play(tmp_path / "a", max_staleness=1, max_sessions=1)
    overlapping = play(tmp_path / "b", max_staleness=4)
    assert overlapping.elapsed_s < lockstep.elapsed_s / 2


def test_every_group_is_whole_and_stored_before_it_is_trained_on(tmp_path: Path) -> None:
    played = play(tmp_path)
    log = TrajectoryLog(tmp_path)
    for batch in played.batches:
        for group in (*batch.trained, *batch.dropped):
            assert len(group.members) == 4 and group.complete
            assert all(log.contains(member.id) for member in group.members)


def test_no_task_is_trained_on_twice_or_left_out(tmp_path: Path) -> None:
    played = play(tmp_path, num_steps=8)
    dropped = [number_of(group) for batch in played.batches for group in batch.dropped]
    resolved = played.trained + dropped
    assert len(resolved) == len(set(resolved))
    state = played.states[-1]
    assert sorted([*resolved, *state.pending]) == list(range(state.next_task))


def test_only_so_many_sessions_run_at_once(tmp_path: Path) -> None:
    played = play(tmp_path, max_sessions=8, max_staleness=4)
    assert played.environment.most_running == 8
    assert played.batches[-1].figures["blocked_by_slots_share"] > 0


def test_a_group_larger_than_all_slots_runs_alone(tmp_path: Path) -> None:
    played = play(tmp_path, num_steps=2, max_sessions=2)
    assert played.environment.most_running == 4


def test_two_runs_in_virtual_time_are_equal(tmp_path: Path) -> None:
    first, second = play(tmp_path / "a"), play(tmp_path / "b")
    assert first.numbers == second.numbers
    assert first.elapsed_s == second.elapsed_s


# ---- stragglers ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_with_more_members_than_needed_the_late_ones_are_aborted_and_counted(tmp_path: Path) -> None:
    plain = play(tmp_path / "a")
    played = play(tmp_path / "b", extra_members=2)
    groups = [group for batch in played.batches for group in batch.trained]
    assert {group.expected for group in groups} == {6}
    assert {len(group.members) for group in groups} == {4}
    aborted = sum(batch.figures["stragglers_aborted"] for batch in played.batches)
    assert aborted >= 2 * len(groups)
    figures = played.batches[-1].figures
    assert figures["left_out_share"] == pytest.approx(2 / 6, abs=0.08)
    assert sum(figures[f"left_out_decile{tenth}"] for tenth in range(1, 11)) > 0
    mean = {
        name: sum(m.num_sampled_tokens for g in one for m in g.members) / sum(len(g.members) for g in one)
        for name, one in (("all", [g for b in plain.batches for g in b.trained]), ("early", groups))
    }
    assert mean["early"] < mean["all"], "the bias that the deciles are there to show"
    assert all(-1 <= batch.figures["late_verdict_gap"] <= 1 for batch in played.batches)
    assert "late_verdict_gap" not in plain.batches[0].figures


def test_what_was_aborted_is_guessed_from_how_late_members_did() -> None:
    metrics = CollectorMetrics(lambda: 0.0)
    metrics.record_late_gap([1.0, 1.0, 0.0, 0.0])
    metrics.record_late_gap([0.0, 1.0, 0.0])
    metrics.record_late_gap([1.0])
    assert metrics.pop_figures(StepGroups(), with_forks=False)["late_verdict_gap"] == -0.5
    assert "late_verdict_gap" not in metrics.pop_figures(StepGroups(), with_forks=False)


def test_stragglers_that_are_carried_join_a_group_that_still_waits(tmp_path: Path) -> None:
    played = play(tmp_path, extra_members=2, stragglers="carry", max_staleness=4, train_s=200.0)
    assert sum(batch.figures["stragglers_carried"] for batch in played.batches) > 0
    sizes = {len(group.members) for batch in played.batches for group in batch.trained}
    assert sizes & {5, 6} and max(sizes) <= 6
    log = TrajectoryLog(tmp_path)
    members = [m for batch in played.batches for group in batch.trained for m in group.members]
    assert all(log.contains(member.id) for member in members)
    assert len({member.id for member in members}) == len(members)


class FailingAt:
    """An environment whose sessions of one index the infrastructure fails, or which has a defect."""

    def __init__(self, inner: SimulatedEnvironment, index: int, error: Exception | None = None) -> None:
        self._inner, self._index, self._error = inner, index, error
        self.running = 0

    async def play(self, request: EpisodeRequest, sampler: Sampler) -> ForkedEpisode:
        self.running += 1
        try:
            episode = await self._inner.play(request, sampler)
        finally:
            self.running -= 1
        if request.identity.index != self._index:
            return episode
        if self._error is not None:
            raise self._error
        return ForkedEpisode(replace(episode.trajectory, status=Status.INFRASTRUCTURE, reward=None))


@pytest.mark.slow
def test_a_member_that_we_failed_does_not_count_towards_a_group_s_size(tmp_path: Path) -> None:
    played = play(tmp_path, extra_members=1, wrap=lambda inner: FailingAt(inner, 0))
    groups = [group for batch in played.batches for group in batch.trained]
    for group in groups:
        assert sum(member.reward is not None for member in group.members) == 4
    plain = play(tmp_path / "plain", wrap=lambda inner: FailingAt(inner, 0))
    assert {len(g.members) for b in plain.batches for g in b.trained} == {4}


def test_a_defect_in_a_session_comes_out_as_it_was_raised_and_nothing_is_left_running(
    tmp_path: Path,
) -> None:
    environments: list[FailingAt] = []

    def wrap(inner: SimulatedEnvironment) -> FailingAt:
        environments.append(FailingAt(inner, 2, ZeroDivisionError("a defect")))
        return environments[0]

    with pytest.raises(ZeroDivisionError, match="a defect"):
        play(tmp_path, wrap=wrap)
    assert environments[0].running == 0


# ---- staleness ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_with_masking_the_trainer_waits_for_nobody_and_old_tokens_are_left_out(tmp_path: Path) -> None:
    slow = SessionShapes(seed=1, turns_median=6.0, tool_p99_over_median=60.0, unsolvable_share=0.0)
    waits = play(tmp_path / "a", shapes=slow, max_staleness=1, train_s=1.0, num_steps=10)
    masks = play(tmp_path / "b", shapes=slow, max_staleness=1, train_s=1.0, num_steps=10, stale="mask")
    assert max(lags(waits)) <= 1 and max(lags(masks)) <= 1
    assert sum(batch.figures["stale_masked_tokens"] for batch in masks.batches) > 0
    assert sum(batch.figures["stale_masked_tokens"] for batch in waits.batches) == 0
    assert sum(batch.figures["waiting_for_oldest_share"] for batch in waits.batches) > 0
    assert masks.elapsed_s < waits.elapsed_s


# ---- restarts -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stop_at_s", [30.0, 75.0, 140.0, 200.0])
def test_after_a_kill_nothing_is_lost_repeated_or_skipped(stop_at_s: float, tmp_path: Path) -> None:
    """Killed while groups are under way, waiting and in training; resumed from the last step's state."""
    undisturbed = play(tmp_path / "whole", num_steps=8)
    killed = play(tmp_path / "killed", num_steps=8, stop_at_s=stop_at_s)
    assert len(killed.numbers) < 8
    state = killed.states[len(killed.numbers) - 1] if killed.numbers else CollectorState()
    before = {(m.id, len(m.segments[0].tokens)) for m in stored(tmp_path / "killed")}
    resumed = play(
        tmp_path / "killed", num_steps=8, first_step=len(killed.numbers), state=state
    )  # fmt: skip
    trained = killed.trained + resumed.trained
    batches = killed.batches[: len(killed.numbers)] + resumed.batches
    dropped = [number_of(group) for batch in batches for group in batch.dropped]
    assert len(trained + dropped) == len(set(trained + dropped))
    last = resumed.states[-1]
    assert sorted([*trained, *dropped, *last.pending]) == list(range(last.next_task))
    assert len(trained) >= 24 and len(undisturbed.trained) >= 24
    reused = sum(batch.figures["groups_from_log"] for batch in resumed.batches)
    assert reused > 0 or not before, "what was collected is trained on, not sampled again"
    after = [(m.id, len(m.segments[0].tokens)) for m in stored(tmp_path / "killed")]
    assert len({identity for identity, _ in after}) == len(after), "nothing is stored twice"
    assert before <= set(after)


def stored(path: Path) -> list[Trajectory]:
    return [member for group in TrajectoryLog(path).read() for member in group.members]


def test_what_was_stored_too_long_ago_is_sampled_again_or_left_out(tmp_path: Path) -> None:
    first = play(tmp_path, num_steps=2)
    state = first.states[-1]
    assert state.pending
    later = play(tmp_path, num_steps=12, first_step=10, state=state)
    assert all(number not in later.trained for number in first.trained)
    assert max(lags(later, 10)) <= 2


def test_a_group_of_which_nothing_was_sampled_does_not_hide_those_stored_before_it(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path)
    failed = replace(make_trajectory(group=2, status=Status.INFRASTRUCTURE, reward=None), segments=())
    for number, member in enumerate((make_trajectory(step=4), make_trajectory(group=1, step=8), failed)):
        log.append([Group(f"run/g{number}", "task", 1, (member,))])
    assert set(read_stored_groups(log, CollectorState(), 7)) == {1, 2}


# ---- on a reproducible schedule -----------------------------------------------------------------


class PacedEngine(SimulatedEngine):
    """A simulated engine that tells a Pace of sessions that were closed, at whole multiples of 2 s."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.pace: Any = None
        self._closed: list[str] = []
        self.failure: Exception | None = None

    def set_pace(self, pace: Any) -> bool:
        self.pace = pace
        return True

    def close(self, session_id: str) -> None:
        super().close(session_id)
        self._closed.append(session_id)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(2.0)
            closed, self._closed = sorted(self._closed), []
            for session_id in closed:
                self.pace.on_session_ended(session_id)
            if closed:
                await self.pace.before_next_step()


async def paced_steps(
    log: TrajectoryLog,
    num_steps: int,
    stop_engine_s: float = 1e9,
    wrap: Callable[[SimulatedEnvironment], Any] = lambda environment: environment,
    **rl: Any,
) -> list[list[int]]:
    """Numbers trained on by step, with everything decided in turns."""
    environment = SimulatedEnvironment(SHAPES, renderer())
    engine = PacedEngine(environment.message, 16, 16 * 20.0)
    settings = {"max_staleness": 2, "groups_per_step": 3, "group_size": 4, "extra_members": 1, **rl}
    config = RlConfig.model_validate(settings)
    clock = asyncio.get_running_loop().time
    collector = ContinuousCollector(wrap(environment), engine, SHAPES.task, config, "run", 3, 1_000, clock)
    await engine.stage(WeightManifest(PolicyVersion("run", 0), (), "memory:"))
    await engine.activate(PolicyVersion("run", 0))
    collector.on_weights_served(0)
    numbers: list[list[int]] = []
    async with collector.running(log, 0, num_steps):
        driver = asyncio.create_task(engine.run())
        asyncio.get_running_loop().call_later(
            stop_engine_s, lambda: (driver.cancel(), engine.pace.on_schedule_ended())
        )
        try:
            for step in range(num_steps):
                batch = await collector.collect()
                assert clock() % 2.0 == pytest.approx(0.0, abs=1e-3) or clock() > stop_engine_s
                numbers.append([number_of(group) for group in batch.trained])
                version = PolicyVersion("run", step + 1)
                await engine.stage(WeightManifest(version, (), "memory:"))
                await engine.activate(version)
                collector.on_weights_served(step + 1)
        finally:
            driver.cancel()
    return numbers


def test_on_a_paced_schedule_steps_are_taken_in_turns_only(tmp_path: Path) -> None:
    numbers = run_virtual(paced_steps(TrajectoryLog(tmp_path), 4))
    assert len(numbers) == 4 and all(len(step) >= 3 for step in numbers)


def test_where_the_schedule_comes_to_its_end_episodes_still_arrive(tmp_path: Path) -> None:
    assert len(run_virtual(paced_steps(TrajectoryLog(tmp_path), 4, 20.0))) == 4


def test_a_full_disk_ends_the_run_with_its_own_error_and_not_the_engine(tmp_path: Path) -> None:
    class FullLog(TrajectoryLog):
        def append(self, groups: Any) -> int:
            raise StoreError("could not be written: no space left on device", field="part")

    with pytest.raises(StoreError, match="no space left"):
        run_virtual(paced_steps(FullLog(tmp_path), 2))
