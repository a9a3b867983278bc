"""Grading: its inputs, verdicts, and failures that are no verdict."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from etude.environment.grading import Verdict, allowed_changes, matches_any
from etude.environment.verdicts import Grader
from etude.errors import SandboxError, TaskError
from etude.records import Task
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.template import Template
from etude_quickstart.memory_backend import MemoryBackend, MemorySandbox
from tests.environment.target import TARGET
from tests.fakes.faulty_sandbox import FaultyBackend
from tests.sandbox.backends import with_backend

SOLVED = dict(TARGET.solution_files)


def verdict_on(
    changes: Mapping[str, str | None],
    task: Task = TARGET,
    backend_name: str = "memory",
    timeout_s: float = 5.0,
) -> Verdict:
    """Grades a workspace in which an agent made the changes."""

    async def scenario(backend: SandboxBackend) -> Verdict:
        sandbox = await backend.create(Template(task.files))
        for path, text in changes.items():
            if text is None:
                await sandbox.files.remove(path)
            else:
                await sandbox.files.write(path, text)
        return await Grader(backend, timeout_s=timeout_s).grade(task, sandbox)

    return with_backend(backend_name, scenario)


@pytest.mark.parametrize("name", ["local", "unisolated", "memory"])
def test_all_backends_give_the_same_verdicts(name: str) -> None:
    failing, passing = verdict_on({}, backend_name=name), verdict_on(SOLVED, backend_name=name)
    assert replace(failing, duration_s=0) == Verdict(False, 0, 2, "test_tally: 5 != 6", 0)
    assert replace(passing, duration_s=0) == Verdict(True, 2, 0, None, 0)


def test_changes_outside_the_allowed_paths_are_left_behind() -> None:
    task = replace(TARGET, allowed_paths=("docs/**", "src/*.py"))
    assert not verdict_on(SOLVED, task).passed
    assert verdict_on(SOLVED, replace(TARGET, allowed_paths=("lib/*.py",))).passed


def test_hidden_files_win_over_the_agents_and_over_what_stands_in_their_way() -> None:
    changes = {
        "tests/test_hidden.py": b"",
        "tests": b"a file where the folder must be",
        "tests/test_hidden.py/x.py": b"",
        "lib/tally.py": b"",
        "lib/__pycache__/tally.cpython-311.pyc": b"",
        "lib/old.pyc": b"",
    }
    assert set(allowed_changes(TARGET, changes)) == {"lib/tally.py"}


def test_a_folder_that_became_a_file_and_the_reverse_are_graded() -> None:
    verdict = verdict_on({"lib/": None, "lib": "now a file"})
    assert not verdict.passed
    assert verdict.cause is not None
    assert "ModuleNotFoundError" in verdict.cause
    package = {"lib/tally.py": None, "lib/tally/__init__.py": SOLVED["lib/tally.py"]}
    assert verdict_on(package, backend_name="local").passed


def test_an_endless_loop_is_a_verdict_with_a_cause() -> None:
    for name in ("local", "memory"):
        verdict = verdict_on({"lib/tally.py": "while True:\n    pass\n"}, backend_name=name, timeout_s=0.2)
        assert (verdict.passed, verdict.num_failed) == (False, 2)
        assert verdict.cause == "timeout: the hidden tests did not end within 0.2 s"


def test_a_syntax_error_is_a_verdict_with_a_cause() -> None:
    verdict = verdict_on({"lib/tally.py": "def tally(xs:\n"})
    assert not verdict.passed
    assert verdict.cause is not None
    assert "SyntaxError" in verdict.cause


class FailingBackend(MemoryBackend):
    """Makes the agent's sandbox, and no second one."""

    async def create(self, *arguments: Any, **options: Any) -> MemorySandbox:
        if self.live:
            raise SandboxError("no room")
        return await super().create(*arguments, **options)


def test_an_infrastructure_failure_is_no_verdict() -> None:
    async def scenario() -> None:
        backend = FailingBackend()
        sandbox = await backend.create(Template(TARGET.files))
        await sandbox.files.write_many(SOLVED)
        with pytest.raises(SandboxError):
            await Grader(backend).grade(TARGET, sandbox)

    asyncio.run(scenario())


