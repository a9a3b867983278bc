"""Tasks whose hidden tests could be forged: said when a run begins, and listed for their authors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from etude.environment.twins import OpenTest
from etude.environment.verdicts import Grader
from etude.records import Task
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.types import Resources

_LOOKED_AT = 200
_NAMED = 5


async def find_open_tasks(
    tasks: Sequence[Task], backend: SandboxBackend, limits: Resources | None = None
) -> AsyncIterator[tuple[Task, tuple[OpenTest, ...]]]:
    """Each task, with the tests that its twins leave open. Raises as `Grader.find_twins`."""
    grader = Grader(backend, limits)
    for task in tasks:
        yield task, (await grader.find_twins(task)).open_tests


async def say_open_tasks(
    tasks: Sequence[Task], backend: SandboxBackend, limits: Resources, say: Callable[[str], None]
) -> None:
    """Says how many tasks of a set are open; of a large set, of some spread over it. Closes the backend."""
    try:
        every = max(1, -(-len(tasks) // _LOOKED_AT))
        looked_at = tasks[::every]
        found = [pair async for pair in find_open_tasks(looked_at, backend, limits) if pair[1]]
    finally:
        await backend.close()
    if not looked_at:
        return
    say(
        f"open tasks: {len(found)} of {len(looked_at)} ({len(found) / len(looked_at):.0%})"
        + (", whose hidden tests could be forged" if found else "")
    )
    for task, tests in found[:_NAMED]:
        say(f"  {task.id}: {tests[0].test}: {tests[0].reason}")
