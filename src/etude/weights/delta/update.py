"""Encoding and applying updates of whole models: tensors in parallel, with bounded memory."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import BinaryIO, Literal

import numpy as np
from torch import Tensor

from etude.errors import ResourceError, WeightUpdateError
from etude.kit.threads import map_in_order
from etude.records import PolicyVersion, TensorEntry
from etude.weights.delta.chunks import CHUNK_WORDS, decode_chunk, encode_chunk
from etude.weights.delta.classes import Words
from etude.weights.delta.container import (
    MAGIC,
    Frame,
    UpdateManifest,
    damaged,
    hash_frame,
    pack_end,
    read_update,
)
from etude.weights.delta.kernels import DeltaKernels
from etude.weights.delta.native import NativeKernels
from etude.weights.delta.variable import Reader, pack_number
from etude.weights.delta.vectorised import VectorisedKernels
from etude.weights.delta.words import WordLayout, layout_of
from etude.weights.manifest import bytes_of, describe_tensor, digest_entries, hash_tensor, make_tensor

KernelChoice = Literal["auto", "native", "numpy"]
"""`auto`: native code if a C compiler is found, else numpy. Both write the same bytes."""


@functools.cache
def choose_kernels(choice: KernelChoice = "auto") -> DeltaKernels:
    """The kernels of a choice. Raises ResourceError for `native` without a C compiler."""
    if choice == "numpy":
        return VectorisedKernels()
    try:
        return NativeKernels()
    except ResourceError:
        if choice == "native":
            raise
        return VectorisedKernels()


_UNNAMED = PolicyVersion("update", 0)


def encode_update(
    base: Mapping[str, Tensor] | None,
    target: Mapping[str, Tensor],
    *,
    version: PolicyVersion = _UNNAMED,
    base_version: PolicyVersion = _UNNAMED,
    overwrite: bool = False,
    workers: int = 1,
    kernels: KernelChoice = "auto",
) -> bytes:
    """Encodes a compact update from which `apply_update` makes `target` from `base`, bit for bit.

    Tensors may be of any type and on any device. Those of equal name and shape are encoded as differences;
    others are packed whole, as are all if `base` is None. `version` and `base_version` name the two; digests
    are filled in. `overwrite`: about three times as large, but may be applied twice, or again after an abort.
    """
    stream = io.BytesIO()
    write_update(
        stream, base, target, version=version, base_version=base_version, overwrite=overwrite,
        workers=workers, kernels=kernels,
    )  # fmt: skip
    return stream.getvalue()


def write_update(
    stream: BinaryIO,
    base: Mapping[str, Tensor] | None,
    target: Mapping[str, Tensor],
    *,
    version: PolicyVersion = _UNNAMED,
    base_version: PolicyVersion = _UNNAMED,
    overwrite: bool = False,
    workers: int = 1,
    kernels: KernelChoice = "auto",
) -> UpdateManifest:
    """Like `encode_update`, but streams while encoding. `target` is read once per tensor, in the order of
    names, so it may load them lazily. A digest in `base_version` is trusted."""
    chosen = choose_kernels(kernels)
    held = base or {}

    def encode(name: str) -> tuple[TensorEntry, TensorEntry | None, list[bytes]]:
        tensor, before = target[name].detach().cpu().contiguous(), held.get(name)
        entry = describe_tensor(name, tensor)
        # The base's hashes name it; a receiver that knows its digest has them already.
        known = None if before is None or base_version.digest else describe_tensor(name, before)
        return entry, known, _encode_tensor(before, tensor, chosen, overwrite=overwrite)

    stream.write(MAGIC)
    entries: list[TensorEntry] = []
    bases: list[TensorEntry] = []
    frames: list[Frame] = []
    for entry, known, frame in map_in_order(encode, sorted(target), workers):
        stream.writelines(frame)
        entries.append(entry)
        bases += [known] if known else []
        frames.append(Frame(sum(map(len, frame)), hash_frame(*frame)))
    if base is not None and not base_version.digest:
        bases += [describe_tensor(name, base[name]) for name in base if name not in target]
        bases.sort(key=lambda entry: entry.name)
        base_version = replace(base_version, digest=digest_entries(bases))
    manifest = UpdateManifest(
        replace(version, digest=digest_entries(entries)),
        None if base is None else base_version,
        tuple(entries),
        tuple(frames),
    )
    stream.write(pack_end(manifest))
    return manifest


def apply_update(
    base: Mapping[str, Tensor] | None,
    update: bytes | memoryview,
    *,
    out: Mapping[str, Tensor] | None = None,
    workers: int = 1,
    kernels: KernelChoice = "auto",
) -> dict[str, Tensor]:
    """Applies an update: the resulting tensors, on the CPU, each checked against its hash.

    `base` is not changed. `out`: tensors to reuse where name, type and shape fit, such as those of the
    version before the base: fresh memory costs more than decoding. With `out=base` an update is applied in
    place; an error then leaves neither version intact, but an `overwrite` update may be applied again.

    Raises WeightUpdateError for a wrong base or any damage.
    """
    manifest, frames = read_update(update)
    chosen = choose_kernels(kernels)
    held, spare = base or {}, out or {}

    def decode(item: tuple[TensorEntry, memoryview]) -> Tensor:
        entry, frame = item
        before = held.get(entry.name)
        target = make_tensor(entry, spare.get(entry.name))
        try:
            _decode_tensor(frame, before, target, chosen)
        except ValueError as error:
            raise _mismatch(manifest, base, entry.name, str(error)) from error
        if hash_tensor(target) != entry.digest:
            raise _mismatch(manifest, base, entry.name, "the hash of the decoded tensor differs")
        return target

    decoded = map_in_order(decode, zip(manifest.tensors, frames, strict=True), workers)
    return {entry.name: tensor for entry, tensor in zip(manifest.tensors, decoded, strict=True)}


def _encode_tensor(
    base: Tensor | None, target: Tensor, kernels: DeltaKernels, *, overwrite: bool
) -> list[bytes]:
    """The frame of a tensor, in pieces."""
    layout = layout_of(target.dtype)
    chunks: list[bytes] = []
    for before, after in _parts(base, target, layout):
        chunk = encode_chunk(before, after, layout, kernels, overwrite=overwrite)
        chunks += [pack_number(len(chunk)), chunk]
    return chunks


def _decode_tensor(frame: memoryview, base: Tensor | None, target: Tensor, kernels: DeltaKernels) -> None:
    layout, reader = layout_of(target.dtype), Reader(frame)
    for before, after in _parts(base, target, layout):
        decode_chunk(reader.raw(reader.number()), before, after, layout, kernels)
    if reader.left:
        raise ValueError("bytes are left over")


def _parts(base: Tensor | None, target: Tensor, layout: WordLayout) -> Iterator[tuple[Words | None, Words]]:
    """The words of each chunk of both tensors; None for a base of another type or shape."""
    if base is not None and (base.dtype, base.shape) != (target.dtype, target.shape):
        base = None
    kind = np.dtype(f"u{layout.size_bytes}")
    before, after = None if base is None else bytes_of(base).view(kind), bytes_of(target).view(kind)
    for start in range(0, len(after), CHUNK_WORDS):
        part = slice(start, start + CHUNK_WORDS)
        yield None if before is None else before[part], after[part]


def _mismatch(
    manifest: UpdateManifest, base: Mapping[str, Tensor] | None, name: str, problem: str
) -> WeightUpdateError:
    """The error for a wrong base or for damage, distinguished by the base's digest (only computed here)."""
    if manifest.base is None:
        return damaged(problem, field=name)
    entries = [describe_tensor(own, tensor) for own, tensor in sorted((base or {}).items())]
    if base is not None and digest_entries(entries) == manifest.base.digest:
        return damaged(problem, field=name)
    return WeightUpdateError(
        f"the update applies to {manifest.base}, but these weights differ",
        field="base",
        received=None if base is None else digest_entries(entries),
        fix=f"apply it to {manifest.base.digest}, or fetch the full snapshot",
    )
