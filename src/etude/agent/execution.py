"""Runs the calls of one turn.

Each call waits for those earlier calls of the turn that it conflicts with (`Access.conflicts`); all others
run at the same time, within `ToolLimits.parallel_calls`. So a turn has the outcome of running its calls one
after the other, and takes as long as its longest chain of calls that depend on each other. Read-only calls
that wait for nothing run as one batch where their tool can do that at less cost (`how_together`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from etude.agent.tools.interface import (
    Access,
    Outcome,
    RunTogether,
    Tool,
    ToolContext,
    failure,
    how_together,
    is_path,
    shorten,
    shown,
)
from etude.agent.tools.registry import check_arguments
from etude.errors import AgentError, InfrastructureError, SandboxError, ToolArgumentError, UserAbortedError
from etude.kit.retry import Backoff, retry_async
from etude.kit.tasks import end_tasks
from etude.protocols import OnCall, OnResult
from etude.records import ToolCall, ToolErrorClass, ToolResult
from etude.sandbox.errors import DiskFullError, PathKindError, PathMissingError, SandboxKilledByAgentError

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
        return await execute_calls(calls, self.context, known, on_call, on_result)

    async def archive(self, path: str, text: str) -> str:
        """See Workspace.archive. A failed write (a full disk) is an outcome of the agent's, not an error."""
        try:
            await self.context.sandbox.files.write(path, text)
        except (ToolArgumentError, DiskFullError) as error:
            return error.message
        return ""


async def execute_calls(
    calls: Sequence[ToolCall],
    context: ToolContext,
    known: Mapping[int, ToolResult] | None = None,
    on_call: OnCall | None = None,
    on_result: OnResult | None = None,
) -> list[ToolResult]:
    """Runs `calls` and returns their results in order. The agent's mistakes are results, not exceptions.

    Calls whose results are `known`, by position, are not run. `on_call` and `on_result` are called with the
    others as they begin to run and as they end.

    Raises InfrastructureError if something behind a tool failed, and SandboxKilledByAgentError if the agent
    ended its own sandbox: neither is a result that an agent could read. Either is raised once every started
    call has ended; no further call is started. Of several failures the first in call order is raised.
    Cancellation cancels the running calls and waits for their end.
    """
    known = known or {}
    plans = [
        _Plan(call, refusal=known[position]) if position in known else _plan(call, context)
        for position, call in enumerate(calls)
    ]
    turn = _Turn(context, plans, on_call, on_result)
    units = turn.units()
    if len(units) == 1:
        await turn.run(units[0])
    else:
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(turn.run(unit)) for unit in units]
        turn.tasks = {position: task for unit, task in zip(units, tasks, strict=True) for position in unit}
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            await end_tasks(*tasks)
        _raise_first([calls[unit[0]] for unit in units], tasks)
    return [result for result in turn.results if result is not None]


@dataclass(slots=True, eq=False)
class _Plan:
    """One call, validated before anything runs. Never mutated; frozen dataclasses are slower to create."""

    call: ToolCall
    tool: Tool | None = None
    access: Access = _NOTHING
    refusal: ToolResult | None = None
    """The result of a call that will not run: it is invalid, or its result is already known."""


