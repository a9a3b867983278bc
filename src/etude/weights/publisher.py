"""Publishing of a trainer's weights: the WeightPublisher protocol, and the publisher to a weight store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from etude.errors import EtudeError, StoreError, WeightUpdateError
from etude.records import ADAPTER_PREFIX, PolicyVersion, TensorEntry, WeightManifest
from etude.weights.disk import DiskTensors
from etude.weights.manifest import check_tensors, describe_tensor, digest_entries, dtype_name
from etude.weights.parts import join_entries
from etude.weights.store import WeightStore
from etude.weights.writer import Publication, StoreWriter, WriterOptions, upload


class WeightPublisher(Protocol):
    """Makes named weights fetchable: from this process's memory, a directory of snapshots or a store."""

    def publish(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """Publishes the model's parameters; the returned manifest's version carries their digest.

        Raises StoreError if they cannot be written.
        """
        ...


class Peers(Protocol):
    """The processes that together publish one model, each its own parts."""

    @property
    def rank(self) -> int:
        """Rank of this process."""
        ...

    def exchange(self, value: Any) -> list[Any]:
        """All-gather: the values of all processes, by rank. All processes must make the same calls, each from
        one thread at a time. Raises InfrastructureError if a process has ended."""
        ...


class _Alone:
    """Implements Peers for a single process with the whole model."""

    rank = 0

    def exchange(self, value: Any) -> list[Any]:
        return [value]


class StoreWeights:
    """Publishes to a weight store in the background, and serves the newest version within the process.

    Two copies of the weights are kept in host memory, or on disk: the last committed version, the base of the
    next delta, and the one being uploaded. A publication waits for the one before it.

    Several processes may publish together, each the parts that it holds (see `weights.parts`):

        every rank   copy, hash ── gather ─────> manifest      upload own files ── gather ──────┐
        rank 0       lease                                     directory, number                 └─> commit

    No rank ever has the whole model; each keeps only its own last parts. The version exists once rank 0 has
    committed it, after all files are uploaded; if any rank fails before that, it never exists.
    """

    def __init__(
        self,
        store: WeightStore,
        options: WriterOptions | None = None,
        dtype: torch.dtype | None = None,
        peers: Peers | None = None,
        scratch: Path | None = None,
    ) -> None:
        """`dtype`: floating-point tensors are rounded to it; None: they are not converted. `peers`: see
        `join`. `scratch`: a directory on disk for the copies; None: they stay in memory.

        Raises StoreError, on rank 0, while another writer is alive, or if the store cannot be written.
        """
        self._dtype = dtype
        self._store = store
        self._options = options or WriterOptions()
        self._peers: Peers = peers or _Alone()
        self._writer = StoreWriter(store, self._options) if self._peers.rank == 0 else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weight-upload")
        self._upload: Future[None] | None = None
        self._scratch = scratch
        self._committed: tuple[PolicyVersion, Mapping[str, Tensor]] | None = None
        self._current: tuple[PolicyVersion, Mapping[str, Tensor]] | None = None
        self._spare: Mapping[str, Tensor] = {}
        self._base: dict[str, tuple[Tensor, TensorEntry]] = {}
        """Base tensors of adapters, which are copied and hashed once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_shared(self) -> bool:
        """Whether each of several processes publishes its own parts."""
        return not isinstance(self._peers, _Alone)

    def join(self, peers: Peers) -> None:
        """From now on this process publishes with others, as rank 0, and only its own parts.

        Raises StoreError if a version published alone before could not be uploaded.
        """
        self.flush()
        assert peers.rank == 0, "the first rank has the lease"
        self._peers, self._committed, self._current, self._spare, self._base = peers, None, None, {}, {}

    def publish(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """See WeightPublisher.publish. Returns once everything is copied and hashed; the upload continues.

        With peers, `tensors` are this process's parts, by `Part.stored_name`; together they are the model,
        and every rank gets the same manifest.

        Raises StoreError if the copies cannot be kept, or if the previous upload failed: that version was
        never committed, and the next delta starts from the last committed one. With peers, all ranks raise
        it.
        """
        self.flush()
        kept: list[Mapping[str, Tensor]] = []

        def copy() -> tuple[list[TensorEntry], int | None]:
            copies, own = self._copy_tensors(version, tensors)
            kept.append(copies)
            return own, self._writer and self._writer.next_sequence

        agreed = self._agree(copy)
        if self._dtype is not None:
            version = replace(version, format=dtype_name(self._dtype))
        entries = join_entries(entry for part, _ in agreed for entry in part)
        version = replace(version, digest=digest_entries(entries))
        base = None if self._committed is None else self._committed[0]
        self._current = (version, kept[0])
        self._upload = self._pool.submit(self._write, version, kept[0])
        return WeightManifest(version, entries, self._store.version_url(agreed[0][1]), base)

    def _copy_tensors(
        self, version: PolicyVersion, tensors: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor], list[TensorEntry]]:
        """Private copies of the tensors, and their manifest entries."""
        if self._scratch is not None:
            if self._current is not None and self._current[1] is self._spare:
                self._current = None  # its upload failed
            self._spare = {}  # its file is freed before another is written
            kept = DiskTensors(self._scratch)
            own: list[TensorEntry] = []
            for name, tensor in tensors.items():
                copied = tensor.detach().to("cpu", _type_of(name, tensor, self._dtype))
                own.append(describe_tensor(name, copied))
                kept.add(name, copied)
            return kept, own
        held = self._base if version.adapter is not None else {}
        found = {name: held.get(name) or self._copy(name, tensor) for name, tensor in tensors.items()}
        if version.adapter is not None:
            self._base = {name: pair for name, pair in found.items() if not name.startswith(ADAPTER_PREFIX)}
        return {name: tensor for name, (tensor, _) in found.items()}, [entry for _, entry in found.values()]

    def _copy(self, name: str, tensor: Tensor) -> tuple[Tensor, TensorEntry]:
        """A copy on the CPU, in the spare one's memory where it fits, and its entry."""
        target, wanted = self._spare.get(name), _type_of(name, tensor, self._dtype)
        if target is None or (target.dtype, target.shape) != (wanted, tensor.shape):
            target = torch.empty(tensor.shape, dtype=wanted)
        target.copy_(tensor.detach())
        return target, describe_tensor(name, target)

    def flush(self) -> None:
        """Waits until the last publication is committed. Raises StoreError if that failed, and what `Peers`
        raise."""
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.result()

    def fetch(self, manifest: WeightManifest) -> Mapping[str, Tensor]:
        """The newest version, for engines in this process: must not be modified, nor read after the next but
        one is published. Raises WeightUpdateError for other versions, and if this process has only parts."""
        if self.is_shared or self._current is None or self._current[0] != manifest.version:
            raise WeightUpdateError(
                "only the newest version is available here, if published whole",
                field="version",
                received=str(manifest.version),
                fix="fetch other versions with a Subscriber",
            )
        check_tensors(manifest, self._current[1])
        return self._current[1]

    def close(self) -> None:
        """Waits for the upload and releases the lease. Raises as `flush`."""
        try:
            self.flush()
        finally:
            self._pool.shutdown()
            if self._writer is not None:
                self._writer.close()

    def _write(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> None:
        """Uploads and commits, in the background; with peers, in lockstep with them."""
        base_version, base = self._committed or (None, None)
        publication: Publication | None = None
        writer, folder = self._writer, self._store.folder
        try:
            publication = self._agree(lambda: writer and writer.begin())[0]
            assert publication is not None, "the first rank has the lease"
            begun, rank = publication, self._peers.rank
            files = self._agree(lambda: upload(folder, begun, self._options, tensors, base, rank))
            commit = self._agree(lambda: writer and writer.commit(begun, version, base_version, files))[0]
        except BaseException:
            self._spare = tensors
            if writer is not None and publication is not None:
                writer.discard(publication)
            raise
        self._committed = (version, tensors)
        self._spare = base or {}
        self._agree(lambda: writer and writer.clean_up(commit))

    def _agree(self, work: Callable[[], Any]) -> list[Any]:
        """Runs `work` on every peer: the results by rank, or raises the first rank's error on all of them."""
        result, failure = None, None
        try:
            result = work()
        except EtudeError as error:
            failure = error
        except Exception as error:  # any exception: the others must not wait forever
            failure = StoreError(f"publishing failed: {error!r}", field=f"rank {self._peers.rank}")
            failure.__cause__ = error
        exchanged = self._peers.exchange((result, failure))
        for rank, (_, theirs) in enumerate(exchanged):
            if theirs is not None:
                raise failure if rank == self._peers.rank and failure is not None else theirs
        return [value for value, _ in exchanged]


def _type_of(name: str, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The type that a tensor is published in. Factors of adapters are not rounded."""
    rounds = tensor.is_floating_point() and not name.startswith(ADAPTER_PREFIX)
    return dtype if dtype is not None and rounds else tensor.dtype
