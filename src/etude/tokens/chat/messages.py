"""A conversation by content: what two requests must agree in to be the same history.

A client sends its whole history with each request, and not quite as it was told: spaces trimmed, arguments
serialised again, reasoning left out, blocks merged. `content_key` is equal for what counts as the same:

    opening, system, user, results    equal text (and tools as equal JSON)
    answer                            text equal but for spaces at its ends; calls equal in name and, as JSON,
                                      in arguments (order of keys, spaces, 1 for 1.0); call ids do not count

Reasoning is no part of the key: a history that leaves it out is the same, one that changes it is not
(`same_reasoning`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from etude.tokens.chat.client_tools import ClientTool

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Opening:
    """How a conversation begins: who speaks, the system's words and the tools."""

    system: str = ""
    tools: tuple[ClientTool, ...] = ()
    agent: str = ""
    """Name that the client gave the agent; empty: told apart by what it says."""


@dataclass(frozen=True, slots=True)
class SystemWords:
    """A system message in the middle of a conversation."""

    text: str


@dataclass(frozen=True, slots=True)
class UserWords:
    """What the user, or a harness in the user's name, says."""

    text: str


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one turn's calls."""

    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an answer."""

    id: str
    name: str
    arguments: Any
    """The JSON value; a string that is no JSON where the client sends such."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the agent said: as it was served, or as a client tells it."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""


Message = Opening | SystemWords | UserWords | Results | Answer


def num_characters(messages: Sequence[Message]) -> int:
    """Of all texts that a conversation's tokens are made of."""
    total = 0
    for message in messages:
        match message:
            case Opening(system):
                total += len(system)
            case SystemWords(text) | UserWords(text):
                total += len(text)
            case Results(outputs):
                total += sum(map(len, outputs))
            case Answer(text):
                total += len(text)
    return total


def least_tokens(messages: Sequence[Message], longest_bytes: int) -> int:
    """How many tokens a conversation has at least, of which none stands for more than `longest_bytes`: its
    texts, and one that ends each message but an opening without words."""
    return num_characters(messages) // longest_bytes + max(0, len(messages) - 1)


def content_key(message: Message) -> bytes:
    """Equal for messages that are the same by content (see above); 16 bytes."""
    match message:
        case Opening(system, tools, agent):
            described: object = ["opening", agent, system, [canonical(tool.raw) for tool in tools]]
        case SystemWords(text):
            described = ["system", text]
        case UserWords(text):
            described = ["user", text]
        case Results(outputs):
            described = ["results", *outputs]
        case Answer(text, calls):
            described = ["answer", text.strip(), [[call.name, canonical(call.arguments)] for call in calls]]
    return blake3(json.dumps(described).encode()).digest(_DIGEST_BYTES)


def same_reasoning(known: str, told: str) -> bool:
    """Whether a client tells an answer's reasoning as it was, but for spaces at its ends, or not at all."""
    told = told.strip()
    return not told or told == known.strip()


def canonical(value: Any) -> str:
    """JSON with sorted keys and without spaces, whole numbers without a point."""
    return json.dumps(_plain_numbers(value), sort_keys=True, separators=(",", ":"))


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {str(name): _plain_numbers(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(entry) for entry in value]
    return value


def ordered_results(rows: Sequence[tuple[str, str]], before: Sequence[Call]) -> Results:
    """The results (call id, output) in the order of the calls that they answer; else as they came."""
    places = {call.id: place for place, call in enumerate(before)}
    if len(places) == len(before) and all(call_id in places for call_id, _ in rows):
        rows = sorted(rows, key=lambda row: places[row[0]])
    return Results(tuple(output for _, output in rows))
