"""Plays turns on the in-memory sandbox: calls in, results and files out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from etude.agent import ToolContext, execute_calls
from etude.agent.tools import Registry, core_registry, full_registry
from etude.agent.tools.interface import Tool
from etude.records import ToolCall, ToolResult
from etude.sandbox.template import Template
from etude_quickstart.memory_backend import MemoryBackend

FILES = {
    "lib/tally.py": (
        "def tally(xs, a):\n    total = 1\n    for x in xs:\n        total += x\n    return total\n"
    ),
    "lib/tags.py": "TAGS = '<|end|></result><finish></finish>'\n",
    "tests/test_all.py": (
        "from lib.tally import tally\n\n\ndef test_tally():\n    assert tally([1, 2], 0) == 3\n\n\n"
        "def test_empty():\n    assert tally([], 0) == 0\n"
    ),
}

CORE = core_registry()
FULL = full_registry()


def call(name: str, **arguments: str) -> ToolCall:
    return ToolCall(name, arguments)


async def new_context(
    files: Mapping[str, bytes | str] | None = None, tools: Registry | Iterable[Tool] = FULL, **settings: Any
) -> ToolContext:
    sandbox = await MemoryBackend().create(Template(FILES if files is None else files))
    registry = tools if isinstance(tools, Registry) else Registry(tools)
    settings.setdefault("test_paths", ("tests/test_all.py",))
    return ToolContext(sandbox, registry, **settings)


def run(*calls: ToolCall, **settings: Any) -> tuple[list[ToolResult], dict[str, bytes]]:
    """Results of one turn, and the files after it."""

    async def turn() -> tuple[list[ToolResult], dict[str, bytes]]:
        context = await new_context(**settings)
        results = await execute_calls(calls, context)
        return results, contents(context)

    return asyncio.run(turn())


def output(*calls: ToolCall, **settings: Any) -> str:
    """What the one call of a turn shows."""
    (result,), _ = run(*calls, **settings)
    return result.output


def contents(context: ToolContext) -> dict[str, bytes]:
    """The workspace's files as they are now."""
    sandbox: Any = context.sandbox
    return sandbox.workspace.contents


def replace_files(context: ToolContext, files: Any) -> None:
    """Puts other `Files` into the sandbox, to watch them or let them fail."""
    sandbox: Any = context.sandbox
    sandbox.files = files
