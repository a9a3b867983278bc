"""Converts between the tokens of a session and the messages of a chat endpoint.

A session is a token sequence. The tokens of a model behind a chat endpoint are unknown, so the session is
kept in tokens of our own, one per byte: exact in both directions, never used for training. Before a request
the tokens are decoded to messages; the answer's text is encoded to tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.errors import SamplerError
from etude.tokens.grammar import HermesGrammar
from etude.tokens.grammar.channels import THINK_MARKS
from etude.tokens.grammar.hermes import CALL_CLOSE, CALL_OPEN
from etude.tokens.pieces import Control, Piece
from etude.tokens.renderer import Renderer
from etude.tokens.template import ETUDE_TEMPLATE
from etude.tokens.tokenizer import Tokenizer
from etude.tokens.training import train_tokenizer

Message = dict[str, Any]

_THINK, _END_THINK = THINK_MARKS
_ROLES = {"<|system|>": "system", "<|user|>": "user", "<|assistant|>": "assistant", "<|tool|>": "tool"}
_NOT_RUN = "error: not run"
_SILENT = "(no answer)"
"""Content of an answer without text or calls (say, interrupted): many servers refuse an empty one."""


def byte_tokenizer(tags: Sequence[str] = ()) -> Tokenizer:
    """One token per byte, then the template's control tokens, the reasoning marks and `tags`."""
    controls = [*ETUDE_TEMPLATE.control_tokens, *THINK_MARKS, *tags]
    return train_tokenizer((), 256 + len(set(controls)), controls)


@dataclass(slots=True)
class CallAnswer:
    """One tool call of an answer, accumulated from deltas."""

    name: str = ""
    arguments: str = ""
    """JSON text as the endpoint writes it, possibly incomplete."""


@dataclass(slots=True)
class Answer:
    """One assistant message of the endpoint, accumulated from deltas."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallAnswer] = field(default_factory=list[CallAnswer])
    finish: str | None = None
    """`stop` or `length`; None while it is being written."""


def answer_tokens(answer: Answer, renderer: Renderer) -> NDArray[np.int32]:
    """Encodes the answer; a message cut at its length limit has no end token."""
    pieces: list[Piece] = []
    if answer.reasoning:
        pieces += [Control(_THINK), answer.reasoning, Control(_END_THINK)]
    # Without native calls the text may hold calls in our grammar.
    pieces += [answer.text] if answer.calls else renderer.grammar.split(answer.text)
    for call in answer.calls:
        body = f'\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments.strip() or "{}"}}}\n'
        pieces += [Control(CALL_OPEN), body, Control(CALL_CLOSE)]
    if answer.finish != "length":
        pieces.append(renderer.template.end)
    return renderer.encode(pieces)


@dataclass(slots=True)
class _DecodedMessage:
    """One message decoded from tokens."""

    role: str
    text: list[str] = field(default_factory=list[str])
    calls: list[str] = field(default_factory=list[str])
    """Raw text of each native call."""
    results: list[str] = field(default_factory=list[str])


def chat_messages(tokens: NDArray[np.int32], renderer: Renderer) -> list[Message]:
    """Decodes a context's tokens into chat messages, without reasoning.

    Raises SamplerError if the tokens do not begin with a message.
    """
    native = isinstance(renderer.grammar, HermesGrammar)
    decoded = _decode(renderer.tokenizer.pieces(tokens, renderer.tags))
    if decoded and decoded[-1].role == "assistant" and not (decoded[-1].text or decoded[-1].calls):
        decoded.pop()
    messages: list[Message] = []
    identities: list[str] = []
    for number, part in enumerate(decoded):
        match part.role:
            case "assistant":
                identities = [f"call_{number}_{position}" for position in range(len(part.calls))]
                messages.append(_assistant(part, identities))
            case "tool":
                messages += _results(part.results, identities if native else [])
            case role:
                messages.append({"role": role, "content": "".join(part.text)})
    return messages


def _decode(pieces: Sequence[Piece]) -> list[_DecodedMessage]:
    decoded: list[_DecodedMessage] = []
    target: list[str] | None = None
    for piece in pieces:
        if isinstance(piece, str):
            if target is not None:
                target[-1:] = [target[-1] + piece] if target else [piece]
            continue
        if piece.name in _ROLES:
            decoded.append(_DecodedMessage(_ROLES[piece.name]))
            target = decoded[-1].text
            continue
        if not decoded:
            raise SamplerError("the context begins with no message", field="tokens", received=piece.name)
        match piece.name:
            case "<result>" | "<tool_call>" as name:
                target = decoded[-1].results if name == "<result>" else decoded[-1].calls
                target.append("")
            case "<think>":
                target = None
            case _:
                target = decoded[-1].text
    return decoded


def _assistant(part: _DecodedMessage, identities: Sequence[str]) -> Message:
    message: Message = {"role": "assistant", "content": "".join(part.text) or None}
    if part.calls:
        message["tool_calls"] = [
            {"id": identity, "type": "function", "function": _function(raw)}
            for identity, raw in zip(identities, part.calls, strict=True)
        ]
    elif not (message["content"] or "").strip():
        message["content"] = _SILENT
    return message


def _function(raw: str) -> dict[str, str]:
    """A call in the API's form; text that is no JSON object is wrapped in one, because servers parse it."""
    try:
        call = json.loads(raw)
        name, arguments = str(call["name"]), call.get("arguments", {})
        if isinstance(arguments, dict):
            return {"name": name or "malformed", "arguments": json.dumps(arguments, ensure_ascii=False)}
    except (ValueError, KeyError, TypeError, AttributeError):
        name = "malformed"
    return {"name": name, "arguments": json.dumps({"malformed": raw.strip()}, ensure_ascii=False)}


def _results(results: Sequence[str], identities: Sequence[str]) -> list[Message]:
    """One tool message per call; results without a call go into a user message, the only form left."""
    messages: list[Message] = [
        {
            "role": "tool",
            "tool_call_id": identity,
            "content": results[place] if place < len(results) else _NOT_RUN,
        }
        for place, identity in enumerate(identities)
    ]
    rest = results[len(identities) :]
    if rest:
        text = "\n".join(f"<result>\n{result}\n</result>" for result in rest) if not identities else rest[-1]
        messages.append({"role": "user", "content": text})
    return messages
