"""Converts the events of a session's driver and sampler to those that a person sees."""

from __future__ import annotations

from etude.agent import events
from etude.controller.agent.events import AgentText, MessageEnded, Notice, OnAgentEvent, RunEnded
from etude.tokens.grammar import ParseEvent, ReasoningDelta, TextDelta
from etude.tokens.renderer import Renderer
from etude.tokens.stream import MessageStream


class Narrator:
    """Listens to one session and emits its text as it arrives, each piece once.

    A sampler that yields whole messages may pass their text earlier, through `preview`.
    """

    def __init__(self, renderer: Renderer, emit: OnAgentEvent) -> None:
        self._renderer = renderer
        self._emit = emit
        self._stream: MessageStream | None = None
        self._previewed = False

    def preview(self, event: ParseEvent) -> None:
        """Receives text of a message whose tokens come later."""
        self._previewed = True
        self._emit_parsed(event)

    def listen(self, event: events.SessionEvent) -> None:
        """Receives an event of the session's driver."""
        match event:
            case events.Sampled():
                self._on_sampled(event)
            case events.Retried():
                self._reset()
                self._emit(Notice(f"{event.error}; trying again ({event.attempt})", "retry"))
            case events.ContextOpened():
                self._emit(Notice(f"the context was summarised; kept as {event.path}", "context"))
            case events.SessionEnded():
                self._reset()
                self._emit(RunEnded(event.status, event.cause))
            case _:
                pass  # calls are shown by the workspace, which knows more of them

    def _on_sampled(self, event: events.Sampled) -> None:
        if self._stream is None:
            self._stream = MessageStream(self._renderer)
        parsed = self._stream.feed(event.chunk.tokens)
        if event.chunk.finish is not None:
            parsed += self._stream.finish()
        for parse_event in parsed:
            self._emit_parsed(parse_event, "summary" if event.summarising else "text")
        if event.chunk.finish is not None:
            self._reset()
            self._emit(MessageEnded())

    def _emit_parsed(self, event: ParseEvent, kind: str = "text") -> None:
        from_tokens = self._stream is not None
        if from_tokens and self._previewed:
            return
        if isinstance(event, TextDelta) and event.text:
            self._emit(AgentText(event.text, kind))
        elif isinstance(event, ReasoningDelta) and event.text:
            self._emit(AgentText(event.text, "reasoning"))

    def _reset(self) -> None:
        self._stream = None
        self._previewed = False
