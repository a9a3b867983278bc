"""Which weights the run's clusters may sample with, as the run has announced them."""

from __future__ import annotations

from collections import OrderedDict

from etude.records import PolicyVersion, WeightManifest

_KNOWN_VERSIONS = 64
"""By which a cluster's claim to serve one is checked."""


class AnnouncedWeights:
    """The manifest of the weights in service, and which versions were in service lately."""

    def __init__(self) -> None:
        self.manifest: WeightManifest | None = None
        """Of the weights in service."""
        self._digests: OrderedDict[tuple[str, int], str] = OrderedDict()
        """(lineage, step) -> digest of the newest versions."""

    @property
    def step(self) -> int:
        """Of the weights in service; 0 before there are any."""
        return 0 if self.manifest is None else self.manifest.version.step

    def announce(self, manifest: WeightManifest) -> None:
        """These are in service from now on."""
        version = manifest.version
        self.manifest = manifest
        self._digests[version.lineage, version.step] = version.digest
        while len(self._digests) > _KNOWN_VERSIONS:
            self._digests.popitem(last=False)

    def knows(self, version: PolicyVersion) -> bool:
        """Whether this version was announced, bit for bit."""
        return self._digests.get((version.lineage, version.step)) == version.digest
