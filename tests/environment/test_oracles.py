"""Values that tests compute are recorded if right solutions leave them alone, and must not change."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from etude.environment.grading import Verdict
from etude.environment.hidden_tests import oracles_in, split_tests
from etude.environment.oracles import copy_arguments, stable_oracles
from etude.environment.scripts import AgentDiff
from etude.environment.verdicts import Grader
from etude.records import Task
from etude.sandbox.inside.running import MAX_RESULT_BYTES
from etude.sandbox.inside.testrunner import run_probe_files
from etude.sandbox.types import ProbeReport, ProbeResult
from etude_quickstart.memory_backend import MemoryBackend
from tests.environment.target import TARGET
from tests.environment.test_hidden_tests import OneFile

HEAD = "import math, random, time\nfrom lib.tally import tally\nfrom tests.checking import check\n\n"


def probe_of(lines: str) -> str:
    """The last line of a test as it enters."""
    body = "\n".join("    " + line for line in lines.split("\n"))
    file = split_tests("tests/t.py", f"{HEAD}def test_a():\n{body}\n", frozenset({"lib"}))
    return file.probe.rstrip().split("\n")[-1].strip()


def verdict_on(tests: str, text: str) -> tuple[Verdict, list[str]]:
    """(what a file earns, the open tests' reasons) on the shipped target with other hidden tests."""
    hidden = {"tests/test_hidden.py": f"from lib.tally import tally\n\n\n{tests}"}
    task: Task = replace(TARGET, hidden_files=hidden)

    async def scenario() -> tuple[Verdict, list[str]]:
        grader = Grader(MemoryBackend())
        verdict = await grader.judge(task, AgentDiff({"lib/tally.py": text.encode()}))
        return verdict, [*(await grader.find_twins(task)).open_tests.values()]

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("lines", "probe"),
    [
        (
            "assert abs(tally(x) - math.sqrt(2)) < 1e-9",
            "abs(tally(x) - __record__(-10, math.sqrt(2))) < 1e-09)",
        ),
        ("xs = [1]\nassert tally(xs) == sum(xs)", "__record__(-11, tally(xs)) == __record__(-10, sum(xs)))"),
        ("xs = [1]\nassert sum(xs) == tally(xs)", "__record__(-10, sum(xs)) == __record__(-11, tally(xs)))"),
        (
            "assert all(tally(n) == w for n, w in TABLE)",
            "tally(n)) == __record__(-10, w) for n, w in TABLE)))",
        ),
        ("check(tally, [3], math.sqrt(9))", "check(tally, [3], __record__(-10, math.sqrt(9)))"),
        ("r = random.Random(1)\nassert tally([2]) == r.random()", "== __record__(-10, r.random()))"),
    ],
)
def test_operands_and_arguments_without_the_solution_are_recorded(lines: str, probe: str) -> None:
    assert probe_of(lines).endswith(probe)


@pytest.mark.parametrize(
    "lines",
    [
        "assert tally([1]) == 3",
        "xs = [1]\nassert tally(xs) == 3",
        "y = tally([1])\nassert tally([2]) == y + y",
        "out = []\ntally(out)\nassert out == sorted(out)",
        "assert tally([1]) == random.random()",
        "assert tally([1]) < time.time()",
        "assert tally([1]) == len(open('tests/n').read())",
        "if TABLE:\n    assert tally([1]) == sum(TABLE)",
        "assert tally([1]) == 2 or tally([1]) == sum(TABLE)",
        "assert any(tally([n]) == math.sqrt(n) for n in TABLE)",
        "if not TABLE:\n    return\nassert tally([1]) == sum(TABLE)",
        "for n in TABLE:\n    if n:\n        break\n    assert tally([1]) == sum(TABLE)",
        "check(tally, lambda n: n)",
        "w = 9\nfor line in tally(w):\n    assert len(line) <= w",
        "w = 9\nassert all(len(line) <= w for line in tally(w))",
        "w = 9\nassert sum([len(line) - w for line in tally(w)]) == 0",
    ],
)
def test_nothing_is_recorded_that_right_solutions_may_change_or_skip(lines: str) -> None:
    assert "__record__(-" not in probe_of(lines)


def test_known_is_what_was_alike_twice_and_answers_only_where_they_equal_it() -> None:
    assert stable_oracles({-10: [1], -11: [1], -12: [2]}, {-10: [1], -11: [1], -12: [3]}) == {
        -10: [1],
        -11: [1],
    }
    assert stable_oracles({-10: [1], -11: [0]}, {-10: [1], -11: [0]}) == {-10: [1]}


SUM = "def test_a():\n    xs = [3, 1]\n    assert tally(xs) == sum(xs)\n"


