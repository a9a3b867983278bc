import asyncio
from dataclasses import replace

import pytest

from etude.errors import InfrastructureError
from etude.evaluation import evaluate_policy
from etude.evaluation.suite import check_infrastructure
from etude.records import RewardBreakdown, Status
from etude_quickstart.memory_backend import MemoryBackend
from tests.environment.playing import FAILS, SOLVES, TASK, new_environment, script_of, scripted
from tests.fakes.faulty_sandbox import FaultyBackend
from tests.fakes.scripted import ScriptedSampler
from tests.store.builders import make_trajectory

TASKS = [replace(TASK, id=f"task-{number}") for number in range(5)]


def test_a_policy_is_judged_greedily_and_at_temperature_one() -> None:
    def play(session_id: str):
        name, task = session_id.split("/")[:2]
        return SOLVES if name.endswith("-greedy") or task in ("task-0", "task-3") else FAILS

    sampler = ScriptedSampler(script_of(play))
    evaluation = asyncio.run(evaluate_policy(new_environment(), sampler, TASKS, "before", 4, 2))
    assert evaluation.greedy["pass_rate"] == 1.0
    assert evaluation.sampled["pass_rate"] == pytest.approx(0.4)
    assert [t.facts["passed"] for t in evaluation.trajectories] == [True, False, False, True, False]
    assert [t.id.task for t in evaluation.trajectories] == [task.id for task in TASKS]
    assert evaluation.behaviour["turns"] == 4.0
    assert evaluation.to_json() == {"greedy": evaluation.greedy, "sampled": evaluation.sampled}
    temperatures = {
        r.params.temperature for r in sampler.requests if r.session_id.startswith("before-greedy")
    }
    assert temperatures == {0.0}
    assert {r.params.temperature for r in sampler.requests} == {0.0, 1.0}


def test_repeated_tasks_are_judged_by_whether_one_of_several_sessions_solves_them() -> None:
    def play(session_id: str):
        name, task, _, _, attempt = session_id.split("/")
        sample = int(attempt.partition("~")[0])
        return SOLVES if name.endswith("-sampled") and task == "task-1" and sample == 2 else FAILS

    sampler = ScriptedSampler(script_of(play))
    evaluation = asyncio.run(evaluate_policy(new_environment(), sampler, TASKS, "before", 4, 8, 3, 2))
    assert evaluation.pass_at_k == {"pass_at_3": 0.5}
    assert (evaluation.sampled["n"], evaluation.sampled["pass_rate"]) == (5, 0.0)
    assert len({r.session_id for r in sampler.requests}) == 5 + 5 + 2 * 2


def test_some_failures_of_ours_are_counted_and_change_nothing_else() -> None:
    backend = FaultyBackend(MemoryBackend(), {"probes": 2})
    environment = new_environment(backend, max_attempts=1)
    evaluation = asyncio.run(evaluate_policy(environment, scripted(SOLVES), TASKS, "eval", 4, 8))
    assert evaluation.greedy["infrastructure_failures"] == 2
    assert (evaluation.greedy["pass_rate"], evaluation.greedy["n"]) == (1.0, 3)
    assert (evaluation.sampled["pass_rate"], evaluation.sampled["n"]) == (1.0, 5)


def test_an_evaluation_that_mostly_failed_is_none() -> None:
    backend = FaultyBackend(MemoryBackend(), {"create": 100})
    environment = new_environment(backend, max_attempts=1)
    with pytest.raises(InfrastructureError, match=r"5 of 5 sessions failed.*failed on purpose"):
        asyncio.run(evaluate_policy(environment, scripted(SOLVES), TASKS, "eval", 4, 8))


def test_half_may_fail_and_no_more() -> None:
    good = make_trajectory(reward=RewardBreakdown(0.0))
    bad = make_trajectory(status=Status.INFRASTRUCTURE, reward=None, cause="SandboxError: died")
    check_infrastructure([])
    check_infrastructure([good, bad])
    with pytest.raises(InfrastructureError, match=r"2 of 3 sessions failed.*SandboxError: died.*fix: "):
        check_infrastructure([good, bad, bad])
