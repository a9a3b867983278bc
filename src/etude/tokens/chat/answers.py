"""Answers as events while they are sampled, and the base class of the writers of all dialects.

    sampler -> reader -> Sampled ... Sampled, Ended --AnswerWriter--> documents of a stream | one document

An answer is made of blocks: text, reasoning and calls, in the order in which they were sampled.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from etude.records import SampleChunk
from etude.tokens.chat.reader import CallDelta, CallHead, Part
from etude.tokens.chat.requests import ChatRequest
from etude.tokens.grammar import ReasoningDelta, TextDelta
from etude.tokens.tokenizer import Tokenizer

Ending = Literal["stop", "length", "calls", "abort"]
Document = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """Sampled tokens of one answer, and the parts that they add to the response."""

    parts: Sequence[Part]
    chunk: SampleChunk | None
    """Cut to the answer. None: nothing was sampled, only held-back text is released."""
    index: int = 0
    """Index of the answer within its request."""
    num_cached: int = 0
    """In the first event of an answer: tokens of the prompt that were taken from a cache."""


@dataclass(frozen=True, slots=True)
class Ended:
    """One answer is complete."""

    ending: Ending
    num_tokens: int
    stop: str | None = None
    """The stop string that ended it."""
    index: int = 0


Event = Sampled | Ended


BlockKind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Block:
    """Text, reasoning or a call of an answer."""

    kind: BlockKind
    text: str = ""
    """For a call: the JSON text of its arguments."""
    id: str = ""
    name: str = ""


_KINDS: dict[type[Part], BlockKind] = {TextDelta: "text", ReasoningDelta: "reasoning", CallDelta: "call"}


@dataclass(slots=True, eq=False)
class Choice:
    """One answer while it is written."""

    index: int
    blocks: list[Block] = field(default_factory=list[Block])
    rows: list[Document] = field(default_factory=list[Document])
    """Log-probabilities, if requested."""
    num_cached: int | None = None
    """Tokens of its prompt taken from a cache; None until it has begun."""
    num_characters: int = 0
    """Characters of its tokens' texts that a stream of completions has sent."""
    ended: Ended | None = None

    def add(self, part: Part) -> bool:
        """Adds a part to the last block, or begins a new block; returns whether it began one."""
        if isinstance(part, CallHead):
            self.blocks.append(Block("call", "", part.id, part.name))
            return True
        kind = _KINDS[type(part)]
        begins = not self.blocks or self.blocks[-1].kind != kind
        if begins:
            self.blocks.append(Block(kind))
        self.blocks[-1].text += part.text
        return begins

    def text_of(self, kind: str) -> str:
        """The text of all blocks of a kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def calls(self) -> list[Block]:
        """The calls."""
        return [block for block in self.blocks if block.kind == "call"]


class AnswerWriter:
    """Writes the answers to one request, streamed or whole. Base class of the writers of all dialects."""

    tail: bytes = b""
    """Bytes that end a successful stream."""
    id_prefix: ClassVar[str]

    def __init__(
        self, request: ChatRequest, answer_id: str, prompt_tokens: int, tokenizer: Tokenizer, model: str
    ) -> None:
        """`model`: the model name in the response."""
        self.id = self.id_prefix + answer_id
        self.model = model
        self.request = request
        self.created_s = int(time.time())
        self.prompt_tokens = prompt_tokens
        """Counted once per prompt, however many samples share it."""
        self.version: str | None = None
        """Policy version of the last sampled tokens."""
        self.choices = [Choice(index) for index in range(request.num_answers)]
        self._tokenizer = tokenizer

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answers that have ended."""
        return sum(choice.ended.num_tokens for choice in self.choices if choice.ended)

    @property
    def cached_tokens(self) -> int:
        """Tokens of all prompts that were cached for every sample, of the answers that have begun. Answers
        are numbered prompt by prompt."""
        least: dict[int, int] = {}
        for choice in self.choices:
            if choice.num_cached is not None:
                prompt = choice.index // self.request.sampling.num_samples
                least[prompt] = min(choice.num_cached, least.get(prompt, choice.num_cached))
        return sum(least.values())

    def usage(self, prompt: str = "prompt", answer: str = "completion") -> Document:
        """OpenAI's `usage`; the responses API calls the fields `input` and `output`."""
        return {
            f"{prompt}_tokens": self.prompt_tokens,
            f"{answer}_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            f"{prompt}_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def begin(self) -> list[Document]:
        """The documents that begin a stream."""
        return []

    def add_event(self, event: Event) -> list[Document]:
        """Adds an event to the answer; returns the documents that a stream sends for it."""
        choice = self.choices[event.index]
        if isinstance(event, Ended):
            choice.ended = event
            return self._finish(choice, event)
        if choice.num_cached is None:
            choice.num_cached = event.num_cached
        rows: list[Document] = []
        if event.chunk is not None:
            self.version = str(event.chunk.version)
            rows = token_rows(event.chunk, self._tokenizer) if self.request.sampling.logprobs else []
        choice.rows += rows
        documents: list[Document] = []
        for part in event.parts:
            documents += self._write(choice, part, choice.add(part), rows)
            rows = []
        return documents + (self._write_rows(choice, rows) if rows else [])

    def end(self) -> list[Document]:
        """The documents that end a stream."""
        return []

    def whole(self) -> Document:
        """The whole answer as one document, after its last event."""
        raise NotImplementedError

    def _write(self, choice: Choice, part: Part, begins: bool, rows: list[Document]) -> list[Document]:
        """The documents of a stream for an added part. `begins`: it is the first of its block."""
        raise NotImplementedError

    def _write_rows(self, choice: Choice, rows: list[Document]) -> list[Document]:
        """The documents of a stream for tokens whose text is still held back."""
        return []

    def _finish(self, choice: Choice, ended: Ended) -> list[Document]:
        """The documents of a stream at the end of one answer."""
        raise NotImplementedError


async def stream_answers(events: AsyncGenerator[Event], writer: AnswerWriter) -> AsyncGenerator[bytes]:
    """Streams a request's answers as server-sent events, the first with the first tokens. Closes `events`."""
    documents = writer.begin()
    async with aclosing(events):
        async for event in events:
            documents += writer.add_event(event)
            if documents:
                yield b"".join(map(encode_event, documents))
            documents = []
    yield b"".join(map(encode_event, writer.end())) + writer.tail


async def collect_answers(events: AsyncGenerator[Event], writer: AnswerWriter) -> Document:
    """A request's answers as one document. Closes `events`."""
    async with aclosing(events):
        async for event in events:
            writer.add_event(event)
    return writer.whole()


def end_of(choice: Choice) -> Ended:
    """The final event of a complete answer."""
    assert choice.ended is not None, "events end with Ended"
    return choice.ended


def token_rows(chunk: SampleChunk, tokenizer: Tokenizer) -> list[Document]:
    """Log-probabilities of a chunk's tokens in the form of chat completions, under the distribution that was
    sampled from. `raw_logprob`, if requested: under the model's own."""
    rows: list[Document] = []
    for place, token in enumerate(chunk.tokens.tolist()):
        row = {**_token_row(token, float(chunk.logprobs[place]), tokenizer), "top_logprobs": []}
        if chunk.raw_logprobs is not None:
            row["raw_logprob"] = float(chunk.raw_logprobs[place])
        if chunk.top_tokens is not None and chunk.top_logprobs is not None:
            pairs = zip(chunk.top_tokens[place].tolist(), chunk.top_logprobs[place].tolist(), strict=True)
            # -1 pads rows with fewer
            row["top_logprobs"] = [_token_row(*pair, tokenizer) for pair in pairs if pair[0] >= 0]
        rows.append(row)
    return rows


def _token_row(token: int, logprob: float, tokenizer: Tokenizer) -> Document:
    data = tokenizer.decode_bytes([token])
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def encode_event(document: Mapping[str, Any]) -> bytes:
    """One server-sent event: named by the document's `type`, where it has one."""
    kind = document.get("type")
    name = f"event: {kind}\n" if kind else ""
    return f"{name}data: {json.dumps(document)}\n\n".encode()
