"""Interface between the training loop and what takes optimiser steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from etude.records import Group, PolicyVersion, Scores, WeightManifest


class Trainer(Protocol):
    """Owns the weights that are trained. Saving and restoring it is not part of this interface."""

    @property
    def version(self) -> PolicyVersion:
        """The version of the weights as they are now."""
        ...

    def step(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Takes one RL step (of one or more optimiser updates) on whole groups; returns metrics."""
        ...

    def publish(self) -> WeightManifest:
        """Publishes the current weights and returns their manifest."""
        ...

    def score(
        self, sequences: Sequence[NDArray[np.int32]], routes: Sequence[NDArray[Any]] | None = None
    ) -> list[Scores]:
        """Log-probabilities at temperature 1 of each sequence [T_i] under the current weights, with the
        experts in `routes` ([T_i, MoE layers, top_k] each) or, without it, those that the router chooses."""
        ...
