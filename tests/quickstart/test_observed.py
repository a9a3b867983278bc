"""Observed tasks: only the output of a test run reveals the rule, no file or instruction does."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from hashlib import sha256
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent import LocalWorkspace, ToolContext, core_registry
from etude.errors import TaskError
from etude.records import Task, ToolCall
from etude.sandbox.template import Template
from etude_quickstart.frozen import acting_tasks
from etude_quickstart.functions import compile_functions
from etude_quickstart.generator import FUNCTION_SPLITS
from etude_quickstart.memory_backend import MemoryBackend
from etude_quickstart.observed import (
    CEILING,
    NUM_RULES,
    OBSERVED_KINDS,
    ObservedGenerator,
    ObservedKind,
    broken_digit,
    expected_digits,
    mask_output,
)
from etude_quickstart.observed_expert import ObservedExpert, observed_fix_documents
from tests.quickstart.playing import passes

INDICES = st.integers(0, 10_000)
_SALT = re.compile(r'b"([0-9a-f]{8})"')


def outputs_of(task: Task, *calls: ToolCall) -> list[str]:
    """Results of the real tools on an in-memory sandbox."""

    async def run() -> list[str]:
        sandbox = await MemoryBackend().create(Template(task.files, task.id))
        workspace = LocalWorkspace(ToolContext(sandbox, core_registry(), task.test_paths))
        results = await workspace.run_calls(calls, {}, lambda *_: None, lambda *_: None)
        return [result.output for result in results]

    return asyncio.run(run())


@pytest.mark.parametrize("kind", OBSERVED_KINDS)
def test_all_rules_look_alike_before_a_test_run(kind: ObservedKind) -> None:
    """Except for the salt of a digest, everything visible to an agent is the same, byte for byte."""
    tasks = [ObservedGenerator(3).build("draw", kind, rule, Random("draw")) for rule in range(NUM_RULES)]
    code = {path: text for path, text in tasks[0].files.items() if not path.startswith("tests/")}
    for rule, task in enumerate(tasks):
        assert task.instruction == tasks[0].instruction
        tests = task.files[task.test_paths[0]]
        assert {**task.files, task.test_paths[0]: ""} == {**code, task.test_paths[0]: ""}
        hidden_tests = _SALT.split(tests)
        assert [hidden_tests[0], hidden_tests[2]] == _SALT.split(tasks[0].files[task.test_paths[0]])[::2]
        assert sha256(hidden_tests[1].encode()).digest()[0] % NUM_RULES == rule
    assert len({task.solution_files[str(task.metadata["path"])] for task in tasks}) == NUM_RULES
    assert 1 / len(tasks) == CEILING


def test_rules_are_drawn_anew_and_equally_often() -> None:
    tasks = [ObservedGenerator(1).task(index) for index in range(400)]
    rules = Counter((task.metadata["bug_kind"], task.metadata["rule"]) for task in tasks)
    assert len(rules) == len(OBSERVED_KINDS) * NUM_RULES
    by_function: dict[object, set[object]] = {}
    for task in tasks:
        by_function.setdefault(task.metadata["function_hash"], set()).add(task.metadata["rule"])
    assert sum(len(found) > 1 for found in by_function.values()) > len(by_function) / 2
    frozen = Counter(
        (t.metadata["bug_kind"], t.metadata["rule"]) for t in acting_tasks("observed", "heldout", 24)
    )
    assert set(frozen.values()) == {1} and len(frozen) == 24


@pytest.mark.parametrize("kind", OBSERVED_KINDS)
def test_the_runner_prints_a_digit_of_its_own_for_each_rule(kind: ObservedKind) -> None:
    digits = expected_digits(kind)
    assert len({*digits, broken_digit(kind)}) == NUM_RULES + 1
    for rule, digit in enumerate(digits):
        task = ObservedGenerator(2, "heldout").build("draw", kind, rule, Random(rule))
        (output,) = outputs_of(task, ToolCall("run_tests"))
        assert output == f"FAIL {task.metadata['test']}: {broken_digit(kind)} != {digit}\n1 failed, 1 passed"


@given(INDICES, st.sampled_from(FUNCTION_SPLITS))
def test_hidden_tests_accept_the_rule_and_no_other(index: int, split: str) -> None:
    task = ObservedGenerator(5, split).task(index)  # pyright: ignore[reportArgumentType]
    assert passes(task, {**task.files, **task.solution_files}, hidden=True)
    assert not passes(task, task.files, hidden=True)
    kind, rule = task.metadata["bug_kind"], int(task.metadata["rule"])
    rng = Random(index)
    drawn = ObservedGenerator(5, split).build("x", kind, rule, rng)  # pyright: ignore[reportArgumentType]
    for other in set(range(NUM_RULES)) - {rule}:
        wrong = ObservedGenerator(5, split).build("x", kind, other, Random(index))  # pyright: ignore[reportArgumentType]
        path = str(drawn.metadata["path"])
        assert path == wrong.metadata["path"], "the same draw but for the rule"
        assert not passes(drawn, {**drawn.files, path: wrong.solution_files[path]}, hidden=True)


@given(INDICES)
def test_a_masked_run_says_the_same_of_every_rule_and_still_passes_when_right(index: int) -> None:
    task = mask_output(ObservedGenerator(4).task(index))
    (output,) = outputs_of(task, ToolCall("run_tests"))
    assert output == f"FAIL {task.metadata['test']}: False is not True\n1 failed, 1 passed"
    path = str(task.metadata["path"])
    line = int(task.metadata["line"])
    text = task.solution_files[path].split("\n")[line - 1]
    edit = ToolCall("edit_lines", {"path": path, "start": str(line), "text": text})
    assert outputs_of(task, edit, ToolCall("run_tests"))[1] == "2 passed"


def test_functions_of_one_split_are_in_no_other() -> None:
    hashes = {
        split: {ObservedGenerator(0, split).task(index).metadata["function_hash"] for index in range(150)}
        for split in FUNCTION_SPLITS
    }
    assert len(hashes["heldout"]) == 18, "three for each of two constants and three kinds"
    assert not hashes["train"] & hashes["heldout"]
    assert not (hashes["train"] | hashes["heldout"]) & hashes["validation"]


def test_the_solution_is_the_broken_file_but_for_one_line() -> None:
    for index in range(20):
        task = ObservedGenerator(8).task(index)
        path, line = str(task.metadata["path"]), int(task.metadata["line"])
        pairs = zip(task.files[path].split("\n"), task.solution_files[path].split("\n"), strict=True)
        assert [number for number, (old, new) in enumerate(pairs, 1) if old != new] == [line]
        assert compile_functions([task.solution_files[path]])


def test_an_expert_that_runs_the_tests_first_knows_the_rule_and_another_does_not() -> None:
    solved = {share: sum(_solves(index, share) for index in range(40)) for share in (0.0, 1.0)}
    assert solved[1.0] >= 20
    assert solved[0.0] <= 10


def _solves(index: int, run_first: float) -> bool:
    """Whether the first edit of a session is right."""
    task = ObservedGenerator(9).task(index)
    expert = ObservedExpert(task, Random(index), run_first)

    async def play() -> bool:
        sandbox = await MemoryBackend().create(Template(task.files, task.id))
        workspace = LocalWorkspace(ToolContext(sandbox, core_registry(), task.test_paths))
        results = None
        while not expert.done:
            calls = [part for part in expert.message(results) if isinstance(part, ToolCall)]
            results = await workspace.run_calls(calls, {}, lambda *_: None, lambda *_: None)
            if any(result.facts.get("kind") == "edit" for result in results):
                break
        text = await sandbox.files.read(str(task.metadata["path"]))
        return text.decode() == task.solution_files[str(task.metadata["path"])]

    return asyncio.run(play())


def test_fix_documents_show_the_run_before_the_line() -> None:
    for text in observed_fix_documents(1, 10):
        assert re.search(r"\nFAIL test_\w+: \d != \d\n1 failed, 1 passed\nfix \d+\t +\w", text)


def test_unknown_splits_are_refused() -> None:
    with pytest.raises(TaskError, match="split"):
        ObservedGenerator(0, "heldout_family")  # pyright: ignore[reportArgumentType]
