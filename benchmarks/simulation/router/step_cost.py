"""Cost model of an engine step: a fixed part, a part per decoded token, and two parts for prefilling."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from etude.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one engine step = fixed + decode x tokens + (prefill_fixed + prefill x tokens, if any)."""

    fixed_s: float
    decode_token_s: float
    prefill_fixed_s: float
    prefill_token_s: float

    def __post_init__(self) -> None:
        if min(self.fixed_s, self.decode_token_s, self.prefill_fixed_s, self.prefill_token_s) < 0.0:
            raise ConfigError("no part may be negative", field="StepCost", received=asdict(self))
        if self.fixed_s + self.decode_token_s <= 0.0:
            raise ConfigError("a step must take some time", field="StepCost", received=asdict(self))

    @property
    def prefill_weight(self) -> float:
        """Cost of an input token in sampled tokens, at 8 sequences per step: RoutingConfig.prefill_weight."""
        return self.prefill_token_s / (self.decode_token_s + self.fixed_s / 8.0)


def fit_step_cost(gram: NDArray[np.float64], moment: NDArray[np.float64]) -> StepCost:
    """Non-negative least squares from the sums that the engine's service accumulates (`StepSums`).

    Sums are over steps of f f^T and f x seconds, f = (1, decoded, whether it prefilled, prefilled).
    """
    free = list(range(4))
    while True:
        solution = np.zeros(4)
        solution[free] = np.linalg.lstsq(gram[np.ix_(free, free)], moment[free], rcond=None)[0]
        if solution.min() >= 0.0 or len(free) == 1:
            return StepCost(*(float(part) for part in np.maximum(solution, 0.0)))
        free.remove(int(solution.argmin()))


def read_step_cost(path: Path) -> StepCost:
    """Reads a JSON object with the four fields. Raises ConfigError."""
    try:
        return StepCost(**{key: float(value) for key, value in json.loads(path.read_text("utf-8")).items()})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"no step cost: {error}",
            field="coefficients",
            received=str(path),
            fix="an object with fixed_s, decode_token_s, prefill_fixed_s and prefill_token_s",
        ) from error
