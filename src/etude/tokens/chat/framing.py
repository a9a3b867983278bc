"""Renders messages to tokens one after the other; earlier messages are never rendered again.

Each message is `after_end` (unless it is the first), its opener, its text, its end. The pieces are those of
`Renderer`, so a conversation has the tokens that our own agent's session would have.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from types import NoneType

import numpy as np
from numpy.typing import NDArray

from etude.records import ToolCall
from etude.tokens.chat.errors import BadRequestError
from etude.tokens.chat.messages import Answer, Call, Message, Opening, Results, SystemWords, UserWords
from etude.tokens.grammar.channels import THINK_CLOSE, THINK_OPEN, ChannelMarks
from etude.tokens.grammar.interface import ToolSchema
from etude.tokens.grammar.native import NativeGrammar
from etude.tokens.pieces import Piece, spell
from etude.tokens.renderer import Renderer

Tokens = NDArray[np.int32]


class Framing:
    """Renders the messages of conversations with one opening."""

    def __init__(self, renderer: Renderer, opening: Opening) -> None:
        self.renderer, self.opening = renderer, opening
        self.template = renderer.template
        tools = self._announced(opening)
        words = renderer.describe(opening.system, tools) if tools else opening.system or None
        self._has_words = words is not None
        self._opened = renderer.opening(words)
        """All tokens before the first message."""
        self.end = renderer.closing
        self.shown_end = renderer.encode([self.template.shown_end]) if self.template.shown_end else self.end

    def render_given(self, message: Message, first: bool) -> Tokens:
        """Renders a message that was not sampled, with its end; of an opening its own tokens. `first`: it is
        the first one with tokens.

        Raises BadRequestError for results before any message.
        """
        renderer, template = self.renderer, self.template
        match message:
            case Opening():
                return self._opening()
            case SystemWords(text):
                words = (*(template.system or template.user), text, *template.system_close)
                return self._follow((*words, *template.closing), first)
            case UserWords(text):
                return self._follow((*template.user, text, *template.closing), first)
            case Results(outputs, calls):
                if first:
                    raise BadRequestError(
                        "begins with tool results", field="messages", fix="send the calls before them"
                    )
                return renderer.results(outputs, calls)
            case Answer():
                shown = not self.has_reasoning(message)
                before = (*template.assistant, *template.shown) if shown else template.prompt
                content = renderer.encode(self._answer_pieces(message), before[-1])
                frame, end = self.answer_frame(first, shown=shown), self.shown_end if shown else self.end
                return np.concatenate([frame, content, end])

    def render_sampled(self, answer: Answer, first: bool) -> Tokens:
        """Renders an answer as if a session had sampled it: reasoning that its prompt opens is closed."""
        renderer, template = self.renderer, self.template
        begin = renderer.mark_reasoning("") if template.thinking else template.shown
        pieces = [*(() if self.has_reasoning(answer) else begin), *self._answer_pieces(answer)]
        ended = [*pieces, renderer.end_of(pieces)]
        return np.concatenate([self.answer_frame(first), renderer.encode(ended, template.prompt[-1])])

    def answer_frame(self, first: bool = False, *, shown: bool = False) -> Tokens:
        """The opener of an answer: the last tokens before sampling, or with `shown` those before an answer
        without reasoning that was not sampled."""
        template = self.template
        return self._follow((*template.assistant, *template.shown) if shown else template.prompt, first)

    def has_reasoning(self, answer: Answer) -> bool:
        """Whether the answer's reasoning is shown."""
        return bool(answer.reasoning) and self.renderer.reasoning != "off"

    def without_reasoning(self, sampled: Tokens) -> Tokens:
        """A sampled message as templates that drop reasoning show it: the part after the last closing mark,
        or the channels that are not reasoning. Unclosed reasoning is dropped.

        The rest is encoded again: it is given, not sampled.
        """
        renderer = self.renderer
        pieces = renderer.pieces(sampled)
        has_channels = self.template.has_channels
        if has_channels:
            marks = ChannelMarks()
            pieces = [mark for piece in pieces for mark in marks.translate(piece)]
        kept: list[Piece] = []
        thinking = bool(self.template.thinking) and not has_channels and renderer.reasoning != "off"
        for piece in pieces:
            if isinstance(piece, str):
                _, mark, rest = piece.rpartition(THINK_CLOSE)
                if mark and renderer.reasoning == "text":
                    kept, thinking, piece = [], False, rest
            elif piece.name == THINK_CLOSE:
                kept, thinking = kept if has_channels else [], False
                continue
            elif piece.name == THINK_OPEN and (
                has_channels or (renderer.reasoning == "control" and not spell(kept).strip())
            ):
                thinking = True
            if not thinking:
                kept.append(piece)
        if kept and isinstance(kept[0], str):
            kept[0] = kept[0].lstrip("\n")
        return renderer.encode(kept, self.template.prompt[-1])

    def _follow(self, pieces: Sequence[Piece], first: bool) -> Tokens:
        """Encodes a message that follows another one, or if `first` the opening."""
        if not first:
            return self.renderer.encode((*self.template.after_end, *pieces), self.template.end)
        return np.concatenate([self._opened, self.renderer.encode_first(pieces, self._opened)])

    def _announced(self, opening: Opening) -> list[ToolSchema]:
        """The tools that the system message describes."""
        grammar = self.renderer.grammar
        if grammar.name == "xml" and not self.renderer.text_mode:
            return []  # their tags are tokens of the model's own: it was trained without descriptions
        return [tool for tool in opening.tools if tool in grammar.tools]

    def _opening(self) -> Tokens:
        """The opening's own tokens; none if they are part of the first message."""
        template = self.template
        if template.joins_system or not self._has_words:
            return self.end[:0]
        num_after = len(self.renderer.encode(template.after_end, template.end))
        return self._opened[: len(self._opened) - num_after]

    def _answer_pieces(self, answer: Answer) -> list[Piece]:
        """The pieces of an answer that a client sent and that was not sampled here."""
        reasoning = self.renderer.mark_reasoning(answer.reasoning) if self.has_reasoning(answer) else []
        pieces: list[Piece] = [answer.text] if answer.text else []
        number = answer.num_before
        shown = map(self._shown_call, answer.calls)
        for is_call, run in groupby(shown, lambda call: isinstance(call, ToolCall)):
            if is_call:
                calls = [call for call in run if isinstance(call, ToolCall)]
                pieces += self.renderer.grammar.render_calls(calls, bool(pieces), number)
                number += len(calls)
            else:
                words = "\n".join(map(str, run))
                pieces.append(f"\n{words}" if pieces else words)
        return [*reasoning, *pieces]

    def _shown_call(self, call: Call) -> ToolCall | str:
        """A client's call, for the grammar to write; one whose arguments are no object becomes text."""
        if not isinstance(call.arguments, dict):
            return f"{call.name} {call.arguments}"
        grammar = self.renderer.grammar
        writes_python = isinstance(grammar, NativeGrammar) and grammar.form.python_words
        plain = (str, bool, NoneType) if writes_python else str
        values = {
            str(key): str(value) if isinstance(value, plain) else json.dumps(value, ensure_ascii=False)
            for key, value in call.arguments.items()
        }
        return ToolCall(call.name, values)
