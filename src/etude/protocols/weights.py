"""Interface through which new weights reach a sampler."""

from __future__ import annotations

from typing import Literal, Protocol

from etude.records import PolicyVersion, WeightManifest

KvPolicy = Literal["keep", "recompute"]
"""What happens to the keys and values of running sessions when weights change."""


class WeightSink(Protocol):
    """Receives policy versions in two phases: staged in memory next to the current one, then served."""

    async def stage(self, manifest: WeightManifest) -> None:
        """Fetches and checks the weights. The served version does not change, even if this fails.

        Raises WeightUpdateError on a wrong base, digest, name or shape.
        """
        ...

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        """Serves the staged `version` from the next decode step on."""
        ...

    def current(self) -> PolicyVersion | None:
        """The version in service; None until the first activation, before which nothing is served."""
        ...
