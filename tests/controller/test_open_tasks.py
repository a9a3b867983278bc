"""How many tasks of a set are open is said, and listed for their authors."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from etude.controller.open_tasks import say_open_tasks
from etude.records import Task
from etude.sandbox.fake import MemoryBackend
from etude.sandbox.types import Resources
from tests.environment.target import TARGET

OPEN = replace(
    TARGET,
    id="target/open",
    hidden_files={"tests/test_hidden.py": "from lib.tally import tally\n\ndef test_a():\n    tally([1])\n"},
)


def said_of(*tasks: Task) -> list[str]:
    said: list[str] = []
    asyncio.run(say_open_tasks(tasks, MemoryBackend(), Resources(), said.append))
    return said


def test_the_share_of_open_tasks_is_said_with_a_reason() -> None:
    share, named = said_of(TARGET, OPEN, TARGET, TARGET)
    assert share == "open tasks: 1 of 4 (25%), whose hidden tests could be forged"
    assert named.startswith("  target/open: tests/test_hidden.py::test_a: none of ")


def test_closed_sets_are_said_to_be_closed_and_generated_ones_are_not_looked_at() -> None:
    assert said_of(TARGET) == ["open tasks: 0 of 1 (0%)"]
    assert said_of() == []
