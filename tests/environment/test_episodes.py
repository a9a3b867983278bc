import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from etude.agent import SessionLimits
from etude.config import RewardConfig, RunConfig
from etude.environment.episodes import EpisodeLimits
from etude.errors import SamplerError, TaskError
from etude.records import SampleChunk, SampleRequest, SamplingParams, Status, ToolCall, TrajectoryId
from etude.store.blobs import MemoryBlobs
from etude_quickstart.memory_backend import MemoryBackend
from tests.environment.playing import (
    FAILS,
    FINISH,
    MEND,
    READ,
    SOLVES,
    SPOIL,
    TASK,
    TEST,
    new_environment,
    run_episode,
    script_of,
    scripted,
)
from tests.fakes.faulty_sandbox import FaultyBackend
from tests.fakes.scripted import ScriptedSampler
from tests.sandbox.backends import with_backend


def test_a_solved_task_earns_one_and_leaves_nothing_behind() -> None:
    backend, blobs, sampler = MemoryBackend(), MemoryBlobs(), scripted(SOLVES)
    trajectory = run_episode(new_environment(backend, blobs), sampler)
    assert (trajectory.status, trajectory.attempt) == (Status.DONE, 0)
    assert trajectory.reward is not None
    assert trajectory.reward.total == trajectory.reward.task == 1.0
    assert set(trajectory.reward.terms) == {"malformed", "limit"}
    assert trajectory.facts["passed"] is True
    assert trajectory.facts["first_edit_right"] is True
    assert set(trajectory.timings) == {"sample_s", "tools_s", "grade_s"}
    (segment,) = trajectory.segments
    assert segment.routes is not None
    assert blobs.get(segment.routes).shape == (len(segment.tokens), 2, 2)
    assert not backend.live
    assert not sampler.open_sessions


def test_an_episode_in_a_real_sandbox_has_the_same_tokens_and_reward() -> None:
    in_memory = run_episode(new_environment(), scripted(SOLVES))

    async def play(backend):
        environment = new_environment(backend)
        return await environment.run(
            TASK, TrajectoryId("run", TASK.id, 0, 0, 0), scripted(SOLVES), (7, 1), SamplingParams()
        )

    real = with_backend("unisolated", play)
    assert real.reward == in_memory.reward
    assert real.segments[0].tokens.tolist() == in_memory.segments[0].tokens.tolist()
    assert real.image_digest == in_memory.image_digest


def test_what_stays_broken_earns_nothing() -> None:
    trajectory = run_episode(new_environment(), scripted(FAILS))
    assert trajectory.status is Status.DONE
    assert trajectory.reward is not None
    assert trajectory.reward.total == 0.0
    assert trajectory.facts["passed"] is False
    assert "test_tally" in trajectory.facts["verdict"]


def test_a_first_edit_counts_as_right_without_a_test_run_too() -> None:
    untested = run_episode(new_environment(), scripted([[READ], [MEND], [FINISH]]))
    assert untested.facts["first_edit_right"] is True
    second = run_episode(new_environment(), scripted([[READ], [SPOIL], [MEND], [FINISH]]))
    assert second.facts["passed"] is True
    assert second.facts["first_edit_right"] is False


def test_malformed_calls_cost_up_to_a_number() -> None:
    config = RewardConfig(malformed_penalty=0.125, malformed_at_most=2)
    for num_malformed, penalty in ((0, 0.0), (1, -0.125), (2, -0.25), (3, -0.25)):
        turns = [*[["<read_file>"]] * num_malformed, [READ], [MEND], [TEST], [FINISH]]
        trajectory = run_episode(new_environment(reward=config), scripted(turns))
        assert trajectory.reward is not None
        assert trajectory.reward.terms["malformed"] == penalty
        assert trajectory.reward.total == 1.0 + penalty


def test_running_into_a_limit_costs_but_the_work_counts() -> None:
    environment = new_environment(session=SessionLimits(max_turns=2), reward=RewardConfig(limit_penalty=0.25))
    trajectory = run_episode(environment, scripted([[READ], [MEND], [TEST]]))
    assert (trajectory.status, trajectory.cause) == (Status.LIMIT, "turns")
    assert trajectory.reward is not None
    assert trajectory.reward.task == 1.0
    assert trajectory.reward.total == 0.75


STAGES = {
    "sandbox creation": "create",
    "a tool that reads": "read",
    "a tool that writes": "write",
    "a test run": "tests",
    "the agent's diff": "final_diff",
    "hidden tests that enter": "write_many",
    "the hidden tests": "probes",
}


@pytest.mark.parametrize("operation", STAGES.values(), ids=STAGES.keys())
def test_a_failure_of_ours_is_retried_and_the_agent_does_not_feel_it(operation: str) -> None:
    backend = FaultyBackend(MemoryBackend(), {operation: 2})
    environment = new_environment(backend)
    trajectory = run_episode(environment, scripted(SOLVES))
    assert trajectory.status is Status.DONE
    assert trajectory.attempt == 2
    assert trajectory.reward is not None
    assert trajectory.reward.total == 1.0
    undisturbed = run_episode(new_environment(), scripted(SOLVES))
    assert trajectory.segments[0].tokens.tolist() == undisturbed.segments[0].tokens.tolist()
    assert (environment.times.num_infrastructure_failures, environment.times.num_episodes) == (2, 1)
    assert backend.num_killed == backend.num_created


