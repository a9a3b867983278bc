"""Metrics of an engine and its service: counters, wall times and current load."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class EngineCounters:
    """Counters of an engine since its creation. Units: tokens, steps."""

    decode_tokens: int = 0
    prefill_tokens: int = 0
    steps: int = 0
    weight_updates: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache: computed by another request, or before a preemption."""
    preemptions: int = 0
    """How often a request lost its pages to an older one."""
    drafted_tokens: int = 0
    """Verified drafts."""
    accepted_tokens: int = 0
    """Accepted drafts among them."""


@dataclass(slots=True)
class StepSums:
    """Sufficient statistics for a linear regression of step time on decoded and prefilled tokens."""

    gram: NDArray[np.float64] = field(default_factory=lambda: np.zeros((4, 4)))
    """Sum of f f^T, where f = (1, decoded tokens, whether it prefilled, prefilled tokens)."""
    moment: NDArray[np.float64] = field(default_factory=lambda: np.zeros(4))
    """Sum of f times the step's seconds."""
    decode_s: float = 0.0
    """Seconds of decode-only steps."""
    mixed_s: float = 0.0
    """Seconds of steps that decoded and prefilled."""
    mixed_steps: int = 0
    mixed_decode_tokens: int = 0

    def add(self, decode_tokens: int, prefill_tokens: int, elapsed_s: float, num_steps: int = 1) -> None:
        """Adds one step, or `num_steps` equal ones, of which the other arguments are the sums."""
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
        """The sums of the steps after `earlier`."""
        return StepSums(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


@dataclass(slots=True)
class ServiceTimes:
    """Wall times of the service's loop, in seconds."""

    step_s: float = 0.0
    steps: StepSums = field(default_factory=StepSums)
    waiting_s: float = 0.0
    """Waiting for sessions that were due and had not returned."""
    swap_s: float = 0.0
    """Swapping weights: no step runs meanwhile."""
    longest_swap_s: float = 0.0
    """The longest single swap."""
    stage_s: float = 0.0
    """Fetching, checking and copying the next weights, in a separate thread."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Current load of an engine, for metrics."""

    running: int
    """Requests that are being computed."""
    waiting: int
    """Requests that have arrived and are not being computed."""
    free_pages: int
    num_pages: int
