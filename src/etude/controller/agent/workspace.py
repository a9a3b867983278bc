"""The workspace of a person's session: a sandbox whose changes reach the repository as each turn ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from etude.agent import LocalWorkspace, ToolContext
from etude.agent.tools.interface import Access, is_path
from etude.controller.agent.changes import TurnChange
from etude.controller.agent.events import CallDone, CallRuns, CallsMade, FilesChanged, Noted, OnAgentEvent
from etude.controller.agent.folders import SessionFolder
from etude.controller.agent.mirror import Mirror
from etude.errors import AgentError
from etude.protocols import OnCall, OnResult
from etude.records import ToolCall, ToolResult

EVERYTHING = "."
"""Stands for all files among those that were kept back."""


@dataclass(slots=True, eq=False)
class MirroredWorkspace:
    """Implements `Workspace`: LocalWorkspace, and around each turn the exchange with the tree.

    Results are those of LocalWorkspace, so tokens are the same as anywhere else.
    """

    context: ToolContext
    mirror: Mirror
    folder: SessionFolder
    emit: OnAgentEvent
    turn: Callable[[], int]
    """Number of the agent's present message, from 1."""
    shown: set[str] = field(default_factory=set[str])
    """What stays in the sandbox, as far as the person has read it."""
    _kept: int | None = None
    """Number of the present turn's change, once something of it is on disk."""

    async def run_calls(
        self,
        calls: Sequence[ToolCall],
        known: Mapping[int, ToolResult],
        on_call: OnCall,
        on_result: OnResult,
    ) -> list[ToolResult]:
        turn = self.turn()
        shown: set[int] = set()

        def begins(position: int, call: ToolCall) -> None:
            if touched := self.mirror.touch(self._files_of([call], reads=False)):
                self._keep(TurnChange(0, turn, 0, touched))
            self.emit(CallRuns(turn, position, call))
            on_call(position, call)

        def ends(position: int, call: ToolCall, result: ToolResult) -> None:
            on_result(position, call, result)
            shown.add(position)
            self.emit(CallDone(turn, position, call, result))

        schemas = tuple(tool.schema for tool in self.context.tools.values())
        self.emit(CallsMade(turn, tuple(calls), schemas))
        await self.mirror.refresh(self._files_of(calls))
        results = await LocalWorkspace(self.context).run_calls(calls, known, begins, ends)
        for position, (call, result) in enumerate(zip(calls, results, strict=True)):
            if position not in shown:
                self.emit(CallDone(turn, position, call, result))
        if len(known) < len(calls):
            await self.settle(turn, tuple(results))
        return results

    async def archive(self, path: str, text: str) -> str:
        return await LocalWorkspace(self.context).archive(path, text)

    async def settle(self, turn: int, results: tuple[ToolResult, ...] | None) -> None:
        """Takes over what changed in the sandbox: to disk first, then to the tree."""
        try:
            files = await self.mirror.changes(self.context.state.changed)
        except AgentError as error:
            self.mirror.refused[EVERYTHING] = error.message
            self.emit(Noted(f"nothing was written: {error.message}"))
            return
        self.mirror.refused.pop(EVERYTHING, None)
        kept_back: dict[str, str] = {}
        if files or self._kept is not None:
            self._keep(TurnChange(0, turn, 0, files, results, self.mirror.writes))
            self._kept = None
            kept_back = await self.mirror.apply(files)
        kept_back |= self._not_shown()
        if files or kept_back:
            self.emit(FilesChanged(turn, files, self.mirror.writes, kept_back))

    def _keep(self, change: TurnChange) -> None:
        """Makes a change durable under the turn's number, in place of what was known of it before."""
        if self._kept is None:
            self._kept = self.folder.next_number()
        prompt = len(self.folder.meta.prompts)
        self.folder.save_change(replace(change, number=self._kept, prompt=prompt))

    def _not_shown(self) -> dict[str, str]:
        """What stays in the sandbox and was not shown yet."""
        if new := [name for name in self.mirror.byproducts if name not in self.shown]:
            self.emit(Noted(f"git ignores what commands made in {', '.join(new)}: it stays in the sandbox"))
        staying = {path: why for path, why in self.mirror.staying.items() if path not in self.shown}
        self.shown |= staying.keys() | set(new)
        return staying

    def _files_of(self, calls: Iterable[ToolCall], reads: bool = True) -> list[str]:
        """The files that these calls name to write them, or to read them."""
        paths: set[str] = set()
        for call in calls:
            tool = None if call.error else self.context.tools.get(call.name)
            access = tool.access(call.arguments) if tool is not None else Access()
            paths |= access.writes | (access.reads if reads else frozenset())
        return sorted(path for path in paths if path != "." and is_path(path))
