"""The renderer from messages and tool results to tokens.

    <|user|>text<|end|><|assistant|>             prompt: given
    ...<|end|>                                   the agent's message: sampled, its end included
    <|tool|><result>..</result><|end|><|assistant|>    observations: given

Only the template's marks and tags are control tokens. Messages, file contents and outputs are encoded as
ordinary text, whatever they look like.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from etude.errors import ConfigError
from etude.records import ToolCall
from etude.tokens.chat_template import open_with_tools
from etude.tokens.grammar.channels import THINK_CLOSE, THINK_MARKS
from etude.tokens.grammar.events import ParsedMessage, ParseEvent, collect
from etude.tokens.grammar.interface import ToolSchema
from etude.tokens.grammar.message_parser import Grammar, MessageParser, ReasoningMarks, parse_events
from etude.tokens.pieces import Control, Piece, join_text
from etude.tokens.template import ETUDE_TEMPLATE, Template
from etude.tokens.tokenizer import Tokenizer

Tokens = NDArray[np.int32]


class Renderer:
    """Renders and parses the messages of one tokenizer, grammar and template. Stateless after creation.

    `<think>` and `</think>` are recognised as control tokens if the tokenizer holds both; else like the tags:
    in characters in text mode and not at all in token mode. If the template's prompts open reasoning, each
    message begins with it.

    Raises ConfigError if the tokenizer lacks the template's control tokens, or holds only some of the
    grammar's tags (with none of them, calls are parsed in text mode).
    """

    def __init__(self, tokenizer: Tokenizer, grammar: Grammar, template: Template = ETUDE_TEMPLATE) -> None:
        self.tokenizer = tokenizer
        self.system: tuple[Piece, ...] | None = None
        """The system message of the agent's own sessions, if there is one; see `ChatFormat`."""
        self.grammar = grammar
        self.template = template
        for name in template.control_tokens:
            tokenizer.control_id(name)
        self.end_token = tokenizer.control_id(template.end.name)
        self.end_tokens = frozenset(tokenizer.control_id(end.name) for end in template.ends)
        """The tokens that end an answer."""
        self.closing = self.encode(() if template.openers_end else (template.end,))
        """Ends an answer that was cut; empty if the next message's opener does."""
        self.text_mode = _needs_text_mode(tokenizer, grammar)
        self.tags = tokenizer.tag_ids([*grammar.control_tokens(), *THINK_MARKS])
        """The grammar's tags and the marks of reasoning that are one token, by token id."""
        self.reasoning: ReasoningMarks = _choose_marks(tokenizer, template, self.text_mode)
        self._end = (*template.closing, *template.after_end)
        self._is_announced_by_template = grammar.announce(()) is None

    @property
    def template_digest(self) -> str:
        """BLAKE3 hex digest of template, grammar and mode, and of the chat template if it announces the
        tools: equal digests render equal tokens."""
        described = (self.template, self.grammar.name, self.grammar.control_tokens(), self.text_mode)
        return digest_format(self.tokenizer, self.grammar, *described)

    def encode(self, pieces: Iterable[Piece], after: Piece | None = "") -> Tokens:
        """Token ids of pieces that follow `after`: a control token, text, or nothing (None). A tag that the
        tokenizer does not hold is spelled out (text mode)."""
        tokenizer = self.tokenizer
        spelled = (
            piece.name if isinstance(piece, Control) and not tokenizer.has_control(piece.name) else piece
            for piece in pieces
        )
        joined = join_text(spelled)
        parts = [
            tokenizer.encode(tokenizer.lead(piece, before))
            if isinstance(piece, str)
            else np.array([tokenizer.control_id(piece.name)], dtype=np.int32)
            for before, piece in zip((after, *joined), joined, strict=False)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)

    def opening(self, system: str | Sequence[Piece] | None = None) -> Tokens:
        """All tokens before the first message after the system message.

        `system` as pieces (see `describe`) may hold control tokens. Without it, the template's default system
        message is used, if it has one.
        """
        if system is not None and not isinstance(system, str) and self._is_announced_by_template:
            return self.encode(system, None)
        template = self.template
        words = template.default_system if system is None else system
        if words is None:
            return self.encode(template.begin, None)
        pieces = (words,) if isinstance(words, str) else words
        end = () if template.joins_system else self._end
        framed = [*template.system, *pieces, *template.system_close, *end]
        framed += template.default_close if system is None else ()
        return self.encode((*template.begin, *framed), None)

    def describe(self, words: str, schemas: Sequence[ToolSchema]) -> tuple[Piece, ...]:
        """The pieces of a system message that announces tools; or if the model's own chat template announces
        them, all pieces that it puts before the first user message."""
        announced = self.grammar.announce(schemas)
        if announced is None:
            return tuple(open_with_tools(self.tokenizer, self.template, words, schemas))
        words = words or self.template.default_system or ""
        return (*([words, "\n\n"] if words else []), *announced)

    def prompt(self, instruction: str, system: str | Sequence[Piece] | None = None) -> Tokens:
        """The start of a session, up to where the agent's first message begins. `system`: the renderer's own
        by default."""
        opening = self.opening(self.system if system is None else system)
        return np.concatenate([opening, self.request(instruction, opening)])

    def request(self, text: str, opening: Tokens) -> Tokens:
        """The first user message, following the tokens of `opening`."""
        return self.encode_first((*self.template.user, text, *self._end, *self.template.prompt), opening)

    def encode_first(self, message: Sequence[Piece], opening: Tokens) -> Tokens:
        """The first message after an opening, without its own opener if the opening contains it."""
        template = self.template
        if template.joins_system and len(opening) > len(self.encode(template.begin, None)):
            return self.encode(message[len(template.user) :])
        return self.encode(message, template.before if len(opening) else None)

    def user_message(self, text: str) -> Tokens:
        """A later user message, following an ended message of the agent."""
        pieces = (*self.template.after_end, *self.template.user, text, *self._end, *self.template.prompt)
        return self.encode(pieces, self.template.end)

    def observations(self, outputs: Sequence[str], calls: Sequence[str] = ()) -> Tokens:
        """The results of one turn, in call order, with the opener of the agent's next message; `calls` as in
        `results`."""
        pieces = (*self._results(outputs, calls), *self._end, *self.template.prompt)
        return self.encode(pieces, self.template.end)

    def results(self, outputs: Sequence[str], calls: Sequence[str] = ()) -> Tokens:
        """The results of one turn, in call order; `user_message` may follow. `calls`: names from
        `number_calls`, for families whose results name their call."""
        return self.encode((*self._results(outputs, calls), *self.template.closing), self.template.end)

    def _results(self, outputs: Sequence[str], calls: Sequence[str]) -> list[Piece]:
        template = self.template
        pieces: list[Piece] = [*template.after_end, *template.tool]
        named = [*calls, *number_calls([""] * (len(outputs) - len(calls)), len(calls))]
        if self.grammar.numbers_restart:
            named = [f"{name.rpartition(':')[0]}:{place}" for place, name in enumerate(named)]
        for number, output in enumerate(outputs):
            pieces += template.result_between if number else ()
            pieces += (named[number], *template.result_named) if template.result_named else ()
            pieces += [*template.result_open, output, *template.result_close]
        return pieces

    def follow(self, before: Tokens, message: Tokens) -> Tokens:
        """A message that follows the tokens `before`: without its opener if the answer before it ended with
        that token."""
        if not (self.template.openers_end and len(before) and len(message)):
            return message
        last = int(before[-1])
        return message[1:] if last == int(message[0]) and last in self.end_tokens else message

    def end_of(self, pieces: Sequence[Piece]) -> Control:
        """The token that ends an answer of these pieces, which depends on whether it calls tools."""
        tags = self.grammar.control_tokens()
        has_calls = any(isinstance(piece, Control) and piece.name in tags for piece in pieces)
        return self.template.ends[-1] if has_calls else self.template.end

    def message(self, parts: Sequence[ToolCall | str], num_before: int = 0) -> Tokens:
        """An agent's message as the model would sample it, with its end.

        For scripted agents: in `str` parts, known tags become control tokens, so malformed calls can be
        written as they would be sampled. Reasoning that the prompt opened is closed unless a part does so.
        `num_before`: calls earlier in the conversation.
        """
        pieces: list[Piece] = []
        for is_call, run in itertools.groupby(parts, lambda part: isinstance(part, ToolCall)):
            if is_call:
                calls = [part for part in run if isinstance(part, ToolCall)]
                pieces += self.grammar.render_calls(calls, _has_words(pieces), num_before)
                num_before += len(calls)
            else:
                pieces += [piece for part in run for piece in self.grammar.split(str(part))]
        template = self.template
        begin = template.reasoning_close if template.thinking else template.shown
        if Control(THINK_CLOSE) in pieces and not template.has_channels:
            begin = ()
        return self.encode([*begin, *pieces, self.end_of(pieces)], template.prompt[-1])

    def mark_reasoning(self, reasoning: str) -> list[Piece]:
        """Reasoning with its marks, as the beginning of a message after a prompt."""
        template = self.template
        return [*(() if template.thinking else template.reasoning_open), reasoning, *template.reasoning_close]

    def parser(self) -> MessageParser:
        """A parser for one message, given as pieces. See `MessageStream` for tokens as they are sampled."""
        begun, has_channels = bool(self.template.thinking), self.template.has_channels
        return self.grammar.parser(self.text_mode, self.reasoning, begun, has_channels)

    def parse(self, message: Tokens) -> list[ToolCall]:
        """The calls of one sampled message, with or without its end token. Never raises."""
        return list(self.read(message).calls)

    def parse_events(self, message: Tokens) -> list[ParseEvent]:
        """All events of one sampled message, in order. Never raises."""
        return parse_events(self.parser(), self.pieces(message))

    def read(self, message: Tokens) -> ParsedMessage:
        """The parts of one sampled message: text, reasoning, calls. Never raises."""
        return collect(self.parse_events(message))

    def without_end(self, decoded: str) -> str:
        """The text of a decoded message without the name of its end token."""
        return decoded.removesuffix(
            next((e.name for e in self.template.ends if decoded.endswith(e.name)), "")
        )

    def pieces(self, message: Tokens) -> list[Piece]:
        """One sampled message as text and control tokens, without its end token."""
        if len(message) and int(message[-1]) in self.end_tokens:
            message = message[:-1]
        return self.tokenizer.pieces(message, self.tags, self.template.prompt[-1])


