"""The seam through which a trainer hands its weights over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from etude.records import PolicyVersion, WeightManifest


class WeightPublisher(Protocol):
    """Makes named weights fetchable: from this process's memory, or as a snapshot in a directory."""

    def publish(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """Copies the model's parameters, under its own names; the returned version carries their digest.

        Raises StoreError if they cannot be written.
        """
        ...
