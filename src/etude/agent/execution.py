"""Runs the calls of one turn.

Each call waits for those earlier calls of the turn that it conflicts with (`Access.conflicts`); all others
run at the same time, within `ToolLimits.parallel_calls`. So a turn has the outcome of running its calls one
after the other, and takes as long as its longest chain of calls that depend on each other.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from etude.agent.tools.interface import Access, Tool, ToolContext, failure, shorten, shown
from etude.agent.tools.registry import check_arguments
from etude.errors import AgentError, InfrastructureError, SandboxError, ToolArgumentError, UserAbortedError
from etude.protocols import OnCall, OnResult
from etude.records import ToolCall, ToolErrorClass, ToolResult
from etude.sandbox.errors import PathKindError, PathMissingError, SandboxKilledByAgentError

_MESSAGE_CHARACTERS = 160
_NOTHING = Access()


class LocalWorkspace:
    """Implements `Workspace` on the sandbox and the tools of a context."""

    def __init__(self, context: ToolContext) -> None:
        self.context = context

    async def run_calls(
        self,
        calls: Sequence[ToolCall],
        known: Mapping[int, ToolResult],
        on_call: OnCall,
        on_result: OnResult,
    ) -> list[ToolResult]:
        """See Workspace.run_calls."""
        return await execute_calls(calls, self.context, known, on_call, on_result)

    async def archive(self, path: str, text: str) -> str:
        """See Workspace.archive. A workspace that cannot take the text (a full disk) is the agent's doing."""
        try:
            await self.context.sandbox.files.write(path, text)
        except SandboxKilledByAgentError:
            raise
        except AgentError as error:
            return error.message
        return ""


async def execute_calls(
    calls: Sequence[ToolCall],
    context: ToolContext,
    known: Mapping[int, ToolResult] | None = None,
    on_call: OnCall | None = None,
    on_result: OnResult | None = None,
) -> list[ToolResult]:
    """The results of `calls`, in their order. What the agent did wrong is a result.

    Calls whose results are `known`, by position, are not run. `on_call` and `on_result` are told of the
    others as they begin to run and as they end.

    Raises InfrastructureError if something behind a tool failed, and SandboxKilledByAgentError if the agent
    ended its own sandbox: neither is an answer that an agent could read. Either is raised when every call
    that had begun has ended; the others are not begun then. Of several failures the first in call order is
    raised. Cancelled, it cancels what runs and waits for its end.
    """
    known = known or {}
    plans = [
        _Plan(call, refusal=known[position]) if position in known else _plan(call, context)
        for position, call in enumerate(calls)
    ]
    turn = _Turn(context, plans, on_call, on_result)
    if len(calls) == 1:
        result = await turn.run(0)
        assert result is not None
        return [result]
    tasks = turn.tasks
    for position in range(len(calls)):
        tasks.append(asyncio.create_task(turn.run(position)))
    try:
        if tasks:
            await asyncio.wait(tasks)
    finally:
        await _end(tasks)
    _raise_first(calls, tasks)
    return [result for task in tasks if (result := task.result()) is not None]


@dataclass(frozen=True, slots=True)
class _Plan:
    """One call, looked at before anything runs."""

    call: ToolCall
    tool: Tool | None = None
    access: Access = _NOTHING
    refusal: ToolResult | None = None
    """The result of a call that is not to be run: it makes no sense, or its result is known."""

    @property
    def needs_approval(self) -> bool:
        """Whether it writes to the workspace or runs something there; lists of its own are its own matter."""
        return any(":" not in path for path in self.access.writes)


