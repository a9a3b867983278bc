"""The evaluation tasks stay as they were committed."""

from __future__ import annotations

import json
from collections import Counter
from importlib import resources
from typing import cast

import pytest

from etude.evaluation import tasks_digest
from etude_quickstart.acting import ACTING_SUITES, ActingFamily
from etude_quickstart.frozen import FROZEN_COUNT, acting_tasks, evaluation_tasks
from etude_quickstart.generator import SPLITS, FunctionSplit, Split

COMMITTED = json.loads(resources.files("etude_quickstart").joinpath("frozen_digests.json").read_text("utf-8"))
"""Split, or family_split -> digest of its first 240 evaluation tasks."""


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_evaluation_tasks_are_the_committed_ones(split: Split) -> None:
    tasks = evaluation_tasks(split)
    assert len(tasks) == FROZEN_COUNT
    assert tasks_digest(tasks) == COMMITTED[split], (
        "the frozen evaluation tasks changed: old figures no longer compare with new ones"
    )


@pytest.mark.slow
def test_levels_and_bug_kinds_come_equally_often() -> None:
    tasks = evaluation_tasks("heldout")
    assert Counter(task.metadata["level"] for task in tasks) == {1: 80, 2: 80, 3: 80}
    assert set(Counter(task.metadata["bug_kind"] for task in tasks).values()) == {20}


@pytest.mark.slow
@pytest.mark.parametrize("suite", ACTING_SUITES)
def test_tasks_of_acting_families_are_the_committed_ones(suite: str) -> None:
    family, _, split = suite.partition("_")
    tasks = acting_tasks(cast(ActingFamily, family), cast(FunctionSplit, split))
    assert tasks_digest(tasks) == COMMITTED[suite], "old figures no longer compare with new ones"


def test_fewer_tasks_are_the_first_of_more() -> None:
    assert evaluation_tasks("heldout", 15) == evaluation_tasks("heldout", 30)[:15]


def test_digest_sees_every_change() -> None:
    tasks = evaluation_tasks("validation", 3)
    assert tasks_digest(tasks) != tasks_digest(tasks[::-1])
