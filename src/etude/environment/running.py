"""Runs the turns of a session: one at a time, and each once, however often it is requested."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from etude.agent import ToolContext, execute_calls
from etude.agent.inputs import call_document, result_document
from etude.agent.journal import INTERRUPTED
from etude.agent.tools import Tool
from etude.environment.history import EventLog, History, TurnConflictError
from etude.kit.tasks import start_watched
from etude.protocols import OnCall, OnResult
from etude.records import ToolCall, ToolErrorClass, ToolResult

_FINISH = "finish"


@dataclass(slots=True)
class ToolTime:
    """A task's time limit for all calls of the agent together. When it is used up, calls other than `finish`
    time out at once; until then no command may take longer than the remaining time."""

    limit_s: float
    """0: no limit."""
    spent_s: float = 0.0

    async def execute(
        self,
        calls: Sequence[ToolCall],
        context: ToolContext,
        known: Mapping[int, ToolResult],
        on_call: OnCall,
        on_result: OnResult,
    ) -> list[ToolResult]:
        """As `execute_calls`."""
        if not self.limit_s:
            return await execute_calls(calls, context, known, on_call, on_result)
        left_s, began = self.limit_s - self.spent_s, time.monotonic()
        if left_s <= 0:
            words = f"the time for this task is over: {self.limit_s:g} s for all calls together"
            over = ToolResult(words, ToolErrorClass.TIMEOUT)
            known = {place: over for place, call in enumerate(calls) if call.name != _FINISH} | dict(known)
        most_s = min(context.limits.command_timeout_s, max(left_s, 1e-3))
        context = replace(context, limits=replace(context.limits, command_timeout_s=most_s))
        try:
            return await execute_calls(calls, context, known, on_call, on_result)
        finally:
            self.spent_s += time.monotonic() - began


@dataclass(slots=True, eq=False)
class RunningTurn:
    """A turn that is running: its calls, and the results so far."""

    number: int
    calls: tuple[ToolCall, ...]
    key: str | None
    listeners: tuple[OnCall, OnResult]
    """Of its first caller."""
    events: EventLog
    """The session's."""
    begun: list[int] = field(default_factory=list[int])
    """Positions, in the order in which they began."""
    results: dict[int, ToolResult] = field(default_factory=dict[int, ToolResult])
    """By position, in the order in which they ended."""
    task: asyncio.Task[list[ToolResult]] = field(init=False)

    def on_call(self, position: int, call: ToolCall) -> None:
        """Called when a call begins to run."""
        self.begun.append(position)
        self.events.put("call_started", turn=self.number, position=position, call=call_document(call))
        self.listeners[0](position, call)

    def on_result(self, position: int, call: ToolCall, result: ToolResult) -> None:
        """Called when a call has ended."""
        self.results[position] = result
        self.events.put("call_ended", turn=self.number, position=position, result=result_document(result))
        self.listeners[1](position, call, result)

    def known_results(self, tools: Mapping[str, Tool]) -> dict[int, ToolResult]:
        """Results for another attempt at a failed turn, so that no side effect is repeated.

        A call that had begun and must not be repeated has the result "interrupted".
        """
        known = dict(self.results)
        for position in self.begun:
            tool = tools.get(self.calls[position].name)
            if position not in known and (tool is None or not tool.repeatable):
                known[position] = ToolResult(INTERRUPTED, ToolErrorClass.PROVIDER)
        return known


class TurnRunner(ABC):
    """Runs the turns of one session: the base class of `EnvironmentSession`, which implements a turn."""

    def __init__(self, history: History, tools: Mapping[str, Tool]) -> None:
        self.history = history
        self.events = EventLog()
        self._running: RunningTurn | None = None
        self._tools = tools
        self._failed: RunningTurn | None = None

    @abstractmethod
    def _check_open(self) -> None:
        """Raises SandboxError if no turn may begin now."""

    @abstractmethod
    async def _run_turn(self, turn: RunningTurn, known: Mapping[int, ToolResult]) -> list[ToolResult]:
        """Runs a turn's calls, except those with `known` results, and adds it to the history."""

    @property
    def in_turn(self) -> bool:
        """Whether a turn runs."""
        return self._running is not None

    async def run_calls(
        self,
        calls: Sequence[ToolCall],
        known: Mapping[int, ToolResult],
        on_call: OnCall,
        on_result: OnResult,
    ) -> list[ToolResult]:
        """See Workspace.run_calls. Waits for a running turn; if cancelled, cancels and awaits its own."""
        while (before := self._running) is not None:
            await asyncio.wait({before.task})
        running = self._begin(calls, None, (on_call, on_result), known)
        try:
            return await asyncio.shield(running.task)
        except asyncio.CancelledError:
            running.task.cancel()
            await asyncio.wait({running.task})
            raise

    async def turn(
        self,
        calls: Sequence[ToolCall],
        number: int | None,
        on_call: OnCall,
        on_result: OnResult,
        known: Mapping[int, ToolResult] | None = None,
        key: str | None = None,
    ) -> list[ToolResult]:
        """Runs a turn for a client that may lose its connection, identified by its number (from 0) or a key.
        A repeated request returns the results and runs nothing.

        The turn continues if the caller stops waiting. Raises UserError for a number or key that was used
        with other calls, and as `run_calls`.
        """
        while (before := self._running) is not None and before.number < len(self.history.turns):
            # The turn before is in the history, and its snapshot is being taken: the next one waits for that.
            await asyncio.wait({before.task})
        kept = self.history.find(number, key, calls)
        if kept is not None:
            return list(kept.results)
        running = self._running
        if running is None:
            running = self._begin(calls, key, (on_call, on_result), known or {})
        elif running.calls != tuple(calls) or (number is None and (not key or key != running.key)):
            raise TurnConflictError(
                "another turn is running",
                field="turn",
                received=number,
                fix="wait for its end, or send the calls together as one turn",
            )
        return await asyncio.shield(running.task)

    def _begin(
        self,
        calls: Sequence[ToolCall],
        key: str | None,
        listeners: tuple[OnCall, OnResult],
        known: Mapping[int, ToolResult],
    ) -> RunningTurn:
        self._check_open()
        running = RunningTurn(len(self.history.turns), tuple(calls), key, listeners, self.events)
        before, self._failed = self._failed, None
        if before is not None and before.number == running.number and before.calls == running.calls:
            known = {**before.known_results(self._tools), **known}
        self._running = running
        running.task = start_watched(self._run(running, known))
        return running

    async def _run(self, running: RunningTurn, known: Mapping[int, ToolResult]) -> list[ToolResult]:
        try:
            return await self._run_turn(running, known)
        except BaseException:
            running.results |= {place: known[place] for place in known if place < len(running.calls)}
            self._failed = running
            raise
        finally:
            self._running = None


def was_run(result: ToolResult) -> bool:
    """Whether the call was run: a refused one (malformed, not approved) took no time."""
    return result.duration_s > 0


def ignore_event(*event: object) -> None:
    """A listener for calls and results that does nothing."""
