"""Tasks with steps: each is verified before the user asks for the next, and their rewards become one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from etude.agent import SessionLimits
from etude.environment.checking import check_tasks, judge_nothing, judge_solution
from etude.environment.fork_groups import ForkPlan, SiblingSpec
from etude.environment.grading import Verdict
from etude.environment.history import SessionTurn, StepEnded
from etude.environment.origins import Origin
from etude.environment.replay import Replayer, replay_session
from etude.environment.runners import EpisodeRequest
from etude.environment.server.requests import find_task
from etude.environment.sessions import EnvironmentSession
from etude.environment.steps import StepRun, combine
from etude.environment.verdicts import Grader
from etude.environment.wire import task_document
from etude.errors import UserError
from etude.kit.tasks import finish_all
from etude.records import (
    SamplingParams,
    Status,
    Task,
    TaskStep,
    TestScript,
    ToolCall,
    Trajectory,
    TrajectoryId,
)
from etude.sandbox.interface import SandboxBackend
from etude.tasks.harbor import read_harbor
from etude_quickstart.memory_backend import MemoryBackend
from tests.environment.playing import FINISH, Turn, new_environment, renderer, script_of
from tests.environment.server.serving import new_host, new_services
from tests.fakes.scripted import ScriptedSampler
from tests.sandbox.backends import with_backend
from tests.tasks.harbor_tasks import Files, write_task

TOML = """[[steps]]
name = "greet"
[[steps]]
name = "part"
"""
LINE = 'n=$(grep -cx %s words.txt); echo "{\\"reward\\": $n, \\"lines\\": $(wc -l < words.txt)}" '
TEST = "#!/bin/sh\n" + LINE + "> /logs/verifier/reward.json\n"
FILES: Files = {
    "environment/workspace/words.txt": "a\nb\n",
    "steps/greet/instruction.md": "Write hello in line 1.\n",
    "steps/greet/tests/test.sh": TEST % "hello",
    "steps/greet/solution/solve.sh": "#!/bin/sh\nsed -i 1s/.*/hello/ words.txt\n",
    "steps/part/instruction.md": "Now write bye in line 2.\n",
    "steps/part/tests/test.sh": "#!/bin/sh\ngrep -qx ready state.txt || exit 1\n" + (TEST % "bye")[10:],
    "steps/part/solution/solve.sh": "#!/bin/sh\nsed -i 2s/.*/bye/ words.txt\n",
    "steps/part/workdir/state.txt": "new\n",
    "steps/part/workdir/setup.sh": "sed -i s/new/ready/ state.txt\n",
}
IDENTITY = TrajectoryId("run", "words", 0, 0, 0)


def edit(line: int, text: str) -> ToolCall:
    return ToolCall("edit_lines", {"path": "words.txt", "start": str(line), "text": text})


GREET, PART = edit(1, "hello"), edit(2, "bye")
STATE = ToolCall("read_file", {"path": "state.txt"})
SOLVES: tuple[Turn, ...] = ((GREET,), (FINISH,), (STATE,), (PART,), (FINISH,))


def write_steps(directory: Path, toml: str = TOML, files: Files | None = None) -> Task:
    return read_harbor(write_task(directory, toml=toml, files={**FILES, **(files or {})}))


def play(task: Task, turns: Sequence[Turn], limits: SessionLimits | None = None) -> Trajectory:
    sampler = ScriptedSampler(script_of(lambda _: turns), route_shape=(2, 2))

    async def scenario(backend: SandboxBackend) -> Trajectory:
        environment = new_environment(backend, session=limits)
        return await environment.run(task, IDENTITY, sampler, (7, 1), SamplingParams())

    return with_backend("local", scenario)


def earned(trajectory: Trajectory) -> tuple[float, str | None]:
    assert trajectory.reward is not None
    return trajectory.reward.task, trajectory.facts["verdict"]


def test_the_next_step_is_the_users_next_words_in_the_same_session_and_sandbox(tmp_path: Path) -> None:
    trajectory = play(write_steps(tmp_path), SOLVES)
    assert earned(trajectory) == (1.0, None)
    assert (trajectory.status, len(trajectory.segments)) == (Status.DONE, 1)
    text = renderer().tokenizer.decode(trajectory.segments[0].tokens)
    assert text.count("Write hello in line 1.") == text.count("Now write bye in line 2.") == 1
    assert "<|user|>Now write bye in line 2." in text
    state, part = trajectory.turns[2].results[0], trajectory.turns[3].results[0]
    assert "ready" in state.output and part.error is None, "its files and setup, and what was written before"
    assert trajectory.facts["finished"] and trajectory.facts["num_edits"] == 2


def test_what_a_step_lacks_lowers_the_mean(tmp_path: Path) -> None:
    trajectory = play(write_steps(tmp_path), ((FINISH,), (PART,), (FINISH,)))
    assert earned(trajectory) == (0.0, "step greet: tests/test.sh gave 0")
    assert len(trajectory.turns) == 3, "without min_reward the next step follows all the same"


def test_a_step_below_its_least_reward_ends_the_task(tmp_path: Path) -> None:
    trajectory = play(write_steps(tmp_path, TOML.replace('"greet"', '"greet"\nmin_reward = 1')), ((FINISH,),))
    assert earned(trajectory) == (0.0, "step greet: tests/test.sh gave 0")
    assert (trajectory.status, len(trajectory.turns)) == (Status.DONE, 1)


def test_a_session_that_ends_at_its_limit_has_its_other_steps_verified_as_they_are(tmp_path: Path) -> None:
    limits = SessionLimits(max_turns=2, max_tokens=2048)
    trajectory = play(write_steps(tmp_path), ((GREET,), (GREET,), (FINISH,)), limits)
    assert (trajectory.status, trajectory.cause) == (Status.LIMIT, "turns")
    assert earned(trajectory) == (0.0, "step part: tests/test.sh gave 0")
    assert not trajectory.facts["finished"]


def test_a_step_that_cannot_begin_counts_as_failed_but_for_the_first(tmp_path: Path) -> None:
    files: Files = {"steps/part/workdir/setup.sh": "echo too bad >&2; exit 3\n"}
    trajectory = play(write_steps(tmp_path / "a", files=files), SOLVES)
    assert earned(trajectory) == (0.0, "step part: setup.sh of step part failed: too bad")
    assert len(trajectory.turns) == 2
    toml = TOML.replace('"greet"', '"greet"\nhealthcheck = { command = "exit 1", retries = 1 }')
    first = play(write_steps(tmp_path / "b", toml), SOLVES)
    assert (first.status, first.reward) == (Status.INFRASTRUCTURE, None), "no agent has done anything yet"


def test_processes_of_the_agent_live_on_from_step_to_step(tmp_path: Path) -> None:
    task = write_steps(tmp_path)

    async def scenario(backend: SandboxBackend) -> tuple[int, Verdict]:
        session = EnvironmentSession.begin(new_environment(backend)._services, task)
        background = await session.sandbox.commands.run("sleep 60 > /dev/null 2>&1 & echo $!")
        await session.sandbox.commands.run("sed -i 1s/.*/hello/ words.txt")
        assert await session.next_step() == "Now write bye in line 2."
        alive = await session.sandbox.commands.run(f"kill -0 {background.stdout}")
        assert await session.next_step() is None, "the last one is for submit"
        outcome = await session.submit()
        await session.close()
        return alive.exit_code, outcome.verdict

    code, verdict = with_backend("local", scenario)
    assert (code, verdict.reward, verdict.num_passed, verdict.num_failed) == (0, 0.5, 1, 1)
    assert verdict.rewards == {"reward": 0.5, "lines": 2.0}


def test_a_check_solves_step_by_step_and_doing_nothing_earns_0(tmp_path: Path) -> None:
    task = write_steps(tmp_path)

    async def scenario(backend: SandboxBackend) -> tuple[Verdict | str, Verdict, list[str | None]]:
        grader = Grader(backend)
        solved = await judge_solution(task, grader)
        nothing = await judge_nothing(task, grader)
        half = replace(task, steps=(task.steps[0], replace(task.steps[1], solution=task.steps[0].solution)))
        none = replace(task, steps=(task.steps[0], replace(task.steps[1], solution=None)))
        vacuous = replace(task, steps=(task.steps[0], replace(task.steps[0], name="again")))
        reports = await check_tasks([task, half, none, vacuous], backend)
        assert len(reports[0].forgeable) == 1
        return solved, nothing, [report.reason for report in reports]

    solved, nothing, reasons = with_backend("local", scenario)
    assert isinstance(solved, Verdict) and (solved.reward, solved.cause) == (1.0, None)
    assert nothing.reward == 0.0
    assert reasons == [
        None,
        "its reference solution fails: step part: tests/test.sh gave 0",
        "has no reference solution to check it with; tasks.require_solution = false accepts it unchecked",
        "step again: doing nothing in it passes after the solutions of earlier steps",
    ]


def test_a_session_is_told_again_with_its_steps(tmp_path: Path) -> None:
    task = write_steps(tmp_path)
    trajectory = play(task, SOLVES)

    async def scenario(backend: SandboxBackend) -> None:
        environment = new_environment(backend)
        session = environment._new_session(EpisodeRequest(task, IDENTITY, (7, 1), SamplingParams()))
        env_session = EnvironmentSession.begin(environment._services, task)
        replay = await replay_session(
            trajectory,
            session,
            Replayer(env_session, env_session.context, next_step=env_session.next_step),
            4,
        )
        assert replay.equal and replay.num_calls == 4
        segment = trajectory.segments[0]
        tokens = session.recording.tokens
        assert tokens.tolist() == segment.tokens[: len(tokens)].tolist()
        assert [ended.verdict.passed for ended in env_session.history.steps] == [True]
        await env_session.close()

    with_backend("local", scenario)


@pytest.mark.parametrize(("wrong", "reward"), [(False, 1.0), (True, 0.0)])
def test_siblings_that_leave_in_a_later_step_go_on_in_it(tmp_path: Path, wrong: bool, reward: float) -> None:
    solution = FILES["steps/greet/solution/solve.sh"]
    test = (TEST % "a", TEST % "hello")[0]
    task = write_steps(tmp_path, files={"steps/greet/tests/test.sh": test, "x": solution})
    theirs: tuple[Turn, ...] = ((STATE,), (FINISH,), (edit(2, "no") if wrong else PART,), (FINISH,))
    sampler = ScriptedSampler(script_of(lambda _: theirs), route_shape=(2, 2))
    sibling = SiblingSpec(replace(IDENTITY, index=9), (7, 9))

    async def scenario(backend: SandboxBackend):
        plan = ForkPlan("first_edit", (sibling,), (7, 1))
        request = EpisodeRequest(task, IDENTITY, (7, 0), SamplingParams(), True, plan)
        return await new_environment(backend).play(request, sampler)

    episode = with_backend("local", scenario)
    assert episode.refused is None
    for one in (episode.trajectory, *episode.siblings):
        assert one.reward is not None and one.reward.task == reward
    assert len(episode.siblings) == 1 and episode.siblings[0].facts["forked_at"] == 2


def test_the_time_of_a_step_is_taken_over_by_forks_in_the_same_step_only() -> None:
    async def scenario() -> list[float]:
        services = new_services()
        origin = Origin()
        session = EnvironmentSession(services, origin, await services.backend.create(), TASK)
        session.history.add(SessionTurn((), ()))
        session.history.steps.append(StepEnded(1, given(reward=1)))
        session.tool_time.spent_s = 5.0
        made = [
            session.branch(await services.backend.create(), turn, session.context.state, None)
            for turn in (0, 1)
        ]
        await finish_all(one.close() for one in [session, *made])
        return [one.tool_time.spent_s for one in made]

    assert asyncio.run(scenario()) == [0.0, 5.0]


def test_clients_of_a_server_play_no_tasks_with_steps() -> None:
    host = new_host(tasks={"steps": TASK, "plain": replace(TASK, steps=())})
    assert list(host.tasks) == ["plain"]
    with pytest.raises(UserError, match="no such task"):
        find_task(host, "steps")
    with pytest.raises(UserError, match="can only be named"):
        find_task(host, task_document(TASK))


STEPS = tuple(TaskStep(name, "", TestScript(b"")) for name in ("a", "b", "c"))
TASK = Task("t", "", {}, steps=STEPS)


def given(**rewards: float) -> Verdict:
    passed = rewards.get("reward", 0) >= 1
    return Verdict(passed, int(passed), int(not passed), None, 0.0, rewards=rewards or None)


@pytest.mark.parametrize(
    ("strategy", "verdicts", "rewards"),
    [
        ("mean", [given(reward=1), given(reward=0.5), given(reward=0)], {"reward": 0.5}),
        ("final", [given(reward=1), given(reward=0.5), given(reward=0)], {"reward": 0}),
        ("mean", [given(reward=1), given(reward=0.5)], {"reward": 0.5}),
        ("final", [given(reward=1), given(reward=0.5)], {"reward": 0}),
        ("mean", [given(reward=1, a=1), given(reward=1), given(reward=1)], {"reward": 1, "a": 1 / 3}),
        ("mean", [given(reward=1), given(reward=1), given()], {"reward": 2 / 3}),
        ("final", [given(reward=1), given(reward=1), given()], {"reward": 0}),
        ("mean", [given()], None),
    ],
)
def test_rewards_of_steps_become_one_and_those_that_lack_count_as_0(
    strategy: str, verdicts: list[Verdict], rewards: dict[str, float] | None
) -> None:
    whole = combine(replace(TASK, step_rewards=strategy), verdicts)
    assert whole.rewards == rewards
    assert whole.reward == (None if rewards is None else rewards["reward"])
    assert whole.num_passed + whole.num_failed == 3


@pytest.mark.parametrize("strategy", ["mean", "final"])
def test_a_task_is_passed_only_if_all_of_its_steps_are_or_the_last_that_counts(strategy: str) -> None:
    gated = replace(STEPS[0], name="gated", min_reward={"quality": 0.8})
    tasks = [replace(TASK, step_rewards=strategy, steps=steps) for steps in ((gated, *STEPS[1:]), (gated,))]
    missed = given(reward=1, quality=0)
    for task in tasks:
        whole = combine(task, [missed])
        assert (whole.passed, whole.num_passed) == (False, 0)
        assert whole.cause == "step gated: gave less than its min_reward"
    met = [given(reward=1, quality=1), given(reward=1), given(reward=1)]
    assert combine(tasks[0], met).passed
    failing = combine(tasks[0], [met[0], given(reward=0), given(reward=2)])
    assert (failing.passed, failing.num_passed) == (strategy == "final", 2)


def test_steps_that_were_not_reached_pay_no_more_than_failed_ones() -> None:
    solved, failed, dead = given(reward=1), given(reward=0), replace(given(), num_passed=0, num_failed=0)
    for strategy in ("mean", "final"):
        task = replace(TASK, step_rewards=strategy)
        honest = combine(task, [solved, failed, failed])
        for verdicts in ([solved, dead], [solved, failed, dead], [solved, failed]):
            assert combine(task, verdicts).reward == honest.reward


@pytest.mark.parametrize(
    ("least", "verdict", "goes_on"),
    [
        ({}, given(reward=0), True),
        ({}, given(), False),
        ({"reward": 0.5}, given(reward=0.5), True),
        ({"reward": 0.5}, given(reward=0.4), False),
        ({"reward": 0.5}, given(score=1), False),
        ({"score": 1, "style": 0}, given(score=1, style=0), True),
        ({"score": 1, "style": 0}, given(score=1), False),
    ],
)
def test_a_task_goes_on_after_a_step_that_earned_enough(
    least: dict[str, float], verdict: Verdict, goes_on: bool
) -> None:
    task = replace(TASK, steps=(replace(STEPS[0], min_reward=least), *STEPS[1:]))
    backend = MemoryBackend()
    sandbox = asyncio.run(backend.create())
    run = StepRun(task, sandbox, Grader(backend), [verdict])
    assert (run.step == STEPS[1]) is goes_on and (run.step is None) is not goes_on