@dataclass(slots=True, eq=False)
class _Turn:
    """State of one turn while its calls run."""

    context: ToolContext
    plans: list[_Plan]
    on_call: OnCall | None = None
    on_result: OnResult | None = None
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict[int, "asyncio.Task[None]"])
    """Task of each call, by the call's position."""
    together: dict[str, RunTogether | None] = field(default_factory=dict[str, "RunTogether | None"])
    """Batch function of each tool, by name; None: it has none."""
    results: list[ToolResult | None] = field(init=False)
    failed: bool = False
    """Whether a call has failed in a way that ends the turn: nothing more begins."""
    slots: asyncio.Semaphore = field(init=False)
    """Bounds parallel calls."""
    approving: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during an approval request. asyncio locks are FIFO, so approvals follow the order of calls."""

    def __post_init__(self) -> None:
        self.slots = asyncio.Semaphore(self.context.limits.parallel_calls)
        self.results = [plan.refusal for plan in self.plans]

    def units(self) -> list[list[int]]:
        """Call positions, grouped by batch; most batches have one call."""
        if len(self.plans) > self.context.limits.parallel_calls:
            return [[position] for position in range(len(self.plans))]
        units: list[list[int]] = []
        shared: dict[str, list[int]] = {}
        for position, plan in enumerate(self.plans):
            if not self._may_share(position, plan):
                units.append([position])
            elif plan.call.name in shared:
                shared[plan.call.name].append(position)
            else:
                shared[plan.call.name] = [position]
                units.append(shared[plan.call.name])
        return units

    def _may_share(self, position: int, plan: _Plan) -> bool:
        """Whether the call may join a batch of its tool: it needs no approval and waits for nothing."""
        if plan.tool is None or plan.access.writes or plan.access.barrier or self._before(position):
            return False
        name = plan.call.name
        if name not in self.together:
            self.together[name] = how_together(plan.tool, self.context)
        return self.together[name] is not None

    def _before(self, position: int) -> list[int]:
        """The calls that this one waits for."""
        access = self.plans[position].access
        return [n for n in range(position) if self.plans[n].access.conflicts(access)]

    async def run(self, unit: Sequence[int]) -> None:
        """Runs one batch and stores its results; does nothing if the turn has failed before."""
        plan = self.plans[unit[0]]
        if plan.refusal is not None:
            return
        try:
            refusal = await self._request_approval(plan)
            if before := self._before(unit[0]):
                await asyncio.wait({self.tasks[n] for n in before})
            if refusal is not None:
                self.results[unit[0]] = refusal
                return
            async with self.slots:
                await self._run(unit)
        except BaseException:
            self.failed = True
            raise

    async def _run(self, unit: Sequence[int]) -> None:
        if self.failed:
            return
        plans = [self.plans[position] for position in unit]
        if self.on_call is not None:
            for position, plan in zip(unit, plans, strict=True):
                self.on_call(position, plan.call)
        together = self.together.get(plans[0].call.name) if len(unit) > 1 else None
        results = await _run(plans, together, self.context)
        for position, plan, result in zip(unit, plans, results, strict=True):
            self.results[position] = result
            if self.on_result is not None:
                self.on_result(position, plan.call, result)

    async def _request_approval(self, plan: _Plan) -> ToolResult | None:
        """The result of a call that was refused; None if it may run."""
        if self.context.approve is None or not any(map(is_path, plan.access.writes)):
            return None  # the agent's own lists need no approval
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


async def _run(
    plans: Sequence[_Plan], together: RunTogether | None, context: ToolContext
) -> list[ToolResult]:
    """Runs one call, or several of one tool as a batch.

    Repeats them only if the tool is repeatable and infrastructure failed.
    """
    tool = plans[0].tool
    assert tool is not None
    start_s = time.perf_counter()
    limits = context.limits
    backoff = Backoff(
        limits.provider_backoff_s, attempts=limits.provider_attempts if tool.repeatable else 1, jitter=0.5
    )
    outcomes = await retry_async(
        lambda: _run_once(tool, plans, together, context),
        InfrastructureError,
        backoff,
        unless=SandboxError,  # the sandbox client has already retried where that could help
    )
    duration_s = time.perf_counter() - start_s
    return [_result(outcome, duration_s) for outcome in outcomes]


async def _run_once(
    tool: Tool, plans: Sequence[_Plan], together: RunTogether | None, context: ToolContext
) -> Sequence[Outcome]:
    try:
        if together is None:
            return [await tool.run(plans[0].call.arguments, context)]
        return await together([plan.call.arguments for plan in plans])
    except AgentError as error:
        return [error] * len(plans)
    except TimeoutError as error:
        # One with an error number comes from the system: a connection of ours, not the agent's doing.
        if error.errno is not None:
            raise
        return [_failure(f"{plans[0].call.name} timed out", ToolErrorClass.TIMEOUT)] * len(plans)


def _result(outcome: Outcome, duration_s: float) -> ToolResult:
    """Raises SandboxKilledByAgentError, which is never shown to the agent."""
    if isinstance(outcome, SandboxKilledByAgentError):
        raise outcome
    result = _answer(outcome) if isinstance(outcome, AgentError) else outcome
    return ToolResult(result.output, result.error, result.finished, duration_s, result.facts)


def _raise_first(calls: Sequence[ToolCall], tasks: Sequence[asyncio.Task[None]]) -> None:
    """Raises the first failure in the order of the tasks' first calls; it carries a note of the others."""
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
    if isinstance(error, UserAbortedError):
        return ToolErrorClass.USER_ABORTED
    if isinstance(error, ToolArgumentError) and not isinstance(error, PathMissingError | PathKindError):
        return ToolErrorClass.INVALID_ARGUMENTS
    return ToolErrorClass.UNEXPECTED_ENVIRONMENT
