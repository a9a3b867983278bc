"""A server that speaks OpenAI's API, under load: streamed answers, timed as their events come."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from benchmarks.load.runner import Clock, LoadError, TurnRecord
from benchmarks.load.workload import LoadSession

from etude.inference.headers import SESSION_HEADER
from etude.serving.client import Answer, Client, NoAnswerError, check_address, error_in, read_events

Api = Literal["chat", "completions", "tokens"]
"""`tokens`: completions of token ids, as they were recorded; for servers with the tokenizer of the record."""
_PROBE_WORDS = 200
_CONNECT_S = 10.0
_SYLLABLES = ("ka", "lo", "mi", "ne", "pu", "ra", "si", "to", "ve", "zu", "bo", "da", "fe", "gi", "hu")


class HttpTarget:
    """Sends conversations: of made-up words, or the very tokens of recorded ones. Close it at the end.
    Implements `LoadTarget`.

    Call `calibrate` before a load of words. The server's tokenizer is not known here: how many words make a
    token is measured by two requests.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api: Api = "chat",
        key: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """`extra`: further fields of every request, such as {"ignore_eos": true} where a server knows it."""
        check_address(url)
        base = url.rstrip("/").removesuffix("/v1")
        self._http = Client(base, key, within_s=math.inf, connect_s=_CONNECT_S, refusal=_refusal)
        self._model = model
        self._api: Api = api
        self._extra = dict(extra or {})
        self._words_per_token = 1.0
        self.message_tokens = 0
        """What the server adds to a message at most, once `calibrate` has measured it."""
        self._said: dict[str, list[str]] = {}
        """Session -> inputs and answers in turn."""

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()

    async def calibrate(self) -> float:
        """Measures words per token; returns it. Raises LoadError where the server does not answer, or does
        not count its input."""
        counts: list[int] = []
        for words in (1, 1 + _PROBE_WORDS):
            record = TurnRecord("probe", 0, 0.0)
            await self._ask(self._said_in([_words((0,), words)]), "probe", 1, record, lambda: 0.0)
            counts.append(record.prompt_tokens)
        if counts[1] <= counts[0]:
            raise LoadError(
                "the server does not say how many tokens its input has",
                field="usage",
                received=counts,
                fix='play recorded sessions with api "tokens", or a server that knows stream_options',
            )
        self._words_per_token = _PROBE_WORDS / (counts[1] - counts[0])
        self.message_tokens = counts[0]
        return self._words_per_token

    async def turn(self, session: LoadSession, record: TurnRecord, clock: Clock) -> None:
        turn = session.turns[record.turn]
        if self._api == "tokens":
            prompt = {"prompt": session.recorded_prompt(record.turn).tolist()}
            await self._ask(prompt, session.id, turn.output_tokens, record, clock)
            return
        said = self._said.setdefault(session.id, [])
        seed = (*session.id.encode(), record.turn)
        said.append(_words(seed, max(1, round(turn.input_tokens * self._words_per_token))))
        said.append(await self._ask(self._said_in(said), session.id, turn.output_tokens, record, clock))

    async def end(self, session: LoadSession) -> None:
        self._said.pop(session.id, None)

    async def _ask(
        self, said: dict[str, Any], session: str, max_tokens: int, record: TurnRecord, clock: Clock
    ) -> str:
        """One streamed answer's text."""
        body = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        body |= {**said, "max_tokens": max_tokens, **self._extra}
        path = "/v1/chat/completions" if self._api == "chat" else "/v1/completions"
        text: list[str] = []
        ended = False
        headers = {SESSION_HEADER: session}
        try:
            async with self._http.stream("POST", path, json=body, headers=headers) as answer:
                async for data in read_events(answer.aiter_bytes()):
                    ended = ended or data == "[DONE]"
                    text.append(_take(data, record, clock))
        except NoAnswerError as error:
            kind = type(error.__cause__ or error).__name__
            raise LoadError(f"the answer was cut: {error.message}", field=kind) from error
        if not ended:
            raise LoadError("the stream ended without [DONE]", field="cut")
        record.output_tokens = record.output_tokens or sum(record.arrived_tokens)
        return "".join(text)

    def _said_in(self, said: list[str]) -> dict[str, Any]:
        """What was said, inputs and answers in turn, in the API's own form."""
        if self._api == "completions":
            return {"prompt": " ".join(said)}
        roles = ("user", "assistant")
        messages = [{"role": roles[n % 2], "content": words} for n, words in enumerate(said)]
        return {"messages": messages}


def _take(data: str, record: TurnRecord, clock: Clock) -> str:
    """Notes one event; returns its text. Raises LoadError for an error event."""
    if data == "[DONE]":
        return ""
    now_s = clock()
    try:
        event = json.loads(data)
    except ValueError as error:
        raise LoadError("an event is no JSON", field="malformed", received=data[:80]) from error
    if not isinstance(event, dict):
        raise LoadError("an event is no object", field="malformed", received=data[:80])
    if error := event.get("error"):
        details = error if isinstance(error, dict) else {"message": error}
        raise LoadError(str(details.get("message")), field=str(details.get("code") or "error"))
    usage = event.get("usage")
    if isinstance(usage, dict):
        record.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        record.output_tokens = int(usage.get("completion_tokens") or 0)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and details.get("cached_tokens") is not None:
            record.cached_tokens = int(details["cached_tokens"])
    choices = event.get("choices") or []
    if not choices:
        return ""
    choice = choices[0]
    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    if text:
        record.arrived(now_s)
    return text


def _refusal(answer: Answer) -> LoadError:
    status, error = answer.status_code, error_in(answer)
    if "message" not in error:
        return LoadError(f"the server answered {status}", field=str(status), received=answer.content[:200])
    return LoadError(str(error["message"]), field=f"{status} {error.get('code') or error.get('type')}")


def _words(seed: tuple[int, ...], count: int) -> str:
    """Made-up words, the same for the same seed."""
    generator = np.random.default_rng(seed)
    picks = generator.integers(0, len(_SYLLABLES), (count, 2))
    return " ".join(_SYLLABLES[first] + _SYLLABLES[second] for first, second in picks)
