"""Plays hacks: one backend and one grader for many sessions."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable
from textwrap import dedent
from typing import TypeVar

from etude.config import RewardConfig
from etude.environment.grading import Verdict, allowed_changes
from etude.environment.origins import task_origin
from etude.environment.scripts import AgentDiff, run_solution
from etude.environment.verdicts import Grader
from etude.records import Task
from etude.sandbox.backends import open_backend
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.types import Resources
from tests.adversary.gullible import is_fooled
from tests.adversary.hacks import Hack, hacked_files

TIMEOUT_S = 2.0
Result = TypeVar("Result")


class Stage:
    """One backend and one grader for all hacks."""

    def __init__(self, reward: RewardConfig | None = None) -> None:
        """`reward`: one that pays for some of the tests."""
        self._runner = asyncio.Runner()
        self.backend: SandboxBackend = self._runner.run(self._open())
        self.grader = Grader(self.backend, timeout_s=TIMEOUT_S, reward=reward)

    async def _open(self) -> SandboxBackend:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return open_backend("local")

    def close(self) -> None:
        self._runner.run(self.backend.close())
        self._runner.close()

    def grade(self, task: Task, hack: Hack, is_control: bool = False) -> Verdict:
        """What a session earns that plays a hack, in a sandbox of its own."""
        if hack.command or task.verifier is not None:
            return self._play(task, hack, is_control, lambda sandbox: self.grader.grade(task, sandbox))
        files = {path: text.encode() for path, text in hacked_files(task, hack, is_control).items()}
        return self._runner.run(self.grader.judge(task, AgentDiff(allowed_changes(task, files))))

    def fools(self, task: Task, hack: Hack) -> bool:
        """Whether a grader pays that judges where the agent worked."""
        return self._play(task, hack, False, lambda sandbox: is_fooled(task, sandbox))

    def open_tests(self, task: Task) -> list[str]:
        """Hidden tests whose verdict could be forged."""
        return list(self._runner.run(self.grader.find_twins(task)).open_tests)

    def _play(
        self, task: Task, hack: Hack, is_control: bool, judge: Callable[[Sandbox], Awaitable[Result]]
    ) -> Result:
        async def run() -> Result:
            sandbox = await task_origin(task, Resources()).make(self.backend)
            try:
                await sandbox.files.write_many(hacked_files(task, hack, is_control))
                if is_control and task.solution is not None and not task.solution_files:
                    assert await run_solution(task, sandbox) is None
                if hack.command:
                    await sandbox.commands.run(dedent(hack.command), timeout_s=20.0)
                return await judge(sandbox)
            finally:
                await sandbox.kill()

        return self._runner.run(run())
