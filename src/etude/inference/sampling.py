"""Sampling the next token, with noise that is a function of (key, position) only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.records import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_ALL_BITS = 0xFFFFFFFFFFFFFFFF
_LEAST = 1e-30
"""Lower bound of temperatures and top-p above 0, which also leaves only the likeliest token: smaller values
are 0 in float32, or turn the logits that they divide into infinities."""


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    state = (state ^ (state >> np.uint64(30))) * _MIX1
    state = (state ^ (state >> np.uint64(27))) * _MIX2
    return state ^ (state >> np.uint64(31))


def hash_key(key: Sequence[int]) -> int:
    """A 64-bit hash of an rng key: `_mix` in plain integers, which cost a tenth of arrays of one."""
    state, golden, mix1, mix2 = 0, int(_GOLDEN), int(_MIX1), int(_MIX2)
    for part in key:
        state = (state + golden + part) & _ALL_BITS
        state = ((state ^ (state >> 30)) * mix1) & _ALL_BITS
        state = ((state ^ (state >> 27)) * mix2) & _ALL_BITS
        state ^= state >> 31
    return state


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """keys [N] of `hash_key`, positions [N] -> uniform draws [N] in [0, 1)."""
    with np.errstate(over="ignore"):
        state = _mix(keys + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def above_zero(value: float) -> float:
    """`value`, raised to `_LEAST` if it is above 0."""
    return max(value, _LEAST) if value > 0.0 else value


def sample(
    logits: Tensor, params: Sequence[SamplingParams], draws: NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    """Draws one token per row by inverting the cumulative distribution at `draws` [N].

    logits [N, vocabulary] float32 -> tokens [N] int64 and their log-probabilities [N] under the processed
    distribution. A greedy row (temperature 0) reports the log-probability at temperature 1.
    """
    log_distribution = process(logits, params)
    greedy = [row for row, param in enumerate(params) if param.temperature == 0.0]
    if len(greedy) == len(params):
        tokens = log_distribution.argmax(dim=-1)
    else:
        tokens = _invert(log_distribution, torch.from_numpy(draws).to(logits.device))
        if greedy:
            tokens[greedy] = log_distribution[greedy].argmax(dim=-1)
    return tokens, log_distribution.gather(-1, tokens[:, None]).squeeze(-1)


def process(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """logits [N, vocabulary] -> log-probabilities of the distributions that `params` ask for; greedy rows
    have that of temperature 1."""
    temperatures = [above_zero(param.temperature) for param in params]
    if any(temperature not in (0.0, 1.0) for temperature in temperatures):
        scale = torch.tensor([temperature or 1.0 for temperature in temperatures], device=logits.device)
        logits = logits / scale[:, None]
    truncated = [row for row, param in enumerate(params) if param.truncated and param.temperature > 0]
    if len(truncated) == len(params):
        logits = _truncate(logits, params)
    elif truncated:
        logits = logits.clone()
        logits[truncated] = _truncate(logits[truncated], [params[row] for row in truncated])
    return logits.log_softmax(dim=-1)


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The requested extra information about one sampled token: raw and top log-probabilities."""

    raw_logprob: float
    tokens: NDArray[np.int32]
    """[k] likeliest first; -1 where fewer than k are possible."""
    logprobs: NDArray[np.float32]
    """[k]"""

    @staticmethod
    def of(logits: Tensor, params: Sequence[SamplingParams], tokens: Tensor) -> list[Alternatives]:
        """From logits [N, vocabulary] and the tokens [N] that were sampled from them."""
        raw = logits.log_softmax(dim=-1).gather(-1, tokens[:, None]).squeeze(-1).tolist()
        widest = min(max(param.top_logprobs for param in params), logits.shape[1])
        logprobs, best = process(logits, params).topk(widest, dim=-1)
        best = best.masked_fill(logprobs.isneginf(), -1).to(torch.int32).numpy()
        rows = zip(raw, params, best, logprobs.numpy(), strict=True)
        return [Alternatives(r, b[: p.top_logprobs], x[: p.top_logprobs]) for r, p, b, x in rows]

    @staticmethod
    def columns(rows: Sequence[Alternatives], params: SamplingParams) -> dict[str, Any]:
        """The fields of a SampleChunk for these tokens; empty if the request asked for none."""
        columns: dict[str, Any] = {}
        if params.raw_logprobs:
            columns["raw_logprobs"] = np.array([row.raw_logprob for row in rows], dtype=np.float32)
        if params.top_logprobs:
            shape = (len(rows), -1 if rows else params.top_logprobs)
            columns["top_tokens"] = np.array([row.tokens for row in rows], dtype=np.int32).reshape(shape)
            columns["top_logprobs"] = np.array([row.logprobs for row in rows], dtype=np.float32).reshape(
                shape
            )
        return columns


def _invert(log_distribution: Tensor, draws: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds the draw; never one of probability 0."""
    cumulative = log_distribution.exp().cumsum(dim=-1, dtype=torch.float64)
    thresholds = draws[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1)


def _truncate(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """logits [N, vocabulary] with -inf where each row's top-k, top-p or min-p cut."""
    vocabulary, device = logits.shape[1], logits.device
    limits = [min(param.top_k or vocabulary, vocabulary) for param in params]
    top_k = torch.tensor(limits, device=device)
    top_p = torch.tensor(
        [above_zero(param.top_p) if param.top_p < 1.0 else 2.0 for param in params], device=device
    )
    min_p = torch.tensor([param.min_p for param in params], device=device)
    widest = max(limits)
    if widest < vocabulary:
        ordered, order = logits.topk(widest, dim=-1)
    else:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = (ordered - logits.logsumexp(dim=-1, keepdim=True)).exp()
    keep = torch.arange(widest, device=device) < top_k[:, None]
    keep &= probabilities.cumsum(dim=-1) - probabilities < top_p[:, None]
    keep &= probabilities >= min_p[:, None] * probabilities[:, :1]
    kept = ordered.masked_fill(~keep, float("-inf"))
    return torch.full_like(logits, float("-inf")).scatter_(-1, order, kept)