@pytest.mark.parametrize(
    "text",
    [
        "def tally(xs):\n    xs.clear()\n    return 0\n",
        "class Yes(int):\n    __eq__ = lambda *_: True\n\ndef tally(xs):\n    return Yes()\n",
    ],
    ids=["emptied input", "equal to everything"],
)
def test_a_bent_oracle_earns_nothing(text: str) -> None:
    verdict, reasons = verdict_on(SUM, text)
    assert not verdict.passed
    assert "forged" in str(verdict.cause)
    assert reasons == []


def test_right_solutions_that_change_their_input_pass() -> None:
    text = "def tally(xs):\n    total = 0\n    for x in xs:\n        total += x\n    return float(total)\n"
    assert verdict_on(SUM, text)[0].passed


def recorded(expression: str, rounds: int = 1, index: int = -10) -> object:
    """What a test records that computes an expression for itself in so many rounds."""
    text = f"def test_a():\n    for n in range({rounds}):\n        __record__({index}, {expression})\n"
    run = run_probe_files(OneFile(text), ["t.py"])
    assert len(json.dumps(run)) < MAX_RESULT_BYTES // 1000
    (found,) = oracles_in_run(run["results"]).values()
    return found


def oracles_in_run(results: list[list[object]]) -> dict[int, object]:
    ((path, name, values, error),) = results
    report = ProbeReport((ProbeResult(str(path), str(name), tuple(values), error),), None, False, 0.0)  # type: ignore[arg-type]
    return dict(oracles_in(report)["t.py", "test_a"])


@pytest.mark.parametrize(("expression", "rounds"), [("list(range(20_000))", 1), ("('a' * 900)", 300)])
def test_what_tests_compute_takes_little_room_however_large_it_is(expression: str, rounds: int) -> None:
    assert recorded(expression, rounds) == recorded(expression, rounds, -11)
    assert recorded(expression, rounds) != recorded(f"{expression}[1:]", rounds)
    assert recorded(expression, rounds) != recorded(expression, rounds + 1)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("[1, True, -0.0]", "[1.0, 1, 0]"),
        ("{1, 'a', 2.5}", "{'a', 2.5, True}"),
        ("{1: [2], 'a': {3}}", "{'a': {3.0}, True: [2]}"),
        ("2 ** 80", "2.0 ** 80"),
        ("float('inf')", "1e999"),
    ],
)
def test_equal_data_have_one_digest(one: str, other: str) -> None:
    assert recorded(one) == recorded(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("[1]", "(1,)"),
        ("'1'", "1"),
        ("'61'", "b'a'"),
        ("[[1], 2]", "[[1, 2]]"),
        ("{1: 2}", "{2: 1}"),
        ("0.1 + 0.2", "0.3"),
        ("object", "object"),
        ("[object()]", "[object()]"),
    ],
)
def test_other_data_have_other_digests_and_what_is_no_data_equals_nothing(one: str, other: str) -> None:
    assert recorded(one) != recorded(other)


@pytest.mark.parametrize(
    "tests",
    [
        "def test_a():\n    assert tally([1, 2]) == tally([2, 1])\n",
        "import time\n\n\ndef test_a():\n    start = time.monotonic()\n    tally([])\n"
        "    assert time.monotonic() - start < 9\n",
        "import random\n\n\ndef test_a():\n    random.seed(1)\n    n = random.random()\n"
        "    assert tally([n]) == n\n",
    ],
    ids=["itself", "a clock", "the shared generator"],
)
def test_a_test_that_compares_with_what_the_solution_can_change_is_open(tests: str) -> None:
    verdict, reasons = verdict_on(tests, TARGET.solution_files["lib/tally.py"])
    assert verdict.passed
    assert reasons == [
        "what it expects is computed from what the solution can change: itself, a clock, the shared generator"
    ]


def test_a_solution_that_is_given_copies_changes_nothing_of_the_tests_own() -> None:
    probe = "xs, rest, more = [1], [[2], [3]], {4}\nanswer = take(xs, *rest, more=more)\nseen = answer[:]\n"

    def take(*lists: list[int], more: set[int]) -> list[int]:
        found = [one.pop() for one in lists]
        return [*found, more.pop()]

    names: dict[str, object] = {"take": take}
    exec(copy_arguments(probe, {"take"}), names)
    assert (names["xs"], names["rest"], names["more"]) == ([1], [[2], [3]], {4})
    assert names["answer"] == names["seen"] == [1, 2, 3, 4]


def test_a_solution_is_given_generators_and_functions_as_they_are() -> None:
    names: dict[str, object] = {"take": lambda given, *, key: sorted(given, key=key)}
    exec(copy_arguments("answer = take((x for x in [1, 2]), key=lambda x: -x)\n", {"take"}), names)
    assert names["answer"] == [2, 1]
