"""From what the driver of a session and a sampler tell, to what a person sees of it."""

from __future__ import annotations

from etude.agent import events
from etude.controller.agent.events import Ended, MessageEnded, Noted, OnAgentEvent, Said
from etude.tokens.grammar import ParseEvent, ReasoningDelta, TextDelta
from etude.tokens.renderer import Renderer
from etude.tokens.stream import MessageStream


class Narrator:
    """Listens to one session. Words are shown as they come, each once.

    A sampler that yields whole messages may tell their words earlier, through `preview`.
    """

    def __init__(self, renderer: Renderer, emit: OnAgentEvent) -> None:
        self._renderer = renderer
        self._emit = emit
        self._stream: MessageStream | None = None
        self._previewed = False

    def preview(self, event: ParseEvent) -> None:
        """Words of a message whose tokens come later."""
        self._previewed = True
        self._tell(event)

    def listen(self, event: events.SessionEvent) -> None:
        """What the driver tells."""
        match event:
            case events.Sampled():
                self._on_sampled(event)
            case events.Retried():
                self._begin_again()
                self._emit(Noted(f"{event.error}; trying again ({event.attempt})", "retry"))
            case events.ContextOpened():
                self._emit(Noted(f"the context was summarised; kept as {event.path}", "context"))
            case events.SessionEnded():
                self._begin_again()
                self._emit(Ended(event.status, event.cause))
            case _:
                pass  # calls are shown by the workspace, which knows more of them

    def _on_sampled(self, event: events.Sampled) -> None:
        if self._stream is None:
            self._stream = MessageStream(self._renderer)
        parsed = self._stream.feed(event.chunk.tokens)
        if event.chunk.finish is not None:
            parsed += self._stream.finish()
        for one in parsed:
            self._tell(one, "summary" if event.summarising else "text")
        if event.chunk.finish is not None:
            self._begin_again()
            self._emit(MessageEnded())

    def _tell(self, event: ParseEvent, kind: str = "text") -> None:
        from_tokens = self._stream is not None
        if from_tokens and self._previewed:
            return
        if isinstance(event, TextDelta) and event.text:
            self._emit(Said(event.text, kind))
        elif isinstance(event, ReasoningDelta) and event.text:
            self._emit(Said(event.text, "reasoning"))

    def _begin_again(self) -> None:
        self._stream = None
        self._previewed = False
