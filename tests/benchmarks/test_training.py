"""What the training benchmark computes without running a peer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import common
import pytest
from training_plot import draw_curves

import training

sys.path.insert(0, str(Path(training.__file__).parent / "training_workers"))

import rl_task

CURVES = {side: [[0.1, 0.2, 0.4], [0.2, 0.3, 0.5]] for side in ("ours", "invariant", "trl")}
"""Two seeds of three steps."""


def test_padding_is_counted_inside_attention_alone() -> None:
    assert training._padded_share([100, 100], [[[0, 1]]]) == 0.0
    assert 0.0 < training._padded_share([4000, 3900], [[[0, 1]]]) < 0.02
    assert training._padded_share([4000, 100], [[[0], [1]], [[], []]]) == 0.0


def test_gains_are_of_five_steps_against_five() -> None:
    assert training._gain({"rewards": [0.1] * 5 + [0.9] + [0.4] * 5}) == pytest.approx(0.3)


def test_warm_up_steps_are_not_timed() -> None:
    assert training._step_s({"times_s": [9.0, 9.0, 9.0, 1.0, 2.0, 3.0]}) == 2.0


def test_both_sides_of_the_rl_task_see_the_same_prompts_and_rewards() -> None:
    prompts = rl_task.prompts(3, 4, 256)
    assert prompts == rl_task.prompts(3, 4, 256) != rl_task.prompts(4, 4, 256)
    assert {len(prompt) for prompt in prompts} == {rl_task.PROMPT_TOKENS}
    assert all(2 <= token < 256 for prompt in prompts for token in prompt)
    assert rl_task.reward([0, 63, 64, 255], 256) == 0.5


def test_parts_measured_apart_come_together_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "training.json"
    common.merge_result(path, ["packing"], {"packing_waste": 0.02}, {})
    common.merge_result(path, ["rl"], {"rl_samples_vs_trl": 5.0}, {"curves": CURVES})
    common.merge_result(path, ["rl"], {"rl_samples_vs_trl": 6.0}, {})
    result = json.loads(path.read_text())
    assert result["figures"] == {"packing_waste": 0.02, "rl_samples_vs_trl": 6.0}
    assert result["peers"] == {"curves": CURVES}
    assert set(result["parts"]) == {"packing", "rl"}


def test_learning_curves_are_drawn_of_the_shapes_that_were_measured(tmp_path: Path) -> None:
    draw_curves(tmp_path / "one.svg", {"peers": {"curves_wide": CURVES}})
    draw_curves(tmp_path / "two.svg", {"peers": {"curves": CURVES, "curves_wide": CURVES}})
    one, two = ((tmp_path / name).read_text() for name in ("one.svg", "two.svg"))
    assert "GRPOTrainer" in one
    assert "64 samples" in one
    assert "8 samples of 256" not in one
    assert "8 samples of 256" in two


def test_the_limit_of_a_step_grows_with_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    roofline = common.Roofline(200.0, 100.0, 10.0)
    monkeypatch.setattr(training, "probe_roofline", lambda *_: roofline)
    assert training._limit_s(2000, 256) == pytest.approx(2 * training._limit_s(1000, 256))
    assert training._limit_s(1000, 256) > training._limit_s(1000, 32)
