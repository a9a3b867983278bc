"""Figures of the `acting` families with scripted policies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

from etude.evaluation import evaluate_family, evaluate_masked
from etude.evaluation.acting import MASKED_SAMPLES
from etude.records import Task, ToolCall
from etude_quickstart.observed import CEILING, NUM_RULES, ObservedGenerator, mask_output
from tests.environment.playing import FINISH, TEST, Turn, new_environment, script_of
from tests.fakes.scripted import ScriptedSampler

TASKS = [
    ObservedGenerator(0).build(f"rule-{rule}", "constant", rule, Random("one draw"))
    for rule in range(NUM_RULES)
]
MASKED = [mask_output(task) for task in TASKS]


def edit_of(task: Task, rule: int | None = None) -> ToolCall:
    """Writes the line with the task's own rule, or with another."""
    source = TASKS[int(task.metadata["rule"]) if rule is None else rule]
    path, line = str(task.metadata["path"]), int(task.metadata["line"])
    text = source.solution_files[path].split("\n")[line - 1]
    return ToolCall("edit_lines", {"path": path, "start": str(line), "text": text})


def sampler_of(*turns_of: Sequence[Turn]) -> ScriptedSampler:
    """Plays, in each session, the turns of its task's rule."""

    def play(session_id: str) -> Sequence[Turn]:
        task = session_id.split("/")[1]
        return turns_of[int(task.split("-")[1])]

    return ScriptedSampler(script_of(play))


def test_edits_after_a_run_are_told_from_edits_before_it_or_beside_it() -> None:
    after = [((TEST,), (edit_of(task),), (TEST,), (FINISH,)) for task in TASKS[:4]]
    before = [((edit_of(task),), (TEST,), (FINISH,)) for task in TASKS[4:6]]
    beside = [((TEST, edit_of(task)), (FINISH,)) for task in TASKS[6:7]]
    sampler = sampler_of(*after, *before, *beside, ((TEST,), (FINISH,)))
    figures = asyncio.run(evaluate_family(new_environment(), sampler, TASKS, "observed", 0, 4, 2))
    assert figures["edits_after_run_share"] == 4 / 7, "a session without an edit does not count"
    assert figures["num_tasks"] == NUM_RULES
    assert figures["greedy"]["pass_rate"] == figures["sampled"]["pass_rate"] == figures["pass_at_2"] == 7 / 8
    assert (figures["greedy"]["n"], figures["sampled"]["n"]) == (NUM_RULES, 2 * NUM_RULES)
    assert figures["turns"] == (4 * 4 + 2 * 3 + 2 + 2) / NUM_RULES


def test_a_policy_that_always_writes_one_rule_is_at_the_ceiling_of_the_masked_ablation() -> None:
    sampler = sampler_of(*[((TEST,), (edit_of(task, 3),), (TEST,), (FINISH,)) for task in TASKS])
    figures = asyncio.run(evaluate_masked(new_environment(), sampler, MASKED, CEILING, "masked", 0, 4))
    assert figures["masked_ablation"] == figures["first_edit_ceiling"] == CEILING
    assert figures["masked_sessions"] == MASKED_SAMPLES * NUM_RULES
