"""Converts agent events, and the history of a session, to updates of the Agent Client Protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from acp import (
    plan_entry,
    start_tool_call,
    text_block,
    tool_content,
    tool_diff_content,
    update_agent_message_text,
    update_agent_thought_text,
    update_plan,
    update_tool_call,
    update_user_message_text,
)
from acp.schema import ToolCallLocation, ToolKind

from etude.agent.tools.state import Todo
from etude.cli.agent_calls import KINDS, call_preview, call_title
from etude.controller.agent.changes import FileChange, TurnChange
from etude.controller.agent.conversation import Conversation
from etude.controller.agent.events import (
    AgentEvent,
    AgentText,
    CallsRequested,
    FilesChanged,
    Notice,
    ToolCallEnded,
    ToolCallStarted,
)
from etude.records import ToolCall, ToolResult, Turn

_STATUS = {"pending": "pending", "in_progress": "in_progress", "done": "completed"}


class Updates:
    """Makes the updates of one session. Keeps the current turn's calls, to show changes with them."""

    def __init__(self, root: Path, todos: Callable[[], Sequence[Todo]]) -> None:
        self._root = root
        self._todos = todos
        self._made = CallsRequested(0, ())
        self._results: dict[int, ToolResult] = {}

    def of(self, event: AgentEvent) -> list[Any]:
        """The updates for one event."""
        match event:
            case AgentText(text, kind):
                update = update_agent_message_text if kind == "text" else update_agent_thought_text
                return [update(text)]
            case Notice(text, _):
                return [update_agent_thought_text(f"[{text}]\n")]
            case CallsRequested():
                self._made, self._results = event, {}
                return [self._started(place, call) for place, call in enumerate(event.calls) if call.name]
            case ToolCallStarted(turn, position, _):
                return [update_tool_call(call_id(turn, position), status="in_progress")]
            case ToolCallEnded():
                return self._done(event)
            case FilesChanged():
                return self._changed(event)
            case _:
                return []

    def permission_request(self, call: ToolCall) -> Any:
        """The call for which permission is requested, with a preview of its effect."""
        place = next((n for n, made in enumerate(self._made.calls) if made is call), 0)
        preview = "\n".join(call_preview(call))
        content = [tool_content(text_block(f"```diff\n{preview}\n```"))] if preview else None
        return update_tool_call(
            call_id(self._made.turn, place),
            title=call_title(call),
            kind=_kind(call),
            status="pending",
            content=content,
            locations=self._locations(call),
            raw_input=self._made.arguments(call),
        )

    def _started(self, place: int, call: ToolCall) -> Any:
        return start_tool_call(
            call_id(self._made.turn, place),
            call_title(call),
            kind=_kind(call),
            status="pending",
            locations=self._locations(call),
            raw_input=self._made.arguments(call),
        )

    def _done(self, event: ToolCallEnded) -> list[Any]:
        self._results[event.position] = event.result
        if not event.call.name:
            return []
        updates = [
            update_tool_call(
                call_id(event.turn, event.position),
                status="completed" if event.result.error is None else "failed",
                content=_shown(event.result),
                raw_output={"output": event.result.output},
            )
        ]
        if event.call.name == "todo_write" and event.result.error is None:
            updates.append(plan_of(self._todos()))
        return updates

    def _changed(self, event: FilesChanged) -> list[Any]:
        """Shows each file's diff with the last call that named it, or with one that could have changed it."""
        by_call: dict[int, list[FileChange]] = {}
        for file in event.files:
            place = self._caller(file.path)
            if place is not None and event.turn == self._made.turn:
                by_call.setdefault(place, []).append(file)
        updates: list[Any] = []
        for place, files in sorted(by_call.items()):
            diffs = [diff for file in files if (diff := self._diff(file)) is not None]
            content = [*_shown(self._results[place]), *diffs]
            updates.append(update_tool_call(call_id(event.turn, place), content=content))
        for path, why in event.kept_back.items():
            updates.append(update_agent_message_text(f"\n[not written: {path}: {why}]\n"))
        return updates

    def _caller(self, path: str) -> int | None:
        named = [n for n, result in self._results.items() if result.facts.get("path") == path]
        calls = self._made.calls
        others = [
            n
            for n in self._results
            if _kind(calls[n]) in ("edit", "delete", "execute") and "path" not in self._results[n].facts
        ]
        return max(named or others, default=None)

    def _diff(self, file: FileChange) -> Any:
        try:
            old = None if file.before is None else file.before.decode("utf-8")
            new = (file.after or b"").decode("utf-8")
        except UnicodeDecodeError:
            return None
        return tool_diff_content(str(self._root / file.path), new, old)

    def _locations(self, call: ToolCall) -> list[ToolCallLocation] | None:
        path = call.arguments.get("path", "").strip()
        if not path or path.startswith("/") or "\0" in path:
            return None
        line = call.arguments.get("start", "").strip()
        at = int(line) if line.isdecimal() and len(line) < 9 else None
        return [ToolCallLocation(path=str(self._root / path), line=at)]


def history(conversation: Conversation, updates: Updates) -> Iterator[Any]:
    """Yields updates for all messages, calls and changes so far, in order."""
    prompts = list(conversation.folder.meta.prompts)
    changes: dict[int, list[TurnChange]] = {}
    for change in conversation.folder.changes():
        changes.setdefault(change.turn, []).append(change)
    turns = conversation.journal.session.turns if conversation.journal else []
    for number, turn in enumerate(turns, 1):
        while prompts and prompts[0].after_turn < number:
            yield update_user_message_text(prompts.pop(0).text)
        yield from _turn_updates(conversation, updates, number, turn, changes.get(number, ()))
    for prompt in prompts:
        yield update_user_message_text(prompt.text)


def _turn_updates(
    conversation: Conversation, updates: Updates, number: int, turn: Turn, changes: Any
) -> Iterator[Any]:
    assert conversation.journal is not None
    session = conversation.journal.session
    context = next(context for context in session.contexts if context.id == turn.segment_id)
    message = session.renderer.read(context.recording.tokens[turn.start : turn.end])
    if message.reasoning:
        yield update_agent_thought_text(message.reasoning)
    if message.text:
        yield update_agent_message_text(message.text)
    yield from updates.of(CallsRequested(number, turn.calls, conversation.policy.registry.schemas))
    for place, (call, result) in enumerate(zip(turn.calls, turn.results, strict=False)):
        yield from updates.of(ToolCallEnded(number, place, call, result))
    for change in changes:
        yield from updates.of(FilesChanged(number, change.files, change.written, {}))


def call_id(turn: int, position: int) -> str:
    """Id of a call within its session."""
    return f"{turn}.{position}"


def plan_of(todos: Sequence[Todo]) -> Any:
    """The agent's to-do list as a plan; abandoned items are not shown."""
    entries = [
        plan_entry(todo.text, status=cast(Any, _STATUS[todo.status]))
        for todo in todos
        if todo.status in _STATUS
    ]
    return update_plan(entries)


def _kind(call: ToolCall) -> ToolKind:
    return cast(ToolKind, KINDS.get(call.name, "other"))


def _shown(result: ToolResult) -> list[Any]:
    return [tool_content(text_block(result.output))] if result.output else []
