"""Manifests: the tensors of a policy version, with a hash of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_128

from etude.errors import WeightUpdateError
from etude.records import ADAPTER_PREFIX, PolicyVersion, TensorEntry, WeightManifest


def describe_tensors(version: PolicyVersion, tensors: Mapping[str, Tensor], url: str) -> WeightManifest:
    """The manifest of a full snapshot; its version carries the digest of all tensors."""
    entries = tuple(describe_tensor(name, tensor) for name, tensor in sorted(tensors.items()))
    return WeightManifest(replace(version, digest=digest_entries(entries)), entries, url)


def check_tensors(manifest: WeightManifest, tensors: Mapping[str, Tensor]) -> None:
    """Raises WeightUpdateError unless `tensors` match the manifest bit for bit."""
    names = {entry.name for entry in manifest.tensors}
    if names != set(tensors):
        differing = sorted(names.symmetric_difference(tensors))
        raise WeightUpdateError(
            f"tensors do not match the manifest of {manifest.version}", field="tensors", received=differing
        )
    for entry in manifest.tensors:
        found = describe_tensor(entry.name, tensors[entry.name], entry.cuts)
        if found != entry:
            raise WeightUpdateError(
                f"tensor differs from the manifest of {manifest.version}",
                field=entry.name,
                received=found,
                fix="fetch the full snapshot again",
            )
    if digest_entries(manifest.tensors) != manifest.version.digest:
        raise WeightUpdateError(
            "manifest does not match its version's digest", field="digest", received=manifest.version.digest
        )


def describe_tensor(name: str, tensor: Tensor, cuts: tuple[int, ...] = ()) -> TensorEntry:
    """The manifest entry of a tensor: name, shape, type and hash. `cuts`: see TensorEntry."""
    if not cuts or not tensor.ndim or sum(cuts) != len(tensor):
        return TensorEntry(name, tuple(tensor.shape), dtype_name(tensor.dtype), hash_tensor(tensor))
    digest = join_digests(hash_tensor(part) for part in torch.split(tensor, list(cuts)))
    return TensorEntry(name, tuple(tensor.shape), dtype_name(tensor.dtype), digest, cuts)


def hash_tensor(tensor: Tensor) -> str:
    """xxh3-128 of the bytes in C order, in hexadecimal digits."""
    return xxh3_128(bytes_of(tensor).data).hexdigest()


def join_digests(digests: Iterable[str]) -> str:
    """The digest of a tensor from those of its parts. See TensorEntry."""
    return xxh3_128("".join(digests).encode()).hexdigest()


def digest_entries(entries: Iterable[TensorEntry]) -> str:
    """The digest of a version: BLAKE3 over its entries, which are sorted by name."""
    hasher = blake3()
    for entry in entries:
        hasher.update(repr(entry).encode())
    return hasher.hexdigest()


def digest_base(manifest: WeightManifest) -> str:
    """The digest of a version without its adapter's factors."""
    return digest_entries(e for e in manifest.tensors if not e.name.startswith(ADAPTER_PREFIX))


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type in manifests, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def make_tensor(entry: TensorEntry, spare: Tensor | None) -> Tensor:
    """A CPU tensor of the entry's type and shape: `spare` if it fits. Raises WeightUpdateError."""
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightUpdateError("unknown type of numbers", field=entry.name, received=entry.dtype)
    if (
        spare is not None
        and (spare.dtype, tuple(spare.shape), spare.device.type) == (dtype, entry.shape, "cpu")
        and spare.is_contiguous()
    ):
        return spare
    return torch.empty(entry.shape, dtype=dtype)


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a tensor in C order: its own memory where it is contiguous on the CPU, else a copy."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


class Versioned(Protocol):
    """Anything with a policy version, such as a manifest."""

    @property
    def version(self) -> PolicyVersion: ...


Staged = TypeVar("Staged", bound=Versioned)


def check_staged(version: PolicyVersion, staged: Staged | None) -> Staged:
    """Returns `staged`. Raises WeightUpdateError unless it is of `version`."""
    if staged is None or staged.version != version:
        raise WeightUpdateError(
            "version is not staged",
            field="version",
            received=f"{version}; staged {staged.version if staged else None}",
        )
    return staged
