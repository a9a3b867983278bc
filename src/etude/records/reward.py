"""Rewards with their terms, and users' feedback on an agent's work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RewardBreakdown:
    """A reward and its terms.

    `task` alone decides whether a group has variance; the other terms shape behaviour.
    """

    task: float
    """The verdict of the hidden tests, 0..1."""
    terms: Mapping[str, float] = field(default_factory=dict[str, float])
    """Every other term, already weighted; penalties are negative."""
    version: str = "1"
    """Version of the reward's definition: a stored reward is never compared across versions."""

    @property
    def total(self) -> float:
        return self.task + sum(self.terms.values())

    @property
    def is_finite(self) -> bool:
        """Whether every term and their sum are finite: otherwise the reward is ignored."""
        return all(math.isfinite(term) for term in (self.task, *self.terms.values(), self.total))


@dataclass(frozen=True, slots=True)
class FeedbackEvent:
    """One thing that a user did or said about an agent's work."""

    id: str
    trajectory_id: str
    kind: str
    """accept, reject, edit, undo, rating, message, ..."""
    value: float
    time_s: float
    """Unix time."""
    tenant: str = "local"
    turn: int | None = None
    text: str = ""
