"""Between the tokens of a session and the messages of a chat endpoint.

Sessions are tokens. Where the model is behind a chat endpoint nobody knows its tokens, so the session is kept
in tokens of our own, one a byte: exact in both directions, and never to be trained on. Before a request the
tokens are read back as messages; the answer's words become tokens.
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
"""An answer without words and calls, such as one that was interrupted: many servers refuse an empty one."""


def byte_tokenizer(tags: Sequence[str] = ()) -> Tokenizer:
    """One token a byte, then the frame's control tokens, the marks of reasoning and `tags`."""
    controls = [*ETUDE_TEMPLATE.control_tokens, *THINK_MARKS, *tags]
    return train_tokenizer((), 256 + len(set(controls)), controls)


@dataclass(slots=True)
class CallAnswer:
    """One tool call of an answer, as its pieces come."""

    name: str = ""
    arguments: str = ""
    """JSON as the endpoint writes it, whole or not."""


@dataclass(slots=True)
class Answer:
    """One message of the endpoint's."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallAnswer] = field(default_factory=list[CallAnswer])
    finish: str | None = None
    """`stop` or `length`; None while it is being written."""


def answer_tokens(answer: Answer, renderer: Renderer) -> NDArray[np.int32]:
    """The answer as the session keeps it; its end token is missing where it was cut."""
    pieces: list[Piece] = []
    if answer.reasoning:
        pieces += [Control(_THINK), answer.reasoning, Control(_END_THINK)]
    # Words of a model that writes its calls as text are read as calls; else they are words.
    pieces += [answer.text] if answer.calls else renderer.grammar.split(answer.text)
    for call in answer.calls:
        body = f'\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments.strip() or "{}"}}}\n'
        pieces += [Control(CALL_OPEN), body, Control(CALL_CLOSE)]
    if answer.finish != "length":
        pieces.append(renderer.template.end)
    return renderer.encode(pieces)


@dataclass(slots=True)
class _Spoken:
    """One message read from tokens."""

    role: str
    text: list[str] = field(default_factory=list[str])
    calls: list[str] = field(default_factory=list[str])
    """Raw text of each native call."""
    results: list[str] = field(default_factory=list[str])


def chat_messages(tokens: NDArray[np.int32], renderer: Renderer) -> list[Message]:
    """The messages that a context's tokens stand for, without earlier reasoning.

    Raises SamplerError for tokens that begin with no message.
    """
    native = isinstance(renderer.grammar, HermesGrammar)
    spoken = _read(renderer.tokenizer.pieces(tokens, renderer.tags))
    if spoken and spoken[-1].role == "assistant" and not (spoken[-1].text or spoken[-1].calls):
        spoken.pop()
    messages: list[Message] = []
    identities: list[str] = []
    for number, one in enumerate(spoken):
        match one.role:
            case "assistant":
                identities = [f"call_{number}_{position}" for position in range(len(one.calls))]
                messages.append(_assistant(one, identities))
            case "tool":
                messages += _results(one.results, identities if native else [])
            case role:
                messages.append({"role": role, "content": "".join(one.text)})
    return messages


def _read(pieces: Sequence[Piece]) -> list[_Spoken]:
    spoken: list[_Spoken] = []
    target: list[str] | None = None
    for piece in pieces:
        if isinstance(piece, str):
            if target is not None:
                target[-1:] = [target[-1] + piece] if target else [piece]
            continue
        if piece.name in _ROLES:
            spoken.append(_Spoken(_ROLES[piece.name]))
            target = spoken[-1].text
            continue
        if not spoken:
            raise SamplerError("the context begins with no message", field="tokens", received=piece.name)
        match piece.name:
            case "<result>" | "<tool_call>" as name:
                target = spoken[-1].results if name == "<result>" else spoken[-1].calls
                target.append("")
            case "<think>":
                target = None
            case _:
                target = spoken[-1].text
    return spoken


def _assistant(one: _Spoken, identities: Sequence[str]) -> Message:
    message: Message = {"role": "assistant", "content": "".join(one.text) or None}
    if one.calls:
        message["tool_calls"] = [
            {"id": identity, "type": "function", "function": _function(raw)}
            for identity, raw in zip(identities, one.calls, strict=True)
        ]
    elif not (message["content"] or "").strip():
        message["content"] = _SILENT
    return message


def _function(raw: str) -> dict[str, str]:
    """A call as it was written; what is no JSON object is sent inside of one, as servers parse it."""
    try:
        call = json.loads(raw)
        name, arguments = str(call["name"]), call.get("arguments", {})
        if isinstance(arguments, dict):
            return {"name": name or "malformed", "arguments": json.dumps(arguments, ensure_ascii=False)}
    except (ValueError, KeyError, TypeError, AttributeError):
        name = "malformed"
    return {"name": name, "arguments": json.dumps({"malformed": raw.strip()}, ensure_ascii=False)}


def _results(results: Sequence[str], identities: Sequence[str]) -> list[Message]:
    """Each call gets its result; results without a call are the user's words, as there is no other way."""
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
