"""Each shipped cheat earns nothing, and would earn a reward from a grader without the protection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from etude.environment.cheats import CHEATS, TARGET, Cheat, play
from etude.environment.grading import Verdict
from etude.environment.verdicts import Grader
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.template import Template
from tests.environment.naive import exit_code_in_place, pytest_in_place, reward_file_in_place
from tests.sandbox.backends import with_backend

NAIVE: dict[str, Callable[[Sandbox], Awaitable[bool]]] = {
    "conftest": exit_code_in_place,
    "sitecustomize": lambda sandbox: exit_code_in_place(sandbox, {"PYTHONPATH": "/workspace"}),
    "pth file": exit_code_in_place,
    "planted bytecode": exit_code_in_place,
    "PATH shim": lambda sandbox: exit_code_in_place(
        sandbox, {"PATH": "/workspace/.local/bin:/usr/local/bin:/usr/bin:/bin"}
    ),
    "background writer": reward_file_in_place,
    "edited tests": lambda sandbox: exit_code_in_place(sandbox, tests="tests/test_all.py"),
    "early exit": exit_code_in_place,
    "symlinked reward file": reward_file_in_place,
    "patched pytest": pytest_in_place,
}


def outcomes(cheat: Cheat | None, naive: Callable[[Sandbox], Awaitable[bool]]) -> tuple[bool, Verdict]:
    """(naive verdict, our verdict) on a sandbox in which the cheat was played; two sandboxes, one each."""

    async def scenario(backend: SandboxBackend) -> tuple[bool, Verdict]:
        template = Template(TARGET.files)
        ours, theirs = await backend.create(template), await backend.create(template)
        for sandbox in (ours, theirs):
            if cheat is not None:
                await play(cheat, sandbox)
        return await naive(theirs), await Grader(backend).grade(TARGET, ours)

    return with_backend("local", scenario)


def test_there_are_ten_cheats_and_a_control_for_each() -> None:
    assert len(CHEATS) == 10
    assert {cheat.name for cheat in CHEATS} == set(NAIVE)


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.name)
def test_a_cheat_succeeds_under_its_naive_grader_and_earns_nothing_here(cheat: Cheat) -> None:
    naive, verdict = outcomes(cheat, NAIVE[cheat.name])
    assert naive, "the control must succeed, or this test shows nothing"
    assert not verdict.passed
    assert verdict.cause


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NAIVE))
def test_naive_graders_fail_the_unsolved_task_without_a_cheat(name: str) -> None:
    naive, verdict = outcomes(None, NAIVE[name])
    assert not naive
    assert verdict.cause == "test_tally: 5 != 6"


def test_the_honest_solution_passes_both() -> None:
    solution = Cheat("honest", "does the work", "", TARGET.solution_files)
    naive, verdict = outcomes(solution, exit_code_in_place)
    assert naive
    assert verdict.passed
    assert (verdict.num_passed, verdict.num_failed) == (2, 0)


READ_THE_CALLER = """import dis, sys


def tally(xs):
    frame = sys._getframe(1)
    for step in dis.get_instructions(frame.f_code):
        if step.offset > frame.f_lasti and step.opname == "LOAD_CONST":
            return step.argval
"""

ALWAYS_EQUAL = """class Yes:
    def __eq__(self, other):
        return True


def tally(xs):
    return Yes()
"""

FORGE_THE_REPORT = """import json, os


def tally(xs):
    ok = {"passed": ["test_tally", "test_empty"], "failed": [], "error": None, "results": [
        ["tests/test_hidden.py", "test_tally", [], None], ["tests/test_hidden.py", "test_empty", [], None]]}
    os.write(3, json.dumps(ok).encode())
    os._exit(0)
"""

PATCH_THE_RECORDER = """import gc, sys


def tally(xs):
    names = sys._getframe(1).f_globals
    for value in list(names):
        if callable(names[value]) and value.startswith("__record"):
            names[value] = lambda *sides: None
    return 0
"""

KEEP_GOING = """import os, signal


def tally(xs):
    if os.fork() == 0:
        os.setsid()
        signal.pause()
    return sum(xs) - 1
"""


@pytest.mark.parametrize(
    "code",
    [READ_THE_CALLER, ALWAYS_EQUAL, FORGE_THE_REPORT, PATCH_THE_RECORDER, KEEP_GOING],
    ids=["read the caller", "always equal", "forge the report", "patch the recorder", "leave a child"],
)
def test_code_in_the_process_of_the_tests_cannot_forge_a_verdict(code: str) -> None:
    cheat = Cheat("in process", "", "", {"lib/tally.py": code})
    assert not outcomes(cheat, exit_code_in_place)[1].passed


@pytest.mark.slow
@pytest.mark.parametrize("code", [READ_THE_CALLER, ALWAYS_EQUAL], ids=["read the caller", "always equal"])
def test_the_same_code_does_pass_a_runner_that_compares_in_process(code: str) -> None:
    cheat = Cheat("in process", "", "", {"lib/tally.py": code})
    assert outcomes(cheat, exit_code_in_place)[0]
