"""Policy versions, weight manifests, and references to arrays too large to be sent inline."""

from __future__ import annotations

from dataclasses import dataclass, field

UNKNOWN_FORMAT = "unknown"
"""Format of a model behind an external endpoint: neither its weights nor its logprobs are known."""

ADAPTER_PREFIX = "adapter."
"""Prefix of the names of an adapter's factors, which a version lists together with its base's tensors."""


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """One set of weights in one line of descent.

    Versions of one lineage are ordered by `step`. `digest` is the BLAKE3 hex digest of the weights
    themselves, so that two versions with equal digests compute the same thing.
    """

    lineage: str
    """The run (or import) that the weights descend from."""
    step: int
    """Optimiser steps taken in this lineage; 0 is where the lineage began."""
    digest: str = ""
    """BLAKE3 hex digest over the named tensors; empty if not computed yet."""
    format: str = "float32"
    """Number format in which the weights are served: float32, bfloat16, fp8, ...; `UNKNOWN_FORMAT` for a
    model that is not ours, whose tokens are never trained on."""
    adapter: str | None = None
    """Name of a low-rank adapter on top of the weights, if any: from step to step only its factors change."""

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ValueError(f"PolicyVersion.step: must be >= 0, received {self.step}")

    def __str__(self) -> str:
        suffix = f"+{self.adapter}" if self.adapter else ""
        return f"{self.lineage}@{self.step}{suffix}"


@dataclass(frozen=True, slots=True)
class BlobRef:
    """Reference to an array in a blob store: expert routes and sampling supports are never sent inline.

    On the largest models the routes alone are about 1 KB a token.
    """

    url: str
    """`memory:...` within one process, otherwise any URL that the blob store can open."""
    digest: str
    """xxh3-128 hex digest of the array's bytes in C order."""
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a weight manifest."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str
    """xxh3-128 hex digest of the tensor's bytes in C order; with `cuts`, of the digests of the parts."""
    cuts: tuple[int, ...] = field(default=(), repr=False)
    """Rows of each part, if the tensor was published in parts: no process need have held it whole."""


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """The tensors of a published policy version. A weight update is applied whole or not at all."""

    version: PolicyVersion
    tensors: tuple[TensorEntry, ...]
    url: str
    """Where the bytes are: `memory:...` within one process, otherwise a weight store's URL."""
    base: PolicyVersion | None = None
    """The version that a delta applies to; None for a full snapshot."""
