"""Tools run in real sandboxes (`local`, skipped where it cannot run) and in the in-memory one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from tests.sandbox.backends import with_sandbox

from etude.agent import ToolContext, execute_calls
from etude.agent.tools import Registry
from etude.agent.tools.interface import Tool
from etude.records import ToolCall, ToolResult
from etude.sandbox.template import Template
from etude_quickstart.memory_backend import MemoryBackend

Result = TypeVar("Result")
Call = Callable[..., Awaitable[ToolResult]]


def caller(context: ToolContext, default: str) -> Call:
    """`await call(command="ls")` runs one call of the tool `default` through the harness."""

    async def call(name: str = default, /, **arguments: str) -> ToolResult:
        (result,) = await execute_calls([ToolCall(name, arguments)], context)
        return result

    return call


def in_local(
    tools: Iterable[Tool],
    scenario: Callable[[Call, ToolContext], Awaitable[Result]],
    files: Mapping[str, bytes | str] | None = None,
    **settings: Any,
) -> Result:
    """Runs a scenario with the tools over a real sandbox."""
    tools = list(tools)

    async def run(sandbox: Any) -> Result:
        context = ToolContext(sandbox, Registry(tools), **settings)
        return await scenario(caller(context, tools[0].schema.name), context)

    return with_sandbox("local", dict(files or {}), run)


def in_memory(
    tools: Iterable[Tool],
    scenario: Callable[[Call, ToolContext], Awaitable[Result]],
    files: Mapping[str, bytes | str] | None = None,
    **settings: Any,
) -> Result:
    """Runs a scenario with the tools over the in-memory sandbox."""
    tools = list(tools)

    async def run() -> Result:
        sandbox = await MemoryBackend().create(Template(files or {}))
        context = ToolContext(sandbox, Registry(tools), **settings)
        return await scenario(caller(context, tools[0].schema.name), context)

    return asyncio.run(run())
