"""The workspace of a person's session: a sandbox whose changes go to the repository after each turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from etude.agent import LocalWorkspace, ToolContext
from etude.agent.tools.interface import Access, is_path
from etude.controller.agent.changes import TurnChange
from etude.controller.agent.events import (
    CallsRequested,
    FilesChanged,
    Notice,
    OnAgentEvent,
    ToolCallEnded,
    ToolCallStarted,
)
from etude.controller.agent.folders import SessionFolder
from etude.controller.agent.mirror import Mirror
from etude.errors import AgentError
from etude.protocols import OnCall, OnResult
from etude.records import ToolCall, ToolResult

EVERYTHING = "."
"""Denotes all files among those that were kept back."""


@dataclass(slots=True, eq=False)
class MirroredWorkspace:
    """Implements `Workspace`: a LocalWorkspace that exchanges changes with the tree around each turn.

    Results are those of LocalWorkspace, so tokens are the same as in rollouts.
    """

    context: ToolContext
    mirror: Mirror
    folder: SessionFolder
    emit: OnAgentEvent
    turn: Callable[[], int]
    """Number of the agent's current message, from 1."""
    shown: set[str] = field(default_factory=set[str])
    """Paths that stay in the sandbox and were reported to the person."""
    _change_number: int | None = None
    """Number of the current turn's change, once a part of it is on disk."""

    async def run_calls(
        self,
        calls: Sequence[ToolCall],
        known: Mapping[int, ToolResult],
        on_call: OnCall,
        on_result: OnResult,
    ) -> list[ToolResult]:
        turn = self.turn()
        shown: set[int] = set()

        def on_begin(position: int, call: ToolCall) -> None:
            if touched := self.mirror.record_originals(self._files_of([call], reads=False)):
                self._save_change(TurnChange(0, turn, 0, touched))
            self.emit(ToolCallStarted(turn, position, call))
            on_call(position, call)

        def on_end(position: int, call: ToolCall, result: ToolResult) -> None:
            on_result(position, call, result)
            shown.add(position)
            self.emit(ToolCallEnded(turn, position, call, result))

        schemas = tuple(tool.schema for tool in self.context.tools.values())
        self.emit(CallsRequested(turn, tuple(calls), schemas))
        await self.mirror.refresh(self._files_of(calls))
        results = await LocalWorkspace(self.context).run_calls(calls, known, on_begin, on_end)
        for position, (call, result) in enumerate(zip(calls, results, strict=True)):
            if position not in shown:
                self.emit(ToolCallEnded(turn, position, call, result))
        if len(known) < len(calls):
            await self.finish_turn(turn, tuple(results))
        return results

    async def archive(self, path: str, text: str) -> str:
        return await LocalWorkspace(self.context).archive(path, text)

    async def finish_turn(self, turn: int, results: tuple[ToolResult, ...] | None) -> None:
        """Copies the sandbox's changes: first to the session's folder, then to the tree."""
        try:
            files = await self.mirror.changes(self.context.state.changed)
        except AgentError as error:
            self.mirror.refused[EVERYTHING] = error.message
            self.emit(Notice(f"nothing was written: {error.message}"))
            return
        self.mirror.refused.pop(EVERYTHING, None)
        kept_back: dict[str, str] = {}
        if files or self._change_number is not None:
            self._save_change(TurnChange(0, turn, 0, files, results, self.mirror.writes))
            self._change_number = None
            kept_back = await self.mirror.apply(files)
        kept_back |= self._new_staying()
        if files or kept_back:
            self.emit(FilesChanged(turn, files, self.mirror.writes, kept_back))

    def _save_change(self, change: TurnChange) -> None:
        """Saves a change durably under the turn's number; replaces what was saved of it before."""
        if self._change_number is None:
            self._change_number = self.folder.next_number()
        prompt = len(self.folder.meta.prompts)
        self.folder.save_change(replace(change, number=self._change_number, prompt=prompt))

    def _new_staying(self) -> dict[str, str]:
        """Paths that stay in the sandbox and were not reported yet, and why."""
        if new := [name for name in self.mirror.byproducts if name not in self.shown]:
            self.emit(Notice(f"ignored by git, and so left in the sandbox: {', '.join(new)}"))
        staying = {path: why for path, why in self.mirror.staying.items() if path not in self.shown}
        self.shown |= staying.keys() | set(new)
        return staying

    def _files_of(self, calls: Iterable[ToolCall], reads: bool = True) -> list[str]:
        """The files that these calls name for writing or, with `reads`, for reading."""
        paths: set[str] = set()
        for call in calls:
            tool = None if call.error else self.context.tools.get(call.name)
            access = tool.access(call.arguments) if tool is not None else Access()
            paths |= access.writes | (access.reads if reads else frozenset())
        return sorted(path for path in paths if path != "." and is_path(path))
