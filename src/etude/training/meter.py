"""Metrics of an RL step over its trained tokens, in total and by version lag."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from etude.algorithms.divergence import k1, k3
from etude.algorithms.effective_size import effective_sample_share
from etude.algorithms.terms import importance_ratio
from etude.training.batches import UNKNOWN_LAG, Update
from etude.training.loss import PolicyLoss, Rows

MAX_LAG = 8
"""Lags from here on are reported together."""

_COLUMNS = ("logprobs", "rollout", "entropy", "clipped", "masked", "seen")


class StepMeter:
    """A table with one column per trained token of the step, filled by the rank that trains on the token.

    All ranks know a token's index in the step, so that the sum of their tables is the complete one: the
    metrics are those of one process, whatever the number of ranks and the size of micro-batches.
    """

    def __init__(self, updates: Sequence[Update]) -> None:
        lags = [_lags(update) for update in updates]
        self._lags = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int32), *lags]))
        self._num_first = len(lags[0]) if lags else 0
        """Trained tokens of the first update, the only one that the sampling weights may still score."""
        self._table = torch.zeros(len(_COLUMNS), len(self._lags))
        self._norms: list[float] = []
        self._num_tokens = 0

    def add(self, rows: Rows, logprobs: Tensor, entropy: Tensor, loss: PolicyLoss) -> None:
        """Records the tokens of one micro-batch; several threads may each add their own."""
        values = (
            logprobs.detach(),
            rows.rollout,
            entropy,
            loss.terms.clipped,
            loss.masked,
            torch.ones_like(entropy),
        )
        self._table[:, rows.places.cpu()] = torch.stack([value.float() for value in values]).cpu()

    def add_update(self, norm: float, num_tokens: int) -> None:
        """Records an update's gradient norm and its number of tokens, prompts included."""
        self._norms.append(norm)
        self._num_tokens += num_tokens

    def summary(self, all_reduce_: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Metrics of the step; only `train_tokens` if no token was trained on."""
        table = all_reduce_(self._table)
        columns: dict[str, Tensor] = dict(zip(_COLUMNS, table, strict=True))
        seen = columns.pop("seen") > 0
        result = {"train_tokens": float(self._num_tokens)}
        if not bool(seen.any()):
            return result
        first = torch.arange(len(seen)) < self._num_first
        result |= {"grad_norm": sum(self._norms) / len(self._norms)}
        result |= _parity(columns, seen & first & (self._lags == 0))
        result |= _figures(columns, seen)
        result |= self._by_lag(columns, seen)
        return result

    def _by_lag(self, columns: dict[str, Tensor], seen: Tensor) -> dict[str, float]:
        """The same metrics per lag, if any token is not of the current version."""
        lags = self._lags.clamp(max=MAX_LAG)
        known = lags[seen & (lags != UNKNOWN_LAG)]
        result = {
            "version_lag_mean": float(known.float().mean()) if len(known) else 0.0,
            "version_lag_max": float(self._lags[seen].max()),
        }
        if not bool(lags[seen].any()):
            return result
        for lag in lags[seen].unique().tolist():
            name = "lag_unknown" if lag == UNKNOWN_LAG else f"lag{lag}"
            rows = seen & (lags == lag)
            result[f"{name}_tokens"] = float(rows.sum())
            result |= {f"{name}_{key}": value for key, value in _figures(columns, rows).items()}
        return result


def _figures(columns: dict[str, Tensor], rows: Tensor) -> dict[str, float]:
    """Ratios and divergences against the sampling policy, of the tokens `rows` [N] bool, at least one."""
    logprobs, rollout = columns["logprobs"][rows], columns["rollout"][rows]
    ratios = importance_ratio(logprobs, rollout)
    return {
        "ratio_p01": quantile(ratios, 0.01),
        "ratio_p50": quantile(ratios, 0.5),
        "ratio_p99": quantile(ratios, 0.99),
        "ratio_max": float(ratios.max()),
        "clipped_share": float(columns["clipped"][rows].mean()),
        "masked_share": float(columns["masked"][rows].mean()),
        "k1": float(k1(rollout, logprobs).mean()),
        "k3": float(k3(rollout, logprobs).mean()),
        "entropy": float(columns["entropy"][rows].mean()),
        "effective_share": effective_sample_share(ratios),
    }


def _parity(columns: dict[str, Tensor], rows: Tensor) -> dict[str, float]:
    """Differences between trainer and engine under equal weights: over tokens that these weights sampled."""
    if not bool(rows.any()):
        return {"parity_tokens": 0.0, "parity_k3": 0.0, "parity_max": 0.0}
    logprobs, rollout = columns["logprobs"][rows], columns["rollout"][rows]
    return {
        "parity_tokens": float(len(logprobs)),
        "parity_k3": float(k3(rollout, logprobs).mean()),
        "parity_max": float((logprobs - rollout).abs().max()),
    }


def quantile(values: Tensor, share: float) -> float:
    """The value that `share` of `values` [N] do not exceed; for any N, unlike torch.quantile."""
    return float(values.kthvalue(max(1, round(share * len(values)))).values)


def _lags(update: Update) -> np.ndarray:
    """[trained tokens] version lags, in the order of their indices."""
    parts = [np.zeros(s.num_trained, dtype=np.int32) if s.lags is None else s.lags[s.sampled] for s in update]
    return np.concatenate([np.zeros(0, dtype=np.int32), *parts])
