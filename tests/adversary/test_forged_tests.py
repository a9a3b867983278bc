"""Verdicts forged in tests that compare inside the sandbox: each kind on three tasks, and none is paid."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from etude.config import RewardConfig
from etude.environment.grading import Judge, Verdict
from etude.environment.rewards import Evidence, compute_reward
from etude.environment.twins import Twins
from etude.environment.verdicts import Grader
from etude.records import Status, Task
from etude.sandbox.interface import SandboxBackend
from tests.adversary.forging import BROKEN, FORGERIES, HELD_BEFORE, SOLUTION, TASKS, Forgery
from tests.sandbox.backends import with_backend

TIMEOUT_S = 2.0
OTHER_SOLUTIONS = {
    "another way": """
def solve(n):
    if n < 0:
        raise ValueError
    return min(n**2, 100) + max(n**2 - 100, 0) / 10
""",
    "with a memory": """
from functools import lru_cache

@lru_cache
def solve(n):
    if n < 0:
        raise ValueError("never")
    return n * n if n <= 10 else 90 + n * n / 10
""",
}


async def no_twins(task: Task) -> Twins:
    return Twins()


def verdicts_on(text: str, again: bool) -> list[Verdict]:
    """Of a submission on each task; `again`: whether what passes is run with changed expectations."""

    async def scenario(backend: SandboxBackend) -> list[Verdict]:
        judge, grader = Judge(backend, timeout_s=TIMEOUT_S), Grader(backend, timeout_s=TIMEOUT_S)
        changes = {"lib/target.py": text.encode()}
        twins_of = grader.find_twins if again else no_twins
        return [await judge.judge(task, changes, twins_of) for task in TASKS]

    return with_backend("local", scenario)


def rewards_of(verdicts: Sequence[Verdict]) -> list[float]:
    config = RewardConfig(partial_weight=0.5)
    seen = zip(TASKS, verdicts, strict=True)
    return [compute_reward(Evidence(task, Status.DONE, one, {}), config).task for task, one in seen]


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda forgery: forgery.name)
def test_a_forged_verdict_earns_nothing(forgery: Forgery) -> None:
    without, verdicts = verdicts_on(forgery.text, again=False), verdicts_on(forgery.text, again=True)
    paid = [one.passed for one in without]
    assert any(paid) is (forgery.name not in HELD_BEFORE), "else this shows nothing"
    assert not any(one.passed for one in verdicts)
    rewards = rewards_of(verdicts)
    assert [reward for reward, was_paid in zip(rewards, paid, strict=True) if was_paid] == [0.0] * sum(paid)


@pytest.mark.parametrize("text", [SOLUTION, *OTHER_SOLUTIONS.values()], ids=["reference", *OTHER_SOLUTIONS])
def test_an_honest_solution_earns_everything(text: str) -> None:
    assert rewards_of(verdicts_on(text, again=True)) == [1.0, 1.0, 1.0]


def test_the_broken_file_passes_nowhere() -> None:
    assert not any(one.passed for one in verdicts_on(BROKEN, again=False))


def test_there_are_more_than_thirty_kinds_and_each_has_its_name() -> None:
    names = {forgery.name for forgery in FORGERIES}
    assert len(names) == len(FORGERIES) == len({forgery.text for forgery in FORGERIES})
    assert len(names - HELD_BEFORE) >= 30
