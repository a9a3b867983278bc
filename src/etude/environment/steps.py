"""The steps of a task, in one sandbox: each is verified before the next one begins.

    first step --agent--> verified in a fresh sandbox --> next step's files, setup, health check --agent-->
                            ^ from a copy of this one        the user's next instruction

A task ends with its last step, or after one that gave no reward or less than its `min_reward`. Rewards are
combined as in Harbor (`MultiStepTrial`), except for steps without a reward and steps that were not reached:
Harbor leaves them out, here they count as 0, because the agent may have caused that. A copy is verified, so
that the agent's processes keep running; the copy has none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from etude.environment.grading import Verdict
from etude.environment.origins import begin_step
from etude.environment.scripts import run_collect_commands, verdict_on
from etude.environment.verdicts import Grader
from etude.errors import AgentError, SandboxError
from etude.records import Task, TaskStep
from etude.sandbox.interface import Sandbox


@dataclass(slots=True)
class StepRun:
    """The progress of a task with steps in a sandbox."""

    task: Task
    sandbox: Sandbox
    grader: Grader
    verdicts: list[Verdict]
    """Verdicts on the steps that have ended."""

    @property
    def step(self) -> TaskStep | None:
        """The current step; None once the task has ended."""
        steps, done = self.task.steps, len(self.verdicts)
        if done == len(steps) or (done and not _continues(steps[done - 1], self.verdicts[-1])):
            return None
        return steps[done]

    @property
    def is_last(self) -> bool:
        """Whether the current step is the last one."""
        return len(self.verdicts) + 1 == len(self.task.steps)

    async def end_step(self) -> TaskStep | None:
        """Verifies the current step and begins the next one, if there is one; returns it.

        Faults of the agent are part of the verdict. Raises SandboxError, TaskError as `Grader.grade`.
        """
        self.verdicts.append(await self.verify(keep=not self.is_last))
        if self.step is None:
            return None
        began = time.perf_counter()
        failure = await begin_step(self.sandbox, self.step)
        if failure is not None:
            self.verdicts.append(Verdict(False, 0, 1, failure, time.perf_counter() - began))
        return self.step

    async def end(self) -> Verdict:
        """Verifies the remaining steps as they are; the verdict on all steps. Raises as `end_step`."""
        while self.step is not None:
            await self.end_step()
        return combine(self.task, self.verdicts)

    async def verify(self, *, keep: bool) -> Verdict:
        """The verdict on the current step. `keep`: the sandbox stays in use. Raises as `end_step`."""
        task = self.task.at_step(len(self.verdicts))
        if not keep:
            return await self.grader.grade(task, self.sandbox)
        began = time.perf_counter()
        try:
            await run_collect_commands(task, self.sandbox)
            (copy,) = await self.sandbox.fork(1)
        except AgentError as error:
            return Verdict(False, 0, 1, error.message, time.perf_counter() - began)
        if isinstance(copy, SandboxError):
            raise copy
        async with copy:
            assert task.verifier is not None, "each step has one"
            return await self.grader.grade(replace(task, verifier=replace(task.verifier, collect=())), copy)


def combine(task: Task, verdicts: Sequence[Verdict]) -> Verdict:
    """Combines the verdicts on the steps that were begun into that on the task. It is passed if all steps are
    or, if only the last one's reward counts, all steps were done and the last one is passed."""
    duration_s = sum(verdict.duration_s for verdict in verdicts)
    given = [verdict.rewards or {} for verdict in verdicts]
    given += [{} for _ in task.steps[len(verdicts) :]]
    if task.step_rewards == "final":
        given = [given[-1] or {"reward": 0}]
    rewards = {name: sum(row.get(name, 0) for row in given) / len(given) for row in given for name in row}
    whole = verdict_on(rewards, duration_s) if rewards else Verdict(False, 0, 0, None, duration_s)
    is_passed = [
        verdict.passed and _continues(step, verdict)
        for step, verdict in zip(task.steps, verdicts, strict=False)
    ]
    num_passed, cause = sum(is_passed), whole.cause
    if False in is_passed:
        failed = is_passed.index(False)
        why = "gave less than its min_reward" if verdicts[failed].passed else verdicts[failed].cause
        cause = f"step {task.steps[failed].name}: {why}"
    last, are_done = verdicts[-1], len(verdicts) == len(task.steps)
    is_enough = is_passed[-1] if task.step_rewards == "final" else num_passed == len(task.steps)
    passed = whole.passed and are_done and is_enough
    return replace(
        whole,
        passed=passed,
        num_passed=num_passed,
        num_failed=len(task.steps) - num_passed,
        cause=None if passed else cause,
        lints=last.lints,
        style=last.style,
    )


def _continues(step: TaskStep, verdict: Verdict) -> bool:
    """Whether the task continues after a step: it gave a reward, and reached every minimum."""
    rewards: Mapping[str, float] | None = verdict.rewards
    if rewards is None:
        return False
    return all(rewards.get(name, float("-inf")) >= least for name, least in step.min_reward.items())
