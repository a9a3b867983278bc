"""Messages of a conversation, and the equality by which a request continues an earlier history.

A client sends its whole history with each request, slightly changed: spaces trimmed, arguments serialised
again, reasoning left out, blocks merged. `content_key` is equal for messages that count as the same:

    opening, system, user, results    equal text (and tools as equal JSON)
    answer                            text equal but for spaces at its ends; calls equal in name and, as JSON,
                                      in arguments (order of keys, spaces, 1 for 1.0; arguments equal to the
                                      schema's default may be left out); call ids do not count

Reasoning is no part of the key: a history that leaves it out is the same, one that changes it is not
(`same_reasoning`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blake3 import blake3

from etude.tokens.chat.client_tools import ClientTool
from etude.tokens.renderer import number_calls

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of a conversation: the agent's name, the system message and the tools."""

    system: str = ""
    tools: tuple[ClientTool, ...] = ()
    agent: str = ""
    """Name that the client gave the agent; empty: agents are distinguished by content."""


@dataclass(frozen=True, slots=True)
class SystemWords:
    """A system message in the middle of a conversation."""

    text: str


@dataclass(frozen=True, slots=True)
class UserWords:
    """A message of the user, or of a harness in the user's role."""

    text: str


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one turn's calls."""

    outputs: tuple[str, ...]
    calls: tuple[str, ...] = field(default=(), compare=False)
    """By name and number, as `number_calls` gives them; empty if the client does not send them."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an answer."""

    id: str
    name: str
    arguments: Any
    """The JSON value; a plain string if the client sends text that is no JSON."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A message of the agent, as served or as a client sends it back."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""
    num_before: int = field(default=0, compare=False)
    """Number of calls in the conversation before its own."""


Message = Opening | SystemWords | UserWords | Results | Answer


def num_characters(messages: Sequence[Message]) -> int:
    """Total length of the texts that a conversation's tokens encode."""
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
    """Lower bound of a conversation's tokens if none encodes more than `longest_bytes`: its texts, and one
    end token per message except an empty opening."""
    return num_characters(messages) // longest_bytes + max(0, len(messages) - 1)


def content_key(message: Message, tools: Sequence[ClientTool] = ()) -> bytes:
    """Equal for messages that are the same by content (see above); 16 bytes. `tools`: of the conversation."""
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
            defaults = {tool.name: tool.defaults for tool in tools} if calls else {}
            described = ["answer", text.strip(), [_described(call, defaults) for call in calls]]
    return blake3(json.dumps(described).encode()).digest(_DIGEST_BYTES)


def _described(call: Call, defaults: Mapping[str, Mapping[str, Any]]) -> list[str]:
    given, assumed = call.arguments, defaults.get(call.name)
    if assumed and isinstance(given, dict):
        given = {
            name: value
            for name, value in given.items()
            if name not in assumed or canonical(value) != canonical(assumed[name])
        }
    return [call.name, canonical(given)]


def same_reasoning(known: str, sent: str) -> bool:
    """Whether a client sent an answer's reasoning unchanged, except for spaces at its ends, or not at all."""
    sent = sent.strip()
    return not sent or sent == known.strip()


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


class Conversation:
    """Builds a conversation entry by entry.

    System messages before all others belong to the opening. The results that follow an answer are one
    message, in the order of the calls that they answer if that is known, else in order of arrival.
    """

    def __init__(self) -> None:
        self.system: list[str] = []
        self._messages: list[Message] = []
        self._calls: tuple[Call, ...] = ()
        """Calls of the last answer."""
        self._num_before = 0
        """Number of calls before these."""
        self._results: list[tuple[str, str]] = []
        """(call id, output) of the results message that is being built."""

    def add_message(self, text: str, by_user: bool) -> None:
        """Adds a message of the user, or of the system."""
        self.end_results()
        if by_user or self._messages:
            self._messages.append(UserWords(text) if by_user else SystemWords(text))
        else:
            self.system.append(text)

    def add_answer(self, answer: Answer, continues: bool = False) -> None:
        """Adds an answer. `continues`: it is appended to the last one, if nothing came in between."""
        self.end_results()
        last = self._messages[-1] if continues and self._messages else None
        if isinstance(last, Answer):
            self._messages.pop()
            calls, reasoning = last.calls + answer.calls, last.reasoning + answer.reasoning
            answer = Answer(last.text + answer.text, calls, reasoning)
        else:
            self._num_before += len(self._calls)
        self._calls = answer.calls
        self._messages.append(replace(answer, num_before=self._num_before))

    def add_result(self, call_id: str, output: str) -> None:
        """Adds the result of a call."""
        self._results.append((call_id, output))

    def end_results(self) -> None:
        """Completes the message of results, if one is being built."""
        rows, self._results = self._results, []
        places = {call.id: place for place, call in enumerate(self._calls)}
        calls = number_calls([call.name for call in self._calls], self._num_before)
        if len(places) == len(self._calls) and all(call_id in places for call_id, _ in rows):
            rows.sort(key=lambda row: places[row[0]])
            calls = [calls[places[call_id]] for call_id, _ in rows]
        if rows:
            self._messages.append(Results(tuple(output for _, output in rows), tuple(calls)))

    def messages(self) -> list[Message]:
        """All messages without the opening."""
        self.end_results()
        return self._messages
