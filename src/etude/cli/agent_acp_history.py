"""The history of a session as updates, which an editor shows when it opens the session again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from acp import update_agent_message_text, update_agent_thought_text, update_user_message_text

from etude.cli.agent_acp_updates import Updates
from etude.controller.agent.changes import TurnChange
from etude.controller.agent.conversation import Conversation
from etude.controller.agent.events import CallsRequested, FilesChanged, ToolCallEnded
from etude.records import Turn


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
        yield from _turn(conversation, updates, number, turn, changes.get(number, ()))
    for prompt in prompts:
        yield update_user_message_text(prompt.text)


def _turn(
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
