"""The seam between the loop and whatever takes optimiser steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from etude.records import Group, PolicyVersion, Scores, WeightManifest


class Trainer(Protocol):
    """Owns the weights that learn. How it is saved and restored is not asked for here."""

    @property
    def version(self) -> PolicyVersion:
        """The version of the weights as they are now."""
        ...

    def step(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Takes one RL step (of one or more optimiser updates) on whole groups; returns metrics."""
        ...

    def publish(self) -> WeightManifest:
        """Makes the current weights fetchable and names them."""
        ...

    def score(
        self, sequences: Sequence[NDArray[np.int32]], routes: Sequence[NDArray[Any]] | None = None
    ) -> list[Scores]:
        """Log-probabilities at temperature 1 of each sequence [T_i] under the current weights; with the
        experts that `routes`, [T_i, MoE layers, top_k] each, names, or else those of the router."""
        ...
