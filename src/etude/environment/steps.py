"""The steps of a task, in one sandbox: each is verified before the next one begins.

    first step --agent--> verified in a fresh sandbox --> next step's files, setup, health check --agent-->
                            ^ from a copy of this one        the user's next words

A task ends with its last step, or after one that gave no reward or less than its `min_reward`. Rewards become
one as in Harbor (`MultiStepTrial`), but for steps without a reward, and those that were not reached: there
they are left out, here they count as 0, as the agent may have brought it about. A copy is verified, so that
what the agent has running lives on; in the copy nothing runs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from etude.environment.grading import Verdict
from etude.environment.origins import begin_step
from etude.environment.scripts import collect, verdict_on
from etude.environment.verdicts import Grader
from etude.errors import AgentError, SandboxError
from etude.records import Task, TaskStep
from etude.sandbox.interface import Sandbox


@dataclass(slots=True)
class StepRun:
    """Where a task with steps stands in a sandbox."""

    task: Task
    sandbox: Sandbox
    grader: Grader
    verdicts: list[Verdict]
    """On the steps that have ended."""

    @property
    def step(self) -> TaskStep | None:
        """The step that is being worked on; None once the task is over."""
        steps, done = self.task.steps, len(self.verdicts)
        if done == len(steps) or (done and not _goes_on(steps[done - 1], self.verdicts[-1])):
            return None
        return steps[done]

    @property
    def is_last(self) -> bool:
        """Whether no step comes after the present one."""
        return len(self.verdicts) + 1 == len(self.task.steps)

    async def end_step(self) -> TaskStep | None:
        """Verifies the present step, and has the next one begin, if there is one.

        What the agent did wrong is a verdict. Raises SandboxError, TaskError as `Grader.grade`.
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
        """Verifies what is left, as it is, and gives the verdict on all steps. Raises as `end_step`."""
        while self.step is not None:
            await self.end_step()
        return combine(self.task, self.verdicts)

    async def verify(self, *, keep: bool) -> Verdict:
        """The verdict on the present step, as it is. `keep`: the sandbox goes on. Raises as `end_step`."""
        task = self.task.at_step(len(self.verdicts))
        if not keep:
            return await self.grader.grade(task, self.sandbox)
        began = time.perf_counter()
        try:
            await collect(task, self.sandbox)
            (copy,) = await self.sandbox.fork(1)
        except AgentError as error:
            return Verdict(False, 0, 1, error.message, time.perf_counter() - began)
        if isinstance(copy, SandboxError):
            raise copy
        async with copy:
            assert task.verifier is not None, "each step has one"
            return await self.grader.grade(replace(task, verifier=replace(task.verifier, collect=())), copy)


def combine(task: Task, verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on a task by those on its steps, as far as they were begun; passed if all steps are, or
    where the last one's reward counts alone, if all were done and that one is."""
    duration_s = sum(verdict.duration_s for verdict in verdicts)
    given = [verdict.rewards or {} for verdict in verdicts]
    given += [{} for _ in task.steps[len(verdicts) :]]
    if task.step_rewards == "final":
        given = [given[-1] or {"reward": 0}]
    rewards = {name: sum(one.get(name, 0) for one in given) / len(given) for one in given for name in one}
    whole = verdict_on(rewards, duration_s) if rewards else Verdict(False, 0, 0, None, duration_s)
    is_passed = [
        verdict.passed and _goes_on(step, verdict)
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


def _goes_on(step: TaskStep, verdict: Verdict) -> bool:
    """Whether the task goes on after a step: it gave a reward, and all that it had to."""
    rewards: Mapping[str, float] | None = verdict.rewards
    if rewards is None:
        return False
    return all(rewards.get(name, float("-inf")) >= least for name, least in step.min_reward.items())
