"""Scoring given tokens with the engine's own forward pass, as a prompt is computed.

The engine's scores must come from the kernels that sample: scores of the trainer's module would only agree
with the trainer. So a sequence runs through pages of the cache in parts, as a prompt does, and the logits of
every row are computed instead of only the last one's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.inference.cache import StepRows
from etude.inference.forward import ForwardPass
from etude.inference.native import NativeForward
from etude.model.kernels.native import calls
from etude.records import PolicyVersion, Scores

_LOGIT_FLOATS = 16 << 20
"""Most logits in memory at once: 64 MiB."""


class Scoring:
    """One scoring, computed in parts. Between two parts the engine may step, but not swap weights."""

    def __init__(
        self,
        compute: ForwardPass,
        tokens: NDArray[np.int32],
        pages: list[int],
        part_tokens: int,
        vocab_size: int,
        version: PolicyVersion,
        adapter: int | None = None,
    ) -> None:
        """`tokens` [T]; `pages`: enough for all of them, used by no session: they are overwritten;
        `part_tokens`: most positions computed in one part; `version`: of the weights in `compute`;
        `adapter`: slot of the version's adapter, None without one."""
        self.pages = pages
        self._compute = compute
        self._tokens = tokens.astype(np.int64)
        self._table = np.array([pages], dtype=np.int32)
        self._part_tokens = part_tokens
        self._num_rows = max(1, _LOGIT_FLOATS // vocab_size)
        self._version = version
        self._adapters = None if adapter is None else np.array([adapter])
        self._computed = 0
        self._logprobs = np.zeros(len(tokens), dtype=np.float32)
        self._routes: list[NDArray[Any]] = []

    @property
    def is_done(self) -> bool:
        """Whether all parts are computed."""
        return self._computed == len(self._tokens)

    @torch.no_grad()
    def advance(self) -> None:
        """Computes the next part. May run in another thread than the engine's steps, but not during one."""
        start, end = self._computed, min(self._computed + self._part_tokens, len(self._tokens))
        counts, starts = np.array([end - start]), np.array([start])
        rows = StepRows.plan(self._tokens[start:end], self._table, counts, starts, self._adapters)
        hidden, chosen = self._compute(rows)
        self._routes.append(chosen.numpy())
        following = torch.from_numpy(self._tokens[start + 1 : end + 1])
        if len(following):
            count = self._num_rows
            parts = zip(hidden[: len(following)].split(count), following.split(count), strict=True)
            logprobs = torch.cat([self._logprobs_of(*part) for part in parts])
            self._logprobs[start + 1 : end + 1] = logprobs.numpy()
        self._computed = end

    def _logprobs_of(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """hidden [N, width] and the tokens [N] that follow -> their log-probabilities [N], with the bits that
        the pass itself samples from."""
        logits = self._compute.logits(hidden)
        if isinstance(self._compute, NativeForward):
            distribution = calls.log_softmax(logits, torch.get_num_threads())
        else:
            distribution = logits.log_softmax(dim=-1)
        return distribution.gather(-1, tokens[:, None]).squeeze(-1)

    def scores(self) -> Scores:
        """Log-probabilities [T] at temperature 1, entry 0 being 0, and the routes [T, MoE layers, top_k] of
        every position, None for a dense model. To be called once `is_done`."""
        assert self.is_done
        routes = np.concatenate(self._routes)
        return Scores(self._logprobs, self._version, routes if routes.shape[1] else None)
