"""How benchmarks/forks.py compares two arms."""

from pathlib import Path

import forks


def test_rewards_are_compared_where_both_arms_have_sampled_as_many_tokens(tmp_path: Path) -> None:
    curves = {
        "plain": [[(0.0, 0.1), (80.0, 0.4), (100.0, 0.4)]],
        "forks": [[(0.0, 0.1), (90.0, 0.8), (150.0, 9.0)]],
    }
    rows = {name: [{"sampled_tokens": 200.0}] for name in curves}
    figures = forks.compare(rows, curves)
    assert figures["fork_vs_plain_reward"] == 2.0, "what came after the smaller budget is left out"
    short = {"plain": [[(0.0, 0.5), (60.0, 0.9)]] * 2, "entropy": [[(0.0, 0.25), (100.0, 0.9)]] * 2}
    figures = forks.compare({name: [{}] * 2 for name in short}, short)
    assert figures["entropy_vs_plain_reward"] == 0.25 / 0.9, "no step in the last quarter: the last before it"
    assert figures["entropy_minus_plain_reward_low"] == figures["entropy_minus_plain_reward"]
    forks.draw(tmp_path / "one.svg", curves)
    assert (tmp_path / "one.svg").stat().st_size > 0
