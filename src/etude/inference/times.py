"""What an engine has done, where its service's wall time went, and how busy it is."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class EngineCounters:
    """What the engine has done since it was made. Units: tokens, steps."""

    decode_tokens: int = 0
    prefill_tokens: int = 0
    steps: int = 0
    weight_updates: int = 0
    cached_tokens: int = 0
    """Prompt tokens that needed no computing: their pages were there."""
    preemptions: int = 0
    """Times that a request lost its pages to an older one."""
    drafted_tokens: int = 0
    """Computed on the guess that they would be sampled."""
    accepted_tokens: int = 0
    """Of those, the ones that were."""


@dataclass(slots=True)
class StepSums:
    """What engine steps cost, summed so that a regression over all of them needs none of them."""

    gram: NDArray[np.float64] = field(default_factory=lambda: np.zeros((4, 4)))
    """Sum of f f^T, where f = (1, decoded tokens, whether it prefilled, prefilled tokens)."""
    moment: NDArray[np.float64] = field(default_factory=lambda: np.zeros(4))
    """Sum of f times the step's seconds."""
    decode_s: float = 0.0
    """Of steps that only decoded."""
    mixed_s: float = 0.0
    """Of steps that did both."""
    mixed_steps: int = 0
    mixed_decode_tokens: int = 0

    def add(self, decode_tokens: int, prefill_tokens: int, elapsed_s: float, num_steps: int = 1) -> None:
        """Counts one step in, or several alike: the sums are of all."""
        features = np.array((num_steps, decode_tokens, prefill_tokens > 0, prefill_tokens))
        self.gram += np.outer(features, features) / num_steps
        self.moment += features * elapsed_s / num_steps
        if decode_tokens and prefill_tokens:
            self.mixed_s += elapsed_s
            self.mixed_steps += 1
            self.mixed_decode_tokens += decode_tokens
        elif decode_tokens:
            self.decode_s += elapsed_s

    def since(self, earlier: StepSums) -> StepSums:
        """The steps that were counted after `earlier`."""
        return StepSums(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


@dataclass(slots=True)
class ServiceTimes:
    """Where the loop's wall time went, in seconds."""

    step_s: float = 0.0
    steps: StepSums = field(default_factory=StepSums)
    waiting_s: float = 0.0
    """Waiting for sessions that were due and still away."""
    swap_s: float = 0.0
    """Exchanging weights: no step runs meanwhile."""
    longest_swap_s: float = 0.0
    """Of one exchange."""
    stage_s: float = 0.0
    """Fetching, checking and copying the next weights, in a thread of their own."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is, for metrics."""

    running: int
    """Requests that are being computed."""
    waiting: int
    """Requests that have come and are not."""
    free_pages: int
    num_pages: int
