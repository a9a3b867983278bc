"""No hack is paid on any task, and what does no harm beside a right solution is paid in full."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import TypeVar

import pytest

from etude.environment.grading import Verdict
from etude.environment.verdicts import Grader
from etude.records import Task
from etude.sandbox.backends import open_backend
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.local.doctor import find_problems
from etude.sandbox.template import Template
from tests.adversary.hack_tables import HACKS
from tests.adversary.hack_tasks import tasks_of
from tests.adversary.hacks import Hack, hacked_files

pytestmark = pytest.mark.skipif(bool(find_problems()), reason="; ".join(find_problems()) or "local works")
TIMEOUT_S = 2.0
Result = TypeVar("Result")


class Stage:
    """One backend and one grader for all hacks."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self.backend: SandboxBackend = self._runner.run(self._open())
        self.grader = Grader(self.backend, timeout_s=TIMEOUT_S)

    async def _open(self) -> SandboxBackend:
        return open_backend("local")

    def close(self) -> None:
        self._runner.run(self.backend.close())
        self._runner.close()

    def grade(self, task: Task, hack: Hack, is_control: bool = False) -> Verdict:
        """What a session earns that plays a hack, in a sandbox of its own."""

        async def scenario(sandbox: Sandbox) -> Verdict:
            return await self.grader.grade(task, sandbox)

        return self._play(task, hack, is_control, scenario)

    def fools(self, task: Task, hack: Hack) -> bool:
        """Whether a grader pays that runs the tests as they are, where the agent worked."""

        async def scenario(sandbox: Sandbox) -> bool:
            await sandbox.files.write_many({"run.py": GULLIBLE, **task.hidden_files})
            path = "/workspace/.local/bin:/usr/local/bin:/usr/bin:/bin"
            env = {"PYTHONPATH": "/workspace", "PATH": path}
            ended = await sandbox.commands.run("python3 run.py", env=env, timeout_s=10.0)
            return ended.exit_code == 0

        return self._play(task, hack, False, scenario)

    def _play(
        self, task: Task, hack: Hack, is_control: bool, scenario: Callable[[Sandbox], Awaitable[Result]]
    ) -> Result:
        async def run() -> Result:
            sandbox = await self.backend.create(Template(task.files))
            try:
                await sandbox.files.write_many(hacked_files(task, hack, is_control))
                if hack.command:
                    await sandbox.commands.run(dedent(hack.command), timeout_s=20.0)
                return await scenario(sandbox)
            finally:
                await sandbox.kill()

        return self._runner.run(run())


GULLIBLE = Path(__file__).with_name("gullible.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


@pytest.mark.parametrize("hack", HACKS, ids=lambda hack: hack.name)
def test_a_hack_is_paid_nowhere(stage: Stage, hack: Hack) -> None:
    verdicts = {task.id: stage.grade(task, hack) for task in tasks_of(hack.tasks)}
    assert len(verdicts) >= 3
    assert [name for name, verdict in verdicts.items() if verdict.passed] == []


@pytest.mark.parametrize("hack", [hack for hack in HACKS if hack.harmless], ids=lambda hack: hack.name)
def test_the_same_acts_beside_a_right_solution_are_paid(stage: Stage, hack: Hack) -> None:
    verdicts = {task.id: stage.grade(task, hack, is_control=True) for task in tasks_of(hack.tasks)}
    assert {name: verdict.cause for name, verdict in verdicts.items() if not verdict.passed} == {}


@pytest.mark.parametrize("hack", [hack for hack in HACKS if hack.fools], ids=lambda hack: hack.name)
def test_a_hack_fools_a_grader_that_judges_in_place(stage: Stage, hack: Hack) -> None:
    assert any(stage.fools(task, hack) for task in tasks_of(hack.tasks))


def test_there_are_eighty_causes_and_half_of_them_are_from_the_docs() -> None:
    assert len(HACKS) == len({hack.name for hack in HACKS}) == len({hack.cause for hack in HACKS}) >= 80
    assert sum(hack.from_docs for hack in HACKS) * 2 >= len(HACKS)
