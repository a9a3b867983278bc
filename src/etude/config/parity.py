"""The parity gate between trainer and engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from etude.config.base import Section


class ParityConfig(Section):
    """The gate on the difference between the log-probabilities of engine and trainer, for the same tokens and
    weights. See docs/parity.md."""

    num_sequences: int = Field(default=8, ge=0)
    """Number of sequences that both sides score, before RL starts and whenever new weights come into service;
    0: no gate."""
    max_tokens: int = Field(default=2048, ge=16)
    """Largest number of tokens of all these sequences together; long ones are cut."""
    limit: float = Field(default=1e-3, gt=0)
    """Largest k3 that passes: the mean over tokens of exp(d) - 1 - d, with d the trainer's log-probability
    minus the engine's. With `numerics = "invariant"` every d must be 0."""
    on_failure: Literal["stop", "warn"] = "stop"
    """`stop`: the run ends, and its last checkpoint stays. `warn`: the run prints a warning and continues.
    Every check is in metrics.jsonl either way."""
