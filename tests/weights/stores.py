"""Stores, versions and folders that fail on demand."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import torch
from torch import Tensor

from etude.errors import StoreError
from etude.records import PolicyVersion, WeightManifest
from etude.weights import describe_tensors
from etude.weights.folders import DirectoryFolder, Folder
from etude.weights.store import WeightStore
from etude.weights.writer import WriterOptions

FAST = WriterOptions(snapshot_every=4, keep_snapshots=2, shard_bytes=5000, lease_s=0.3)


def tensors_at(step: int) -> dict[str, Tensor]:
    """A small model of which each step changes a little."""
    generator = torch.Generator().manual_seed(7)
    tensors = {
        "a": torch.randn(2000, generator=generator).bfloat16(),
        "b": torch.randn((30, 40), generator=generator),
        "frozen": torch.ones(5),
    }
    for index in range(step):
        tensors["a"][index % 2000] += 1
        tensors["b"][index % 30, 0] += 1
    return tensors


def version_at(step: int) -> PolicyVersion:
    return PolicyVersion("run", step)


def digest_at(step: int) -> str:
    return describe_tensors(version_at(step), tensors_at(step), "").version.digest


def assert_is(step: int, found) -> None:
    for name, tensor in tensors_at(step).items():
        assert torch.equal(found[name], tensor), name


class FailingFolder:
    """A folder that damages, loses or refuses what it is told to."""

    def __init__(self, inner: Folder) -> None:
        self._inner = inner
        self.url = inner.url
        self.flip: set[str] = set()
        """Names (or parts of them) that come with a flipped bit."""
        self.once = False
        """Damage only the first reading of each."""
        self.lose: set[str] = set()
        self.refuse_writes: set[str] = set()
        self.num_refused = 0
        self.reads: list[str] = []

    def list(self, prefix: str) -> list[str]:
        return self._inner.list(prefix)

    def read(self, name: str) -> bytes:
        self.reads.append(name)
        if any(part in name for part in self.lose):
            raise StoreError("the link is down", field="weights.url", received=name)
        data = bytearray(self._inner.read(name))
        if any(part in name for part in self.flip) and not (self.once and self.reads.count(name) > 1):
            data[len(data) // 2] ^= 4
        return bytes(data)

    def write(self, name: str, data: bytes) -> None:
        if any(part in name for part in self.refuse_writes):
            self.num_refused += 1
            raise StoreError("the weight store failed", received=errno.ENOSPC)
        self._inner.write(name, data)

    def create(self, name: str, data: bytes) -> None:
        if any(part in name for part in self.refuse_writes):
            raise StoreError("the weight store failed", received=errno.ENOSPC)
        self._inner.create(name, data)

    def delete(self, name: str) -> None:
        self._inner.delete(name)

    def sweep(self, prefix: str) -> None:
        self._inner.sweep(prefix)


class BeatingFolder(FailingFolder):
    """A folder whose writer has always beaten since the last look at it."""

    def read(self, name: str) -> bytes:
        data = super().read(name)
        if name.startswith("writers/"):
            return json.dumps(json.loads(data) | {"beats": len(self.reads)}).encode()
        return data


def failing_store(path: Path) -> tuple[WeightStore, FailingFolder]:
    folder = FailingFolder(DirectoryFolder(path))
    return WeightStore(folder), folder


def same_manifest(manifest: WeightManifest, url: str) -> WeightManifest:
    """As it reads for somebody who reaches the store elsewhere."""
    return WeightManifest(manifest.version, manifest.tensors, url, manifest.base)
