"""What the training benchmark computes without running a peer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import training

sys.path.insert(0, str(Path(training.__file__).parent / "training_workers"))

import rl_task


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