def number_calls(names: Sequence[str], num_before: int) -> list[str]:
    """Calls by name and number, for families that number the calls of a conversation. `num_before`: calls
    before these."""
    return [f"{name or 'unknown'}:{number}" for number, name in enumerate(names, num_before)]


def digest_format(tokenizer: Tokenizer, grammar: Grammar, *described: object) -> str:
    """BLAKE3 hex digest of `described`, and of the model's own chat template if it announces the tools."""
    native = (tokenizer.chat_template,) if grammar.announce(()) is None else ()
    return blake3(repr((*described, *native)).encode()).hexdigest()


def _has_words(pieces: Sequence[Piece]) -> bool:
    """Whether an answer has content after its reasoning."""
    closed = [place for place, piece in enumerate(pieces, 1) if piece == Control(THINK_CLOSE)]
    words = pieces[closed[-1] :] if closed else pieces
    return any(not isinstance(piece, str) or bool(piece.strip()) for piece in words)


def _choose_marks(tokenizer: Tokenizer, template: Template, text_mode: bool) -> ReasoningMarks:
    if template.has_channels or all(tokenizer.has_control(mark) for mark in THINK_MARKS):
        return "control"
    return "text" if text_mode or template.thinking else "off"


def _needs_text_mode(tokenizer: Tokenizer, grammar: Grammar) -> bool:
    tags = grammar.control_tokens()
    missing = [tag for tag in tags if not tokenizer.has_control(tag)]
    if missing and len(missing) < len(tags):
        raise ConfigError(
            "the tokenizer has only some of the tools' tags",
            field="agent.tools, agent.index, agent.mcp",
            received=missing,
            fix="offer the tools that the model was trained with; a model trained from scratch gets the "
            "tags of all that its [agent] offers",
        )
    return bool(missing)
