"""What the answers of both endpoints have in common: usage, log-probabilities, the head of each document."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from etude.inference.server.answering import Ended, Event, Sampled
from etude.records import SampleChunk
from etude.tokens.tokenizer import Tokenizer


class Writer(Protocol):
    """Writes the answer to one request: piece by piece, and whole."""

    usage: Usage

    def take(self, event: Event) -> list[dict[str, Any]]:
        """Takes an event in; the documents that a stream sends for it."""
        ...

    def end(self) -> list[dict[str, Any]]:
        """The documents that end a stream."""
        ...

    def whole(self) -> dict[str, Any]:
        """The whole answer as one document, after its last event."""
        ...


@dataclass(slots=True)
class Usage:
    """Tokens of one request. `n` samples share their prompt: it counts once, and as cached only as far as
    none of them had to compute it."""

    prompt_tokens: int
    num_samples: int = 1
    """Of each prompt; answers are numbered prompt by prompt."""
    completion_tokens: int = 0
    _cached: dict[int, int] = field(default_factory=dict[int, int])
    """By answer."""

    def take(self, event: Event) -> None:
        """Counts an event in."""
        if isinstance(event, Ended):
            self.completion_tokens += event.num_tokens
        else:
            self._cached.setdefault(event.index, event.num_cached)

    @property
    def cached_tokens(self) -> int:
        """Tokens of all prompts that were not computed, as far as answers have begun."""
        least: dict[int, int] = {}
        for index, cached in self._cached.items():
            prompt = index // self.num_samples
            least[prompt] = min(cached, least.get(prompt, cached))
        return sum(least.values())

    def document(self) -> dict[str, Any]:
        """As OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Head:
    """What every document of one answer begins with."""

    id: str
    model: str
    version: str | None = None
    """Of the policy, as of the last tokens sampled; told as `system_fingerprint`."""
    created_s: int = field(default_factory=lambda: int(time.time()))

    def document(self, kind: str) -> dict[str, Any]:
        """`kind`: the `object` of the document."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.version,
        }

    def take(self, event: Event) -> None:
        """Learns the version."""
        if isinstance(event, Sampled):
            self.version = str(event.chunk.version)


def token_rows(chunk: SampleChunk, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Log-probabilities of a chunk's tokens, as chat completions tell them: of the distribution that was
    sampled from. `raw_logprob`, where asked for: of the model's own."""
    rows: list[dict[str, Any]] = []
    for place, token in enumerate(chunk.tokens.tolist()):
        row = {**_token_row(token, float(chunk.logprobs[place]), tokenizer), "top_logprobs": []}
        if chunk.raw_logprobs is not None:
            row["raw_logprob"] = float(chunk.raw_logprobs[place])
        if chunk.top_tokens is not None and chunk.top_logprobs is not None:
            row["top_logprobs"] = [
                _token_row(*one, tokenizer)
                for one in top_pairs(chunk.top_tokens[place], chunk.top_logprobs[place])
            ]
        rows.append(row)
    return rows


def top_pairs(tokens: NDArray[np.int32], logprobs: NDArray[np.float32]) -> list[tuple[int, float]]:
    """The likeliest tokens of one place; -1 stands where there are fewer."""
    pairs = zip(tokens.tolist(), logprobs.tolist(), strict=True)
    return [(token, logprob) for token, logprob in pairs if token >= 0]


def _token_row(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.decode_bytes([token])
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def sse(document: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n".encode("utf-8", "surrogatepass")


SSE_END = b"data: [DONE]\n\n"
