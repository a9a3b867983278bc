"""The asynchronous RL benchmark at small size: its modes differ as intended."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import async_rl
import async_rl_real
import common
import pytest
from async_rl_simulation import Machine, simulate
from benchmarks.simulation.rollout import SessionShapes, lognormal_sigma

SMALL = Machine(8, 320.0, 2000.0, 0.5, SessionShapes(turns_median=4.0, message_tokens_median=24.0))


def test_the_same_simulation_gives_the_same_outcome() -> None:
    rl = {"num_steps": 3, "groups_per_step": 2, "group_size": 4, "max_staleness": 2}
    first, second = simulate(SMALL, rl, 64), simulate(SMALL, rl, 64)
    assert (first.virtual_s, first.turns, first.trained) == (second.virtual_s, second.turns, second.trained)
    assert max(first.lags) <= 2


def test_asynchronous_steps_waste_less_of_the_engine_than_those_in_turns() -> None:
    rl = {"num_steps": 4, "groups_per_step": 2, "group_size": 4}
    in_turns, at_once = simulate(SMALL, rl, 64), simulate(SMALL, rl | {"max_staleness": 4}, 64)
    assert max(in_turns.lags) == 0
    assert at_once.engine_busy_share > 1.2 * in_turns.engine_busy_share
    assert at_once.trained / at_once.virtual_s > 1.2 * in_turns.trained / in_turns.virtual_s


def test_tools_have_the_tail_that_was_asked_for() -> None:
    shapes = SessionShapes(tool_median_s=2.0, tool_p99_over_median=10.0)
    times = sorted(
        second for number in range(600) for second in shapes.draw(shapes.task(number), number, 0).tool_s
    )
    assert times[len(times) // 2] == pytest.approx(2.0, rel=0.1)
    assert times[int(len(times) * 0.99)] == pytest.approx(20.0, rel=0.25)
    assert lognormal_sigma(10.0) == pytest.approx(0.99, abs=0.01)


def test_the_chart_is_drawn_and_the_same_twice(tmp_path: Path) -> None:
    rows = [{"trainer_wait_s": 3.0, "trainer_train_s": 1.0}, {"trainer_wait_s": 1.0, "trainer_save_s": 0.5}]
    for name in "ab":
        async_rl_real.draw(tmp_path / f"{name}.svg", {"sync": rows, "async": rows[:1]})
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "seconds of the trainer" in (tmp_path / "a.svg").read_text()


def test_figures_of_other_benchmarks_are_taken_up_with_their_commits(tmp_path: Path) -> None:
    chaos = {"chaos_kills": 20.0, "prompts_lost": 0.0, "prompts_repeated": 0.0, "wall_s": 9.0}
    (tmp_path / "chaos.json").write_text(json.dumps({"figures": chaos, "commit": "abc"}))
    target = tmp_path / "async_rl.json"
    common.merge_result(target, ["simulated"], {"async_vs_sync_trajectories": 3.0}, {})
    async_rl.merge_other_results(target)
    common.merge_result(target, ["real"], {"async_vs_sync_real_run": 1.5}, {})
    result = json.loads(target.read_text())
    assert result["figures"] == {
        "async_vs_sync_trajectories": 3.0,
        "async_vs_sync_real_run": 1.5,
        "chaos_kills": 20.0,
        "prompts_lost": 0.0,
        "prompts_repeated": 0.0,
    }
    assert result["parts"]["chaos"] == {"commit": "abc"}
    assert set(result["parts"]) == {"simulated", "real", "chaos"}


def test_weights_that_travel_beside_the_next_step_hold_nobody_up() -> None:
    slow = replace(SMALL, trainer_tokens_per_s=300.0, stage_s=20.0)
    rl = {"num_steps": 5, "groups_per_step": 2, "group_size": 4, "max_staleness": 3}
    in_turn = simulate(slow, rl | {"overlap_publication": False}, 64)
    overlapped = simulate(slow, rl, 64)
    assert max(overlapped.lags) <= 3
    assert overlapped.trained / overlapped.virtual_s > 1.1 * in_turn.trained / in_turn.virtual_s
