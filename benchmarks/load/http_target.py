"""Load target for a server with OpenAI's API: streamed answers, timed event by event."""

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
"""`tokens`: completions of recorded token ids, for servers with the recording's tokenizer."""
_PROBE_WORDS = 200
_CONNECT_S = 10.0
_SYLLABLES = ("ka", "lo", "mi", "ne", "pu", "ra", "si", "to", "ve", "zu", "bo", "da", "fe", "gi", "hu")


class HttpTarget:
    """Sends conversations of made-up words, or recorded ones token by token. Close it at the end.
    Implements `LoadTarget`.

    Call `calibrate` before a load of words: the server's tokenizer is unknown here, so two requests measure
    the number of words per token.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api: Api = "chat",
        key: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """`extra`: further fields of every request, such as {"ignore_eos": true} if the server knows it."""
        check_address(url)
        base = url.rstrip("/").removesuffix("/v1")
        self._http = Client(base, key, within_s=math.inf, connect_s=_CONNECT_S, refusal=_refusal)
        self._model = model
        self._api: Api = api
        self._extra = dict(extra or {})
        self._words_per_token = 1.0
        self.message_tokens = 0
        """Most tokens that the server adds to a message, once `calibrate` has measured it."""
        self._texts: dict[str, list[str]] = {}
        """Session -> inputs and answers, alternating."""

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()

    async def calibrate(self) -> float:
        """Measures words per token; returns it. Raises LoadError if the server does not answer, or does not
        report its input tokens."""
        counts: list[int] = []
        for words in (1, 1 + _PROBE_WORDS):
            record = TurnRecord("probe", 0, 0.0)
            await self._request(self._prompt([_words((0,), words)]), "probe", 1, record, lambda: 0.0)
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
            await self._request(prompt, session.id, turn.output_tokens, record, clock)
            return
        texts = self._texts.setdefault(session.id, [])
        seed = (*session.id.encode(), record.turn)
        texts.append(_words(seed, max(1, round(turn.input_tokens * self._words_per_token))))
        texts.append(await self._request(self._prompt(texts), session.id, turn.output_tokens, record, clock))

    async def end(self, session: LoadSession) -> None:
        self._texts.pop(session.id, None)

    async def _request(
        self, prompt: dict[str, Any], session: str, max_tokens: int, record: TurnRecord, clock: Clock
    ) -> str:
        """Sends one streaming request; returns the answer's text."""
        body = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        body |= {**prompt, "max_tokens": max_tokens, **self._extra}
        path = "/v1/chat/completions" if self._api == "chat" else "/v1/completions"
        text: list[str] = []
        ended = False
        headers = {SESSION_HEADER: session}
        try:
            async with self._http.stream("POST", path, json=body, headers=headers) as answer:
                async for data in read_events(answer.aiter_bytes()):
                    ended = ended or data == "[DONE]"
                    text.append(_record_event(data, record, clock))
        except NoAnswerError as error:
            kind = type(error.__cause__ or error).__name__
            raise LoadError(f"the answer was cut: {error.message}", field=kind) from error
        if not ended:
            raise LoadError("the stream ended without [DONE]", field="cut")
        record.output_tokens = record.output_tokens or sum(record.arrived_tokens)
        return "".join(text)

    def _prompt(self, texts: list[str]) -> dict[str, Any]:
        """Request fields for a conversation, given its inputs and answers, alternating."""
        if self._api == "completions":
            return {"prompt": " ".join(texts)}
        roles = ("user", "assistant")
        messages = [{"role": roles[n % 2], "content": words} for n, words in enumerate(texts)]
        return {"messages": messages}


def _record_event(data: str, record: TurnRecord, clock: Clock) -> str:
    """Adds one event to the record; returns its text. Raises LoadError for an error event."""
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
        record.add_piece(now_s)
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
