"""The gate between trainer and engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from etude.config.base import Section


class ParityConfig(Section):
    """How far the engine's log-probabilities may be from the trainer's, of the same tokens under the same
    weights. See docs/parity.md."""

    num_sequences: int = Field(default=8, ge=0)
    """Sequences that both sides score, before RL begins and whenever new weights come into service; 0: no
    gate."""
    max_tokens: int = Field(default=2048, ge=16)
    """Most tokens of them together: long ones are cut."""
    limit: float = Field(default=1e-3, gt=0)
    """Largest k3 that passes: the mean over tokens of exp(d) - 1 - d, with d the trainer's log-probability
    minus the engine's. With `numerics = "invariant"` every d must be 0."""
    on_failure: Literal["stop", "warn"] = "stop"
    """`stop`: the run ends, its last checkpoint stays. `warn`: it says so and goes on; every check is in
    metrics.jsonl either way."""
