import asyncio
import math
from pathlib import Path

import pytest

from etude.config import RewardConfig
from etude.controller.local import LocalHandle
from etude.controller.reinforcement import Validation
from etude.errors import InfrastructureError
from etude.records import RewardBreakdown, Status, Trajectory
from etude.rollout.collect import CollectorState
from etude_quickstart.memory_backend import MemoryBackend
from tests.controller.looping import World
from tests.environment.playing import FAILS, SOLVES
from tests.fakes.faulty_sandbox import FaultyBackend
from tests.store.builders import make_trajectory


def test_each_step_samples_keeps_trains_publishes_and_saves(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.run(2) == 2
    assert world.events == [
        "publish 0", "serve 0",
        "train 2", "publish 1", "serve 1", "saved 1",
        "train 2", "publish 2", "serve 2", "saved 2",
    ]  # fmt: skip
    assert len(world.log) == 8
    assert [group.id for group in world.log.read()] == ["run/g0", "run/g1", "run/g2", "run/g3"]


def test_routes_are_let_go_once_they_are_trained_on(tmp_path: Path) -> None:
    world = World(tmp_path, play=lambda session: SOLVES)
    world.run(2)
    assert len(world.log) >= 8
    assert len(world.blobs) == 0


def test_the_state_to_save_is_that_of_the_last_step_trained(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.loop.collector_state["next_task"] == 0
    world.run(3)
    state = world.loop.collector_state
    assert (state["next_task"], state["useful_share"], state["pending"]) == (6, 1.0, [])


def test_a_resumed_loop_trains_on_the_tasks_that_an_undisturbed_one_would(tmp_path: Path) -> None:
    whole = World(tmp_path / "a")
    whole.run(3)
    first = World(tmp_path / "b")
    first.run(1)
    second = World(tmp_path / "b")
    second.collector.state = CollectorState(**dict(first.loop.collector_state))
    second.loop.first_step = 1
    assert second.run(3) == 3
    assert first.trainer.trained + second.trainer.trained == whole.trainer.trained
    assert [s.id for s in second.log.summaries()] == [s.id for s in whole.log.summaries()]


def test_what_was_collected_and_not_trained_on_is_trained_on_and_not_kept_twice(tmp_path: Path) -> None:
    killed = World(tmp_path)
    killed.run(2)
    again = World(tmp_path)
    again.run(3)
    assert len(again.log) == 12
    assert len({s.id for s in again.log.summaries()}) == 12
    assert again.trainer.trained[:2] == killed.trainer.trained


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_stop_ends_the_loop_between_two_steps(steps: int, tmp_path: Path) -> None:
    world = World(tmp_path, stop_after=steps)
    assert world.run(5) == steps
    assert len(world.log) == 4 * steps, "nothing is collected that is not trained on"
    assert world.events[-1] == (f"saved {steps}" if steps else "serve 0")


def test_no_steps_only_bring_the_weights_into_service(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.run(0) == 0
    assert world.events == ["publish 0", "serve 0"]


def test_the_worst_parity_is_reported(tmp_path: Path) -> None:
    world = World(tmp_path, parity=[0.25, 0.5, 0.125])
    world.run(3)
    assert world.loop.parity == {"k3": 0.25, "max_abs_dlogp": 0.5}


def test_a_step_without_finite_parity_leaves_a_report_that_can_be_written(tmp_path: Path) -> None:
    world = World(tmp_path, parity=[math.inf, 0.5, math.nan])
    world.run(3)
    assert world.loop.parity == {"k3": 0.25, "max_abs_dlogp": 0.5}


def test_validation_decides_on_the_weight_that_later_groups_and_a_resumed_loop_have(tmp_path: Path) -> None:
    """Two looks at four tasks: all solved at a price, then half of them for nothing."""
    dear, free = (RewardBreakdown(1.0, {"length": -price}) for price in (0.1, 0.0))
    looks = [[dear] * 4, [free, free, RewardBreakdown(0.0), RewardBreakdown(0.0)]]

    async def play() -> list[Trajectory]:
        rewards = looks.pop(0)
        return [make_trajectory(n, reward=reward) for n, reward in enumerate(rewards)]

    reward = RewardConfig.model_validate({"price": {"validate_every": 2}})
    world = World(tmp_path, validation=Validation(play, reward))
    world.run(4)
    assert [group.price_weight for group in world.log.read()] == [1.0] * 4 + [0.5] * 4
    state = CollectorState(**dict(world.loop.collector_state))
    assert (state.price.weight, state.price.pass_rate) == (0.5, 0.5)
    rows = [row for row in world.metrics.rows if row["kind"] == "price"]
    assert [(row["step"], row["validation_pass_rate"], row["price_weight"]) for row in rows] == [
        (0, 1.0, 1.0),
        (2, 0.5, 0.5),
    ]


def test_figures_of_a_step_tell_what_was_sampled_and_dropped(tmp_path: Path) -> None:
    def play(session_id: str):
        group, _, index = session_id.partition("~")[0].rpartition("/g")[2].partition("/")
        if group == "0":
            return SOLVES if int(index) % 2 else FAILS
        return SOLVES if group == "1" else FAILS

    world = World(tmp_path, play=play, groups_per_step=3)
    world.run(1)
    row, times = world.metrics.rows
    assert (times["kind"], times["step"]) == ("utilisation", 1)
    assert {name for name in times if name.startswith("trainer_")} == {
        "trainer_publish_s", "trainer_wait_s", "trainer_train_s", "trainer_save_s"
    }  # fmt: skip
    assert (row["kind"], row["step"]) == ("rl", 1)
    assert (row["trained_groups"], row["dropped_all_passed"], row["dropped_all_failed"]) == (1.0, 1.0, 1.0)
    assert row["episodes"] == 6.0
    assert row["pass_rate"] == pytest.approx(0.5)
    assert row["turns"] == 4.0
    assert row["infrastructure_failures"] == 0.0
    assert row["wall_s"] == 1.5
    assert world.observer.advances[0][:2] == ("rl", 1)


def test_failures_of_ours_are_counted_and_the_step_goes_on(tmp_path: Path) -> None:
    backend = FaultyBackend(MemoryBackend(), {"probes": 3})
    world = World(tmp_path, backend=backend, play=lambda session: SOLVES)
    world.run(1)
    failed = [s for s in world.log.summaries() if s.status is Status.INFRASTRUCTURE]
    assert world.metrics.rows[0]["infrastructure_failures"] == len(failed)
    assert all(summary.reward is None for summary in failed)


def test_when_most_sessions_fail_through_us_the_run_ends_with_that_error(tmp_path: Path) -> None:
    world = World(tmp_path, backend=FaultyBackend(MemoryBackend(), {"create": 1_000}))
    with pytest.raises(InfrastructureError, match=r"4 of 4 sessions failed.*failed on purpose"):
        world.run(2)
    assert "train" not in " ".join(world.events)


def test_a_trainer_that_fails_ends_the_loop_with_its_own_error(tmp_path: Path) -> None:
    world = World(tmp_path)

    class Failing:
        def publish(self):
            return world.trainer.publish()

        def step(self, groups):
            raise ZeroDivisionError("a defect")

    world.loop._trainer = LocalHandle(Failing())
    with pytest.raises(ZeroDivisionError, match="a defect"):
        world.run(2)
    assert len(world.log) == 4, "what was collected is kept"


def test_a_loop_that_is_cancelled_leaves_no_session_open(tmp_path: Path) -> None:
    backend = FaultyBackend(MemoryBackend(), {})
    world = World(tmp_path, backend=backend)

    async def run() -> None:
        async def saved(step: int) -> None:
            running.cancel()

        running = asyncio.create_task(world.loop.run(100, saved))
        with pytest.raises(asyncio.CancelledError):
            await running

    world.observer.stage_begins("rl", 100)
    asyncio.run(run())
    assert backend.num_created == backend.num_killed