@pytest.mark.parametrize("operation", STAGES.values(), ids=STAGES.keys())
def test_a_lasting_failure_of_ours_is_never_a_reward(operation: str) -> None:
    backend = FaultyBackend(MemoryBackend(), {operation: 3})
    environment, sampler = new_environment(backend), scripted(SOLVES)
    trajectory = run_episode(environment, sampler)
    assert trajectory.status is Status.INFRASTRUCTURE
    assert trajectory.reward is None
    assert trajectory.attempt == 2
    assert "failed on purpose" in trajectory.cause and operation in trajectory.cause
    assert environment.times.num_episodes == 0
    assert backend.num_killed == backend.num_created
    assert not sampler.open_sessions


def test_a_sampler_that_fails_is_asked_again_under_another_session() -> None:
    sampler = ScriptedSampler(script_of(_fails_in({"run/tally/e0/g0/0~0"})))
    trajectory = run_episode(new_environment(), sampler)
    assert (trajectory.status, trajectory.attempt) == (Status.DONE, 1)
    assert trajectory.reward is not None
    assert {request.session_id for request in sampler.requests} == {
        f"{trajectory.id}~0",
        f"{trajectory.id}~1",
    }
    assert {request.rng_key[:2] for request in sampler.requests} == {(7, 1)}


def test_a_sampler_that_never_works_is_an_infrastructure_failure() -> None:
    sampler = ScriptedSampler(script_of(_fails_in({f"run/tally/e0/g0/0~{attempt}" for attempt in range(3)})))
    backend = FaultyBackend(MemoryBackend(), {})
    trajectory = run_episode(new_environment(backend), sampler)
    assert (trajectory.status, trajectory.reward) == (Status.INFRASTRUCTURE, None)
    assert trajectory.cause.startswith("SamplerError")
    assert backend.num_killed == backend.num_created == 3


def test_an_agent_that_ends_its_own_sandbox_gets_an_outcome_not_a_retry() -> None:
    kill_server = ToolCall("run_command", {"command": "kill -9 $PPID; sleep 5"})
    turns = [[READ], [MEND], [kill_server], [FINISH]]

    async def play(backend):
        environment = new_environment(backend)
        return environment, await environment.run(
            TASK, TrajectoryId("run", TASK.id, 0, 0, 0), scripted(turns), (7, 1), SamplingParams()
        )

    environment, trajectory = with_backend("unisolated", play)
    assert trajectory.status is Status.AGENT_ERROR
    assert trajectory.reward is not None
    assert trajectory.reward.total == 0.0
    assert trajectory.attempt == 0
    assert environment.times.num_infrastructure_failures == 0


def test_a_task_that_cannot_be_graded_is_a_mistake_of_its_author() -> None:
    backend = MemoryBackend()
    with pytest.raises(TaskError, match="hidden_test_paths"):
        run_episode(new_environment(backend), scripted(SOLVES), replace(TASK, hidden_test_paths=()))
    assert not backend.live


def test_cancelling_an_episode_kills_its_sandbox_and_closes_its_session() -> None:
    backend = FaultyBackend(MemoryBackend(), {})
    sampler = _Endless()

    async def run() -> None:
        episode = asyncio.create_task(
            new_environment(backend).run(
                TASK, TrajectoryId("run", "tally", 0, 0, 0), sampler, (7,), SamplingParams()
            )
        )
        await sampler.asked.wait()
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode

    asyncio.run(run())
    assert backend.num_killed == backend.num_created == 1
    assert not sampler.open_sessions


def test_limits_come_from_the_configuration() -> None:
    config = RunConfig.model_validate(
        {
            "agent": {"max_turns": 3, "max_tokens": 200, "max_message_tokens": 20, "max_calls_per_turn": 2},
            "sandbox": {"test_timeout_s": 0.5, "command_timeout_s": 0.25, "memory_bytes": 32 << 20},
        }
    )
    limits = EpisodeLimits.from_config(config)
    assert limits.session == SessionLimits(3, 2, 200, 20)
    assert (limits.tools.test_timeout_s, limits.tools.command_timeout_s) == (0.5, 0.25)
    assert limits.sandbox.memory_bytes == 32 << 20


class _Endless(ScriptedSampler):
    """Never answers."""

    def __init__(self) -> None:
        super().__init__(script_of(lambda _: SOLVES))
        self.asked = asyncio.Event()

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        self.asked.set()
        await asyncio.Event().wait()
        async for chunk in super().stream(request):
            yield chunk


def _fails_in(sessions: set[str]):
    """Plays SOLVES, but fails at the second message of the given sessions."""

    def play(session_id: str):
        if session_id in sessions:
            raise SamplerError("out of order", field="engine")
        return SOLVES

    return play
