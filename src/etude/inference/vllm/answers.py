"""Parses the answers of vLLM's `/inference/v1/generate` and of the worker extension into arrays.

The whole answer and each event of a stream have the same choices; a stream carries version spans with its
last choice and the cached tokens in its usage.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from etude.errors import SamplerError

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Span:
    """Sampled tokens `start` to `end` (exclusive) are of the weights with label `label`."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """n sampled tokens."""

    tokens: NDArray[np.int32]
    """[n]"""
    logprobs: NDArray[np.float32]
    """[n]"""
    top_tokens: NDArray[np.int32] | None = None
    """[n, k]; -1 where fewer are possible."""
    top_logprobs: NDArray[np.float32] | None = None
    """[n, k]; -inf where fewer are possible."""

    def __getitem__(self, part: slice) -> Tokens:
        """A slice of the tokens."""
        columns = (self.tokens, self.logprobs, self.top_tokens, self.top_logprobs)
        cut: list[Any] = [None if values is None else values[part] for values in columns]
        return Tokens(*cut)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """An answer, or one event of a streamed answer."""

    sampled: Tokens
    finish: Finish | None = None
    spans: tuple[Span, ...] = ()
    """Version spans of the whole answer, if reported."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache, if reported."""
    prompt_logprobs: NDArray[np.float32] | None = None
    """[T] of each prompt token given those before it; [0] is 0."""
    routes: Routes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Chosen experts of consecutive positions."""

    start: int
    """Position of the first row."""
    experts: NDArray[Any] = field(default_factory=lambda: np.zeros((0, 0, 0), dtype=np.uint8))
    """[positions, layers, top_k] uint8 or uint16."""


def read_part(document: object, top_logprobs: int) -> Part:
    """Parses one answer or event. `top_logprobs`: number of requested alternatives.

    Raises SamplerError if it is malformed, or if vLLM reports an unknown finish reason.
    """
    try:
        return _read(cast(Mapping[str, Any], document), top_logprobs)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SamplerError(
            f"vLLM's answer cannot be read: {error!r}",
            field="vllm",
            received=str(document)[:300],
            fix="use the version of vLLM that docs/vllm.md names",
        ) from error


def read_routes(document: Mapping[str, Any]) -> Routes:
    """Parses one request's routes from the worker extension's `etude_take_routes`. Raises SamplerError."""
    try:
        shape, dtype = tuple(int(size) for size in document["shape"]), np.dtype(document["dtype"])
        if dtype not in (np.uint8, np.uint16) or len(shape) != 3:
            raise ValueError("not [positions, layers, top_k] of uint8 or uint16")
        data = base64.b64decode(document["data"], validate=True)
        return Routes(int(document["start"]), np.frombuffer(data, dtype=dtype).reshape(shape))
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise SamplerError(f"routes cannot be read: {error!r}", field="vllm") from error


def _read(document: Mapping[str, Any], top_logprobs: int) -> Part:
    usage = document.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    prompt = document.get("prompt_logprobs")
    choices = document["choices"]
    if not choices:
        return Part(_tokens([], top_logprobs), cached_tokens=cached)
    choice = choices[0]
    return Part(
        _tokens(_entries(choice), top_logprobs),
        _finish(choice.get("finish_reason")),
        tuple(
            Span(str(span["version"]), int(span["start"]), int(span["end"]))
            for span in choice.get("weight_versions") or ()
        ),
        cached,
        None if prompt is None else _prompt_logprobs(prompt),
        _inline_routes(choice.get("routed_experts")),
    )


def _entries(choice: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """One log-probability entry per token, checked against the token ids."""
    tokens = choice.get("token_ids") or []
    entries = (choice.get("logprobs") or {}).get("content") or []
    if [entry["token_id"] for entry in entries] != list(tokens):
        if tokens and not entries:
            return [{"token_id": token, "logprob": 0.0, "top_logprobs": []} for token in tokens]
        raise ValueError("log-probabilities of other tokens than were sampled")
    return entries


def _tokens(entries: Sequence[Mapping[str, Any]], k: int) -> Tokens:
    tokens = np.array([entry["token_id"] for entry in entries], dtype=np.int32)
    logprobs = np.array([entry["logprob"] for entry in entries], dtype=np.float32)
    if not k:
        return Tokens(tokens, logprobs)
    top_tokens = np.full((len(entries), k), -1, dtype=np.int32)
    top_logprobs = np.full((len(entries), k), -np.inf, dtype=np.float32)
    for row, entry in enumerate(entries):
        # The sampled token comes first, whatever its rank; impossible ones have a floor instead of -inf.
        likeliest = sorted(entry["top_logprobs"], key=lambda found: found["rank"])
        possible = [found for found in likeliest if found["rank"] <= k and found["logprob"] > _FLOOR]
        for column, found in enumerate(possible[:k]):
            top_tokens[row, column], top_logprobs[row, column] = found["token_id"], found["logprob"]
    return Tokens(tokens, logprobs, top_tokens, top_logprobs)


_FLOOR = -9000.0
"""vLLM writes -9999 for minus infinity."""


def _prompt_logprobs(rows: Sequence[Mapping[str, Any] | None]) -> NDArray[np.float32]:
    values = [0.0 if row is None else next(iter(row.values()))["logprob"] for row in rows]
    return np.array(values, dtype=np.float32)


def _inline_routes(text: str | None) -> Routes | None:
    """Routes of `--enable-return-routed-experts`: an `.npy` file in base64, from the first position on."""
    if not text:
        return None
    array = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    if array.ndim != 3:
        raise ValueError(f"routed experts of shape {array.shape}")
    kind = np.uint8 if array.dtype == np.uint8 else np.uint16
    return Routes(0, array.astype(kind))


def _finish(reason: str | None) -> Finish | None:
    if reason in (None, "stop", "length", "abort"):
        return cast("Finish | None", reason)
    raise SamplerError("vLLM aborted a request", received=reason)
