"""Which tests get twins, which stay visible and why, and which tasks need exams."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from etude.config import RewardConfig
from etude.environment.grading import CAUSE_CHARS, Verdict
from etude.environment.hidden_tests import split_tests
from etude.environment.scripts import AgentDiff
from etude.environment.twin_sites import Kind, change_sites, find_sites
from etude.environment.twins import TwinFinder, Twins
from etude.environment.verdicts import Grader
from etude.errors import SandboxError
from etude.records import Task
from etude.sandbox.errors import SandboxKilledByAgentError
from etude.sandbox.inside.running import MAX_RESULT_BYTES
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.types import ProbeReport, ProbeResult
from etude_quickstart.composed import ComposedGenerator
from etude_quickstart.generator import TaskGenerator
from etude_quickstart.memory_backend import MemoryBackend, MemorySandbox
from etude_quickstart.observed import ObservedGenerator
from etude_quickstart.trails import TrailGenerator
from tests.environment.target import TARGET
from tests.sandbox.backends import with_backend

IMPORT = "from lib.tally import tally\n\n"


def task_of(tests: str, **more: str) -> Task:
    """The shipped target with other hidden tests; `more`: further hidden files by name."""
    others = {name.replace("__", "/").replace("_dot_", "."): text for name, text in more.items()}
    return replace(TARGET, hidden_files={"tests/test_hidden.py": IMPORT + tests, **others})


def twins_of(task: Task) -> Twins:
    return asyncio.run(Grader(MemoryBackend()).find_twins(task))


def verdict_on(task: Task, text: str, reward: RewardConfig | None = None) -> Verdict:
    async def scenario() -> Verdict:
        left = AgentDiff({"lib/tally.py": text.encode()})
        return await Grader(MemoryBackend(), reward=reward).judge(task, left)

    return asyncio.run(scenario())


def named(twins: Twins) -> set[str]:
    return {test.partition("::")[2] for exam in twins.exams for test in exam.failing}


@pytest.mark.parametrize(
    "source",
    [
        lambda number: TaskGenerator(3, "train").task(number),
        lambda number: TaskGenerator(3, "heldout_family").task(number),
        lambda number: ObservedGenerator(3, "train").task(number),
        lambda number: ComposedGenerator(3, "train").task(number),
        lambda number: TrailGenerator(3, "train", (3, 12)).task(number),
    ],
    ids=["bug fixes", "held out families", "observed", "composed", "trails"],
)
def test_generated_tasks_are_closed_and_need_no_exam(source: Callable[[int], Task]) -> None:
    async def scenario(backend: SandboxBackend) -> None:
        grader = Grader(backend)
        for number in range(12):
            task = source(number)
            solution = {path: text.encode() for path, text in task.solution_files.items()}
            assert (await grader.judge(task, AgentDiff(solution))).passed
            assert await grader.find_twins(task) == Twins()

    with_backend("unisolated", scenario)


CLOSED = {
    "an answer": "def test_a():\n    assert tally([1, 2]) == 3\n",
    "a value in a name": "def test_a():\n    x = tally([1, 2])\n    assert x == 3\n",
    "inputs in a name": "def test_a():\n    xs = [1, 2]\n    xs.append(7)\n    assert tally(xs) == 10\n",
    "inputs that tests share": "XS = [4, 5]\n\ndef test_a():\n    assert tally(XS) == 9\n",
}


@pytest.mark.parametrize("tests", CLOSED.values(), ids=CLOSED)
def test_a_test_that_compares_outside_needs_no_twin(tests: str) -> None:
    assert twins_of(task_of(tests)) == Twins()


TWINNED = {
    "all": "def test_a():\n    assert all(tally(x) == y for x, y in [([1], 1), ([2], 2)])\n",
    "or": "def test_a():\n    a = tally([2, 3])\n    assert a == 5 or a == 9.5\n",
    "not any": "CASES = [([1], 1)]\n\ndef test_a():\n    assert not any(tally(x) != y for x, y in CASES)\n",
    "a loop": "def test_a():\n    for x, y in (([2], 2),):\n        assert tally(x) == y\n",
    "raises": "def test_a():\n    if tally([2]) != 2:\n        raise RuntimeError('no')\n",
    "a helper": "def check(x, y):\n    assert tally(x) == y\n\ndef test_a():\n    check([2], 2)\n",
    "a nested function": "def test_a():\n    def check():\n        assert tally([2]) == 2\n    check()\n",
    "with": "import io\n\ndef test_a():\n    with io.StringIO():\n        assert tally([2]) == 2\n",
    "if": "def test_a():\n    if True:\n        assert tally([2]) == 2\n",
    "a truth": "def test_a():\n    assert tally([2])\n",
    "nothing": "def test_a():\n    assert [tally([2]) - 2 or None] == [None]\n",
    "an error": (
        "def test_a():\n    try:\n        tally(3)\n    except TypeError:\n        return\n    assert False\n"
    ),
    "an order": "def test_a():\n    assert 4 < tally([2, 3]) < 6\n",
    "a comparison that is compared": "def test_a():\n    assert (tally([2]) == 2) is True\n",
    "a difference": "def test_a():\n    assert tally([2]) - 2 == 0\n",
    "a future import": (
        "from __future__ import annotations\nfrom lib.tally import tally as t\n\n"
        "def test_a():\n    for y in [2]:\n        assert t([2]) == y\n"
    ),
}


@pytest.mark.parametrize("tests", TWINNED.values(), ids=TWINNED)
def test_a_test_that_compares_inside_has_a_twin_in_some_exam_and_not_in_another(tests: str) -> None:
    task = task_of(tests)
    if tests.startswith("from __future__"):
        task = replace(TARGET, hidden_files={"tests/test_hidden.py": tests})
    twins = twins_of(task)
    assert named(twins) == {"test_a"}
    assert twins.open_tests == {}
    assert any(not exam.failing for exam in twins.exams)
    assert verdict_on(task, TARGET.solution_files["lib/tally.py"]).passed


def test_expectations_in_data_and_in_modules_are_changed() -> None:
    tests = (
        "import json\nfrom tests.wanted import WANTED\n\n"
        "def test_data():\n    with open('tests/wanted.json') as file:\n        wanted = json.load(file)\n"
        "    assert tally([5, 6]) == wanted['sum']\n"
        "def test_module():\n    assert tally([3, 4]) == WANTED['sum']\n"
    )
    task = task_of(
        tests, tests__wanted_dot_py="WANTED = {'sum': 7}\n", tests__wanted_dot_json='{"sum": 11}\n'
    )

    async def scenario(backend: SandboxBackend) -> Twins:
        return await Grader(backend).find_twins(task)

    twins = with_backend("unisolated", scenario)
    assert named(twins) == {"test_data", "test_module"}
    changed = {path for exam in twins.exams for path in exam.files if path != "tests/test_hidden.py"}
    assert changed == {"tests/wanted.py", "tests/wanted.json"}


def test_inputs_are_never_changed_though_the_reference_would_fail() -> None:
    """Where the task says nothing, another right solution may answer otherwise than the reference."""
    tests = "def test_a():\n    xs = [1, 2]\n    assert tally(xs) in (3, None)\n"
    lenient = "def tally(xs):\n    return 3 if sorted(xs) in ([1, 2], [1, 3], [2, 2], [1, 13]) else sum(xs)\n"
    twins = twins_of(task_of(tests))
    assert named(twins) == {"test_a"}
    assert all("[1, 2]" in exam.files["tests/test_hidden.py"] for exam in twins.exams)
    assert verdict_on(task_of(tests), lenient).passed


OPEN = {
    "no reference solution": ("def test_a():\n    assert tally([2])\n", "no reference solution"),
    "fails": ("def test_a():\n    assert tally([2]) > 3\n", "the reference solution fails"),
    "nothing turns it": ("def test_a():\n    tally([2])\n", "makes the reference solution fail"),
    "never ends": ("def test_a():\n    while tally([2]):\n        pass\n", "timeout"),
}  # fmt: skip


@pytest.mark.parametrize(("tests", "reason"), OPEN.values(), ids=OPEN)
def test_a_test_without_a_twin_is_open_and_says_why(tests: str, reason: str) -> None:
    task = task_of(tests)
    if reason == "no reference solution":
        task = replace(task, solution_files={})
    found = asyncio.run(Grader(MemoryBackend(), timeout_s=0.3).find_twins(task)).open_tests
    assert list(found) == ["tests/test_hidden.py::test_a"] and reason in next(iter(found.values()))


def test_only_what_passed_sits_exams_and_each_task_finds_its_twins_once() -> None:
    task = task_of("def test_a():\n    assert tally([2]) > 1\n    assert tally([3]) > 2\n")

    async def scenario() -> list[int]:
        made = 0

        class Counting(MemoryBackend):
            async def create(self, *arguments: object, **options: object):  # type: ignore[override]
                nonlocal made
                made += 1
                return await super().create(*arguments, **options)  # type: ignore[arg-type]

        backend, counts = Counting(), list[int]()
        grader = Grader(backend)
        exams = len((await Grader(MemoryBackend()).find_twins(task)).exams)
        for text in ("def tally(xs):\n    return 0\n", *[TARGET.solution_files["lib/tally.py"]] * 2):
            before = made
            await grader.judge(task, AgentDiff({"lib/tally.py": text.encode()}))
            counts.append(made - before)
        return [*counts, exams]

    failed, first, second, exams = asyncio.run(scenario())
    assert (failed, second) == (1, 1 + exams)
    assert first > second


@pytest.mark.parametrize(
    "line",
    [
        "assert tally([2, 4]) >= 6",
        "assert 6 <= tally([2, 4])",
        "best = tally([2, 4])\n    assert abs(best) >= 6",
        "assert tally([2, 4]) >= least([2, 4])",
    ],
)
def test_who_does_better_than_the_reference_solution_passes_a_bound(line: str) -> None:
    helper = "def least(xs):\n    return sum(xs)\n"
    task = task_of(
        f"from tests.bound import least\n\ndef test_a():\n    {line}\n", tests__bound_dot_py=helper
    )
    assert "test_a" in named(twins_of(task))
    verdict = verdict_on(task, "def tally(xs):\n    return sum(xs) + 10**6\n")
    assert verdict.passed, verdict.cause
    always = "class Yes:\n    __ge__ = lambda *_: True\n    __abs__ = lambda self: self\n"
    assert not verdict_on(task, f"{always}\n\ndef tally(xs):\n    return Yes()\n").passed


def test_what_an_answer_is_subtracted_from_is_changed_on_the_side_of_the_answer() -> None:
    text = "def test_a():\n    y = solve(z)\n    assert abs(y - 3) < 5\n"
    changed = {
        change_sites("t.py", text, {"solve"}, [number])
        for number, (kind, _) in enumerate(find_sites("t.py", text, {"solve"}))
        if kind is not Kind.JUDGEMENT
    }
    assert changed == {text.strip().replace("3", other) for other in ("4", "15")}


@pytest.mark.slow
def test_changes_are_tried_in_runs_whose_reports_stay_far_from_their_limit() -> None:
    lines = "".join(f"    assert tally([2]) in (2, {number})\n" for number in range(60))
    task = task_of(f"def test_a():\n    for _ in range(2000):\n        tally([2])\n{lines}")
    sizes: list[int] = []

    class Weighing(MemorySandbox):
        async def call(self, *arguments: Any, **options: Any) -> Any:
            answer = await super().call(*arguments, **options)
            sizes.append(len(answer[1]))
            return answer

    class Backend(MemoryBackend):
        async def create(self, *arguments: Any, **options: Any) -> MemorySandbox:
            made = await super().create(*arguments, **options)
            made.__class__ = Weighing
            return made

    twins = asyncio.run(Grader(Backend(), timeout_s=30.0).find_twins(task))
    assert twins.exams
    assert max(sizes) < MAX_RESULT_BYTES // 2


def test_a_sandbox_that_died_under_the_reference_solution_is_our_failure_and_is_not_remembered() -> None:
    task = task_of("def test_a():\n    assert tally([2]) in (2, 3)\n")
    dying = [True]

    class Backend(MemoryBackend):
        async def create(self, *arguments: Any, **options: Any) -> MemorySandbox:
            if dying:
                dying.pop()
                raise SandboxKilledByAgentError("its first process died")
            return await super().create(*arguments, **options)

    async def scenario() -> Twins:
        grader = Grader(Backend())
        with pytest.raises(SandboxError, match="reference solution"):
            await grader.find_twins(task)
        return await grader.find_twins(task)

    assert named(asyncio.run(scenario())) == {"test_a"}


@pytest.mark.parametrize(("error", "timed_out"), [("too long", False), (None, True)])
def test_tests_are_open_whose_own_values_could_not_be_found(error: str | None, timed_out: bool) -> None:
    text = "from lib.tally import tally\n\ndef test_a():\n    xs = [2]\n    assert tally(xs) == sum(xs)\n"
    hidden = split_tests("tests/t.py", text, frozenset({"lib"}))

    async def run(files: Mapping[str, str], paths: Sequence[str], times: int) -> ProbeReport:
        is_oracle_run = files == {"tests/t.py": hidden.probe}
        results = [] if is_oracle_run else [ProbeResult(path, "test_a", (), None) for path in paths]
        return ProbeReport(tuple(results), error if is_oracle_run else None, is_oracle_run and timed_out, 0.0)

    twins = asyncio.run(TwinFinder([hidden], {}).find(run))
    assert [*twins.open_tests.values()] == [
        f"what it computes is unknown: {error or 'the reference solution hangs'}"
    ]


def test_forged_parts_earn_nothing_where_parts_are_paid() -> None:
    tests = "def test_a():\n    assert tally([2, 4]) > 5\ndef test_b():\n    assert tally([1]) == 1\n"
    always = "class Yes:\n    __gt__ = lambda *_: True\n\n\ndef tally(xs):\n    return Yes()\n"
    kept = verdict_on(task_of(tests), always)
    paid = verdict_on(task_of(tests), always, RewardConfig(partial_weight=0.5))
    assert (kept.num_passed, paid.num_passed, paid.num_failed) == (1, 0, 2)
    assert paid.cause is not None and "forged" in paid.cause


def test_what_fails_the_second_time_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of("def test_a():\n    assert tally([2]) > 1\ndef test_b():\n    assert tally([3]) > 2\n")
    monkeypatch.setattr(builtins, "asked", [], raising=False)
    verdict = verdict_on(
        task, "def tally(xs):\n    asked.append(xs)\n    return sum(xs) if len(asked) < 3 else 1 / 0\n"
    )
    assert not verdict.passed
    assert verdict.cause is not None and "passes at one time and fails at another" in verdict.cause


def test_causes_are_bounded() -> None:
    verdict = verdict_on(
        task_of("def test_a():\n    assert tally([2]) == 2\n"), "raise ValueError('x' * 10**6)"
    )
    assert verdict.cause is not None and len(verdict.cause) <= CAUSE_CHARS
    assert len(Verdict(False, 0, 1, "y" * 10**6, 0.0).cause or "") == CAUSE_CHARS


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("x = 3", {"x = 4", "x = 15"}),
        ("x = -2.5", {"x = -3.5", "x = -14.0"}),
        ("x = True", {"x = False"}),
        ("x = 'az9'", {"x = 'az8'"}),
        ("x = b''", {"x = b'a'"}),
        ("x = None", {"x = 0"}),
        ("x = []", {"x = [0]"}),
        ("assert y, 'message'", {"assert not y"}),
        ("raise ValueError('no')", set()),
        ("y = solve(3, [4])", set()),
        ("y = [solve(z), 'a']", {"y = [solve(z), 'b']"}),
        ("try:\n    y\nexcept KeyError:\n    pass", {"try:\n    y\nexcept ValueError:\n    pass"}),
    ],
)
def test_each_site_is_changed_into_something_of_its_kind(text: str, changed: set[str]) -> None:
    names = {"solve"}
    numbers = range(len(find_sites("t.py", text, names)))
    assert {change_sites("t.py", text, names, [number]) for number in numbers} == {
        one + ", 'message'" if text.startswith("assert") else one for one in changed
    }


def test_numbers_and_words_of_data_are_sites() -> None:
    assert find_sites("a.json", '{"sum": 11}', ()) == [(Kind.CONSTANT, 0), (Kind.CONSTANT, 1)]
    assert change_sites("a.json", '{"sum": 09}', (), [0, 1]) == '{"sun": 10}'