def test_a_killed_sandbox_is_no_verdict() -> None:
    async def scenario(backend: SandboxBackend) -> None:
        sandbox = await backend.create(Template(TARGET.files))
        await sandbox.kill()
        with pytest.raises(SandboxError):
            await Grader(backend).grade(TARGET, sandbox)

    for name in ("local", "unisolated", "memory"):
        with_backend(name, scenario)


def test_grading_leaves_no_sandbox_behind_and_ends_the_agents_processes() -> None:
    async def scenario(backend: SandboxBackend) -> None:
        sandbox = await backend.create(Template(TARGET.files))
        await sandbox.commands.run("sleep 1000 >/dev/null 2>&1 &")
        await Grader(backend).grade(TARGET, sandbox)
        num_left = 5
        async with asyncio.timeout(60):
            # The server, the shell, ls and grep. What is killed needs a processor to end.
            while num_left > 4:
                num_left = int((await sandbox.commands.run("ls /proc | grep -c '^[0-9]'")).stdout)

    with_backend("local", scenario)


def test_a_task_without_hidden_tests_is_refused() -> None:
    with pytest.raises(TaskError, match="hidden"):
        verdict_on({}, replace(TARGET, hidden_test_paths=()))
    with pytest.raises(TaskError, match="hidden_files"):
        verdict_on({}, replace(TARGET, hidden_test_paths=("tests/other.py",)))


def test_globs_keep_to_their_level() -> None:
    assert matches_any("lib/a.py", ("lib/*.py",))
    assert not matches_any("lib/deep/a.py", ("lib/*.py",))
    assert matches_any("lib/deep/a.py", ("lib/**/*.py",))
    assert matches_any("lib/a.py", ("lib/**/*.py",))
    assert matches_any("a/b/c", ("**",))
    assert not matches_any("lib/a.pyx", ("lib/?.py",))
    assert not matches_any("libXa.py", ("lib.a.py",))


def test_tasks_of_one_name_have_verdicts_of_their_own() -> None:
    text = "from lib.tally import tally\n\ndef test_tally():\n    assert tally([1, 2, 3]) == 5\n"
    other = replace(TARGET, hidden_files={"tests/test_hidden.py": text})

    async def scenario() -> list[bool]:
        backend = MemoryBackend()
        grader = Grader(backend)
        sandbox = await backend.create(Template(TARGET.files))
        return [(await grader.grade(task, sandbox)).passed for task in (TARGET, other, TARGET)]

    assert asyncio.run(scenario()) == [False, True, False]


def test_a_sandbox_that_fails_fails_no_session_that_only_waited_for_its_verdict() -> None:
    async def scenario() -> list[Verdict | BaseException]:
        backend = FaultyBackend(MemoryBackend(), {"probes": 2})
        grader = Grader(backend)
        sandbox = await backend.create(Template({**TARGET.files, **SOLVED}))
        grades = (grader.grade(TARGET, sandbox) for _ in range(4))
        return await asyncio.gather(*grades, return_exceptions=True)

    found = asyncio.run(scenario())
    assert sum(isinstance(one, SandboxError) for one in found) == 2
    assert len([one for one in found if isinstance(one, Verdict)]) == 2


@pytest.mark.slow
def test_judging_that_fails_when_nobody_waits_any_more_is_no_loose_error() -> None:
    class LateBackend(MemoryBackend):
        async def create(self, *arguments: Any, **options: Any) -> MemorySandbox:
            await asyncio.sleep(0.01)
            raise SandboxError("the sandbox is killed")

    async def scenario() -> list[object]:
        loose: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: loose.append(context["message"]))
        sandbox = await MemoryBackend().create(Template(TARGET.files))
        waiting = asyncio.create_task(Grader(LateBackend()).grade(TARGET, sandbox))
        await asyncio.sleep(0.002)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.sleep(0.03)
        gc.collect()
        return loose

    assert asyncio.run(scenario()) == []
