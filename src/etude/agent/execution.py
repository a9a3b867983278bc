"""Runs the calls of one turn.

Neighbouring calls that only read run at the same time; every other call waits for those before it, and
those after it wait for it. So a turn has the outcome of running its calls one after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from etude.agent.tools.interface import ToolContext, failure, shorten
from etude.agent.tools.registry import check_arguments
from etude.errors import AgentError, ToolArgumentError
from etude.records import ToolCall, ToolErrorClass, ToolResult
from etude.sandbox.errors import PathKindError, PathMissingError, SandboxKilledByAgentError

_MESSAGE_CHARACTERS = 160


async def execute_calls(calls: Sequence[ToolCall], context: ToolContext) -> list[ToolResult]:
    """The results of `calls`, in their order. What the agent did wrong is a result.

    Raises InfrastructureError if something behind a tool failed, and SandboxKilledByAgentError if the agent
    ended its own sandbox: neither is an answer that an agent could read.
    """
    results: list[ToolResult] = []
    position = 0
    while position < len(calls):
        end = position + 1
        if _only_reads(calls[position], context):
            while end < len(calls) and _only_reads(calls[end], context):
                end += 1
        if end == position + 1:
            results.append(await execute_call(calls[position], context))
        else:
            results += await _together(calls[position:end], context)
        position = end
    return results


async def execute_call(call: ToolCall, context: ToolContext) -> ToolResult:
    """The result of one call. Raises as `execute_calls`."""
    if call.error is not None:
        return failure(call.error, ToolErrorClass.MALFORMED)
    tool = context.tools.get(call.name)
    if tool is None:
        return failure(f"unknown tool {call.name[:40]}", ToolErrorClass.INVALID_ARGUMENTS)
    start_s = time.perf_counter()
    try:
        check_arguments(tool.schema, call.arguments)
        result = await tool.run(call.arguments, context)
    except SandboxKilledByAgentError:
        raise
    except AgentError as error:
        result = failure(shorten(error.message, _MESSAGE_CHARACTERS), _error_class(error))
    return replace(result, duration_s=time.perf_counter() - start_s)


async def _together(calls: Sequence[ToolCall], context: ToolContext) -> list[ToolResult]:
    """All at once. Waits for all even if one fails, so that nothing runs on behind the turn."""
    outcomes = await asyncio.gather(*(execute_call(call, context) for call in calls), return_exceptions=True)
    results: list[ToolResult] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


def _only_reads(call: ToolCall, context: ToolContext) -> bool:
    if call.error is not None:
        return False
    tool = context.tools.get(call.name)
    return tool is not None and tool.only_reads


def _error_class(error: AgentError) -> ToolErrorClass:
    if isinstance(error, (PathMissingError, PathKindError)) or not isinstance(error, ToolArgumentError):
        return ToolErrorClass.UNEXPECTED_ENVIRONMENT
    return ToolErrorClass.INVALID_ARGUMENTS
