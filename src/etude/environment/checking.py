"""Verifies tasks: the reference solution earns 1, doing nothing earns 0, and a second round gives the same.

A task that fails here would train on noise: its tests cannot pass, pass without work, are flaky, or need
something that its machine does not have, such as a network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from etude.environment.grading import Verdict, allowed_changes
from etude.environment.origins import task_origin
from etude.environment.scripts import AgentDiff, check_isolation, explain_failure, find_changes, run_solution
from etude.environment.steps import StepRun
from etude.environment.verdicts import Grader
from etude.errors import AgentError, SandboxError, TaskError, UserError
from etude.kit.tasks import gather_bounded
from etude.records import Task
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.types import Resources
from etude.tasks.exams import read_exams

_ROUNDS = 2
_UNSOLVED = "has no reference solution to check it with; tasks.require_solution = false accepts it unchecked"


@dataclass(frozen=True, slots=True)
class TaskReport:
    """The result of checking one task."""

    id: str
    reason: str | None
    """Why it is not verified; None if it is."""
    forgeable: tuple[str, ...] = ()
    """Tests whose verdict an agent could forge, each with the reason."""
    duration_s: float = 0.0


async def check_tasks(
    tasks: Sequence[Task],
    backend: SandboxBackend,
    limits: Resources | None = None,
    at_once: int = 4,
    require_solution: bool = True,
    on_report: Callable[[TaskReport], None] = lambda report: None,
) -> list[TaskReport]:
    """Checks tasks, `at_once` at the same time; returns reports in order and calls `on_report` with each when
    done. Without `require_solution`, a task without a solution is only checked by doing nothing."""
    grader = Grader(backend, limits)

    async def check(task: Task) -> TaskReport:
        if require_solution and not has_solution(task):
            report = TaskReport(task.id, _UNSOLVED)
        else:
            report = await _check_task(task, grader)
        on_report(report)
        return report

    return await gather_bounded(check, tasks, at_once)


def has_solution(task: Task) -> bool:
    """Whether a task, or each of its steps, has a reference solution."""
    if task.steps:
        return all(step.solution is not None for step in task.steps)
    return bool(task.solution or task.solution_files)


async def _check_task(task: Task, grader: Grader) -> TaskReport:
    began, forgeable = time.perf_counter(), tuple[str, ...]()
    try:
        found = (await grader.find_twins(task)).open_tests
        forgeable = tuple(f"{test}: {reason}" for test, reason in found.items())
        reason = await _find_fault(task, grader)
    except (TaskError, AgentError) as error:
        reason = str(error)
    except (SandboxError, UserError) as error:
        reason = f"could not be checked: {error}"
    return TaskReport(task.id, reason, forgeable, time.perf_counter() - began)


async def _find_fault(task: Task, grader: Grader) -> str | None:
    is_solved, before = has_solution(task), list[tuple[bool, float | None]]()
    for number in range(_ROUNDS):
        task = _with_first_exam(task) if number else task
        solved = await judge_solution(task, grader) if is_solved else None
        if isinstance(solved, str):
            return solved
        nothing = await judge_nothing(task, grader)
        earned = [(verdict.passed, verdict.reward) for verdict in (nothing, solved) if verdict is not None]
        if number and earned != before:
            return f"its rewards differ between two runs: {_shown(before)}, then {_shown(earned)}"
        before = earned
        if solved is not None and not solved.passed:
            return f"its reference solution fails: {solved.cause}"
        if nothing.passed or nothing.reward:
            return f"doing nothing earns {1.0 if nothing.reward is None else nothing.reward:g}"
        if task.verifier is not None and nothing.reward is None:
            return f"doing nothing earns no reward, not 0: {nothing.cause}"
    return None


def _with_first_exam(task: Task) -> Task:
    """The task with its first exam only: the others have the same tests with other values."""
    verifier = task.verifier
    if verifier is None or not verifier.exams:
        return task
    first = replace(exams := read_exams(verifier.exams), exams=exams.exams[:1])
    return replace(task, verifier=replace(verifier, exams=first.to_text()))


async def judge_solution(task: Task, grader: Grader) -> Verdict | str:
    """The verdict on a task's own solution, or why it could not be run, or that a later step needs none.

    Raises SandboxError, TaskError.
    """
    if task.solution is None:
        files = {path: text.encode(errors="surrogatepass") for path, text in task.solution_files.items()}
        return await grader.judge(task, AgentDiff(allowed_changes(task, files)))
    await check_isolation(grader.backend)
    async with await task_origin(task, grader.limits).make(grader.backend) as sandbox:
        run = StepRun(task, sandbox, grader, [])
        failure = await run_solution(task, sandbox)
        while failure is None and task.steps and (step := await run.end_step()) is not None:
            if (await run.verify(keep=True)).passed:
                return f"step {step.name}: doing nothing in it passes after the solutions of earlier steps"
            failure = await run_solution(task.at_step(len(run.verdicts)), sandbox)
        if failure is not None:
            return failure
        verdict = await (run.end() if task.steps else grader.judge(task, await find_changes(task, sandbox)))
        words = "" if verdict.passed else await explain_failure(task, sandbox)
        return replace(verdict, cause=f"{verdict.cause}; {words}") if words else verdict


async def judge_nothing(task: Task, grader: Grader) -> Verdict:
    """The verdict on an agent that does nothing. Raises SandboxError, TaskError."""
    if not task.steps:
        return await grader.judge(task, AgentDiff())
    await check_isolation(grader.backend)
    async with await task_origin(task, grader.limits).make(grader.backend) as sandbox:
        return await StepRun(task, sandbox, grader, []).end()


def _shown(earned: Sequence[tuple[bool, float | None]]) -> str:
    names = ("nothing", "the reference solution")
    rewards = [float(passed) if reward is None else reward for passed, reward in earned]
    return " and ".join(f"{one:g} for {name}" for one, name in zip(rewards, names, strict=False))