@dataclass(slots=True, eq=False)
class _Turn:
    """The calls of one turn on their way."""

    context: ToolContext
    plans: list[_Plan]
    on_call: OnCall | None = None
    on_result: OnResult | None = None
    tasks: list[asyncio.Task[ToolResult | None]] = field(default_factory=list)
    failed: bool = False
    """Whether a call has failed in a way that ends the turn: nothing more begins."""
    slots: asyncio.Semaphore = field(init=False)
    approving: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while someone is asked. Fair, so that calls are asked about in their order."""

    def __post_init__(self) -> None:
        self.slots = asyncio.Semaphore(self.context.limits.parallel_calls)

    async def run(self, position: int) -> ToolResult | None:
        """The result of one call, in its turn; None if the turn failed before the call began."""
        plan = self.plans[position]
        if plan.refusal is not None:
            return plan.refusal
        try:
            refusal = await self._ask(plan)
            before = [self.tasks[n] for n in range(position) if self.plans[n].access.conflicts(plan.access)]
            if before:
                await asyncio.wait(before)
            if refusal is not None:
                return refusal
            async with self.slots:
                return None if self.failed else await self._run(position, plan)
        except BaseException:
            self.failed = True
            raise

    async def _run(self, position: int, plan: _Plan) -> ToolResult:
        if self.on_call is not None:
            self.on_call(position, plan.call)
        result = await _run(plan, self.context)
        if self.on_result is not None:
            self.on_result(position, plan.call, result)
        return result

    async def _ask(self, plan: _Plan) -> ToolResult | None:
        """The result of a call that was not approved."""
        if self.context.approve is None or not plan.needs_approval:
            return None
        async with self.approving:
            if self.failed:
                return None
            reason = await self.context.approve(plan.call)
        return None if reason is None else _failure(reason, ToolErrorClass.USER_ABORTED)


def _plan(call: ToolCall, context: ToolContext) -> _Plan:
    if call.error is not None:
        return _Plan(call, refusal=_failure(call.error, ToolErrorClass.MALFORMED))
    tool = context.tools.get(call.name)
    if tool is None:
        message = f"unknown tool {call.name[:40]}"
        return _Plan(call, refusal=_failure(message, ToolErrorClass.INVALID_ARGUMENTS))
    try:
        check_arguments(tool.schema, call.arguments)
    except ToolArgumentError as error:
        return _Plan(call, refusal=_answer(error))
    return _Plan(call, tool, tool.access(call.arguments))


async def _run(plan: _Plan, context: ToolContext) -> ToolResult:
    """Runs a call, more than once only where that is safe and something behind a port failed."""
    assert plan.tool is not None
    start_s = time.perf_counter()
    attempts = context.limits.provider_attempts if plan.tool.repeatable else 1
    for attempt in range(1, attempts + 1):
        try:
            result = await _run_once(plan.tool, plan.call, context)
            return replace(result, duration_s=time.perf_counter() - start_s)
        except SandboxError:
            # The sandbox's own client has tried again already where that could help.
            raise
        except InfrastructureError:
            if attempt == attempts:
                raise
            delay_s = context.limits.provider_backoff_s * 2 ** (attempt - 1)
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
    raise AssertionError("provider_attempts is at least 1")


async def _run_once(tool: Tool, call: ToolCall, context: ToolContext) -> ToolResult:
    try:
        return await tool.run(call.arguments, context)
    except SandboxKilledByAgentError:
        raise
    except AgentError as error:
        return _answer(error)
    except TimeoutError as error:
        # One with an error number comes from the system: a connection of ours, not the agent's doing.
        if error.errno is not None:
            raise
        return _failure(f"{call.name} timed out", ToolErrorClass.TIMEOUT)


async def _end(tasks: Sequence[asyncio.Task[ToolResult | None]]) -> None:
    """Cancels what still runs, and waits until it has ended."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)


def _raise_first(calls: Sequence[ToolCall], tasks: Sequence[asyncio.Task[ToolResult | None]]) -> None:
    """Raises the first failure in call order; it carries a note of the others."""
    failures = [(call, error) for call, task in zip(calls, tasks, strict=True) if (error := task.exception())]
    if not failures:
        return
    for call, error in failures[1:]:
        failures[0][1].add_note(f"{call.name} failed as well: {error!r}")
    raise failures[0][1]


def _answer(error: AgentError) -> ToolResult:
    return _failure(error.message, _error_class(error))


def _failure(message: str, error: ToolErrorClass) -> ToolResult:
    return failure(shown(shorten(message, _MESSAGE_CHARACTERS)), error)


def _error_class(error: AgentError) -> ToolErrorClass:
    match error:
        case UserAbortedError():
            return ToolErrorClass.USER_ABORTED
        case PathMissingError() | PathKindError():
            return ToolErrorClass.UNEXPECTED_ENVIRONMENT
        case ToolArgumentError():
            return ToolErrorClass.INVALID_ARGUMENTS
        case _:
            return ToolErrorClass.UNEXPECTED_ENVIRONMENT
