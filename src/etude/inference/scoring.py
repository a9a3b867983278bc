"""Scoring given tokens with the engine's own forward pass, as a prompt is computed.

What the engine says of tokens must come from the kernels that sample: the trainer's module beside them would
only agree with itself. So a sequence runs through pages of the cache in parts, as a prompt does, and every
row's logits are taken instead of the last one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.inference.cache import PagedCache, StepRows
from etude.inference.forward import ForwardPass
from etude.inference.native import NativeForward
from etude.model.kernels.native import calls

_LOGIT_FLOATS = 16 << 20
"""Most logits that are held at once: 64 MiB of them."""


@torch.no_grad()
def score_tokens(
    compute: ForwardPass,
    cache: PagedCache,
    pages: Sequence[int],
    tokens: NDArray[np.int32],
    step_tokens: int,
    vocab_size: int,
) -> tuple[NDArray[np.float32], NDArray[Any] | None]:
    """Log-probabilities [T] of `tokens` [T] at temperature 1, entry 0 being 0, and the routes [T, MoE layers,
    top_k] of every position; None for a dense model.

    `pages`: enough for all tokens, and nobody else's; what they held is overwritten. `step_tokens`: most
    positions computed in one pass.
    """
    num_rows = max(1, _LOGIT_FLOATS // vocab_size)
    given, table = tokens.astype(np.int64), np.array([pages], dtype=np.int32)
    logprobs, routes = np.zeros(len(tokens), dtype=np.float32), list[NDArray[Any]]()
    for start in range(0, len(tokens), step_tokens):
        end = min(start + step_tokens, len(tokens))
        counts, starts = np.array([end - start]), np.array([start])
        hidden, chosen = compute(StepRows.plan(given[start:end], table, counts, starts))
        routes.append(chosen.numpy())
        following = given[start + 1 : end + 1]
        logprobs[start + 1 : end + 1] = _logprobs_of(compute, hidden[: len(following)], following, num_rows)
    has_routes = bool(cache.routes.shape[2])
    return logprobs, np.concatenate(routes) if has_routes else None


def _logprobs_of(
    compute: ForwardPass, hidden: Tensor, tokens: NDArray[np.int64], num_rows: int
) -> NDArray[np.float32]:
    """hidden [N, width] and the tokens [N] that follow -> their log-probabilities [N]; logits of `num_rows`
    at a time."""
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    for start in range(0, len(tokens), num_rows):
        part = slice(start, min(start + num_rows, len(tokens)))
        distribution = _log_softmax(compute, compute.logits(hidden[part]))
        logprobs[part] = distribution.gather(-1, torch.from_numpy(tokens[part, None])).squeeze(-1).numpy()
    return logprobs


def _log_softmax(compute: ForwardPass, logits: Tensor) -> Tensor:
    """Of the bits that the pass itself draws from."""
    if isinstance(compute, NativeForward):
        return calls.log_softmax(logits, torch.get_num_threads())
    return logits.log_softmax(dim=-1)
