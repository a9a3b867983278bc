"""Differences between trainer and engine log-probabilities of the same tokens under the same weights; no I/O.

With d the trainer's log-probability of a token minus the engine's, k3 = mean(exp(d) - 1 - d): never negative,
0 where both agree, and where the engine sampled the tokens an unbiased estimate of KL(engine | trainer) with
little variance (Schulman 2020, "Approximating KL divergence").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

Logprobs = Sequence[NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class ParityFigures:
    """Results of a comparison, over all tokens but the first of each sequence."""

    k3: float
    """Mean of exp(d) - 1 - d; NaN if a log-probability is NaN."""
    p99: float
    """99 % of the tokens have |d| up to this."""
    max: float
    """Largest |d|."""
    differing: float
    """Share of tokens whose two log-probabilities are not equal."""
    num_tokens: int
    num_sequences: int

    @property
    def exact(self) -> bool:
        """Whether both sides are equal bit for bit."""
        return self.differing == 0.0

    def passes(self, limit: float) -> bool:
        """Whether k3 is at most `limit`. A comparison with values that are not finite never passes."""
        return bool(np.isfinite(self.max)) and self.k3 <= limit

    def to_json(self) -> dict[str, float]:
        """All figures by name."""
        return {name: float(value) for name, value in asdict(self).items()}


def compare_logprobs(trainer: Logprobs, engine: Logprobs) -> ParityFigures:
    """Compares log-probabilities [T_i] of the same sequences from both sides; entry 0 of each is ignored.

    Computed in float64. Sequences of one token are counted but contribute nothing.
    """
    pairs = list(zip(trainer, engine, strict=True))
    assert all(len(ours) == len(theirs) for ours, theirs in pairs), "both sides score the same tokens"
    if not sum(max(0, len(ours) - 1) for ours, _ in pairs):
        return ParityFigures(0.0, 0.0, 0.0, 0.0, 0, len(pairs))
    ours = np.concatenate([values[1:] for values, _ in pairs])
    theirs = np.concatenate([values[1:] for _, values in pairs])
    with np.errstate(invalid="ignore", over="ignore"):
        d = ours.astype(np.float64) - theirs.astype(np.float64)
        k3 = float(np.mean(np.expm1(d) - d))
    size = np.abs(d)
    return ParityFigures(
        k3,
        float(np.quantile(size, 0.99, method="inverted_cdf")),
        float(size.max()),
        float(np.mean(ours != theirs)),
        len(d),
        len(pairs),
    )


def choose_sequences(
    candidates: Sequence[NDArray[np.int32]], num_sequences: int, max_tokens: int
) -> list[NDArray[np.int32]]:
    """Up to `num_sequences` of `candidates`, evenly spaced and in their order, with `max_tokens` in total:
    each gets an equal share, and what short ones do not use goes to long ones, which are truncated."""
    usable = [tokens for tokens in candidates if len(tokens) > 1]
    count = min(num_sequences, len(usable), max_tokens // 2)
    chosen = [usable[place * len(usable) // count] for place in range(count)]
    room, lengths = max_tokens, [0] * count
    for num_done, index in enumerate(sorted(range(count), key=lambda i: len(chosen[i]))):
        lengths[index] = min(len(chosen[index]), room // (count - num_done))
        room -= lengths[index]
    return [tokens[:length] for tokens, length in zip(chosen, lengths, strict=True)]
