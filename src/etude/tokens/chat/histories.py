"""Turns a conversation that a client sends into prompt tokens, reusing the sampled tokens of answers.

A client sends the whole conversation with each turn, as text. Encoding an answer again would often give other
tokens than were sampled: the engine's KV cache would be missed, and the model would read tokens that it never
wrote. So the latest answers are remembered, each by client key, conversation and content, and the next prompt
contains their sampled tokens. Other answers are encoded from their text.

Reasoning that a client leaves out of the conversation stays in the prompt, as in training; changed reasoning
is used as sent.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from etude.tokens.chat.framing import Framing
from etude.tokens.chat.messages import Answer, Message, Opening, content_key, same_reasoning
from etude.tokens.chat.renderer_cache import RendererCache

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class ChatPrompt:
    """The prompt of a conversation's next answer."""

    tokens: Tokens
    framing: Framing
    state: bytes
    """Key of the conversation, for `ChatFrames.remember`."""


@dataclass(slots=True, eq=False)
class ChatFrames:
    """Renders the prompts of conversations for one model. Thread-safe."""

    renderers: RendererCache
    max_remembered_tokens: int = 1 << 22
    _answers: OrderedDict[bytes, tuple[Answer, Tokens]] = field(init=False, default_factory=OrderedDict)
    """(answer, its sampled tokens) by the state of the conversation that it completes."""
    _num_tokens: int = field(init=False, default=0)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    """Guards the renderers and the answers; not held while text is encoded."""

    def prompt(self, messages: Sequence[Message], key_name: str, open_answer: bool = True) -> ChatPrompt:
        """The tokens of a conversation (its opening first), up to where the next answer begins.

        `key_name`: the client key; answers of other keys are not used. Raises BadRequestError.
        """
        opening = messages[0]
        assert isinstance(opening, Opening), "a conversation begins with its opening"
        with self._lock:
            renderer = self.renderers.find(opening)
        framing = Framing(renderer, opening)
        parts: list[Tokens] = []
        state = blake3(key_name.encode()).digest()
        for message in messages:
            state = _next(state, message, opening)
            first = not any(len(part) for part in parts)
            known = self._find(state, message) if isinstance(message, Answer) else None
            if known is not None:
                end = framing.end[: int(known[-1]) not in renderer.end_tokens]
                parts.append(np.concatenate([framing.answer_frame(first), known, end]))
            else:
                before = parts[-1] if parts else framing.end[:0]
                parts.append(renderer.follow(before, framing.render_given(message, first)))
        if open_answer:
            parts.append(framing.answer_frame(not any(len(part) for part in parts)))
        return ChatPrompt(np.concatenate(parts), framing, state)

    def remember(self, prompt: ChatPrompt, answer: Answer, tokens: Tokens) -> None:
        """Stores an answer that was sampled from a prompt, for the conversation's next turn."""
        if all(int(token) in prompt.framing.renderer.end_tokens for token in tokens[:2]):
            return  # an empty answer
        state = _next(prompt.state, answer, prompt.framing.opening)
        with self._lock:
            before = self._answers.pop(state, None)
            self._num_tokens += len(tokens) - (0 if before is None else len(before[1]))
            self._answers[state] = answer, tokens
            while self._num_tokens > self.max_remembered_tokens:
                _, (_, forgotten) = self._answers.popitem(last=False)
                self._num_tokens -= len(forgotten)

    def _find(self, state: bytes, given: Answer) -> Tokens | None:
        """The remembered tokens of this answer, unless the client changed its reasoning."""
        with self._lock:
            if state not in self._answers:
                return None
            self._answers.move_to_end(state)
            answer, tokens = self._answers[state]
        return tokens if same_reasoning(answer.reasoning, given.reasoning) else None


def _next(state: bytes, message: Message, opening: Opening) -> bytes:
    return blake3(state + content_key(message, opening.tools)).digest()
