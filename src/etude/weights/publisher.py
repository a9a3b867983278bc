"""How a trainer hands its weights over: the seam, and the publisher that feeds a weight store."""

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
        """Copies the model's parameters, under its own names; the returned version carries their digest.

        Raises StoreError if they cannot be written.
        """
        ...


class Peers(Protocol):
    """The processes that publish one model together, each its own parts of it."""

    @property
    def rank(self) -> int:
        """This one's place among them."""
        ...

    def exchange(self, value: Any) -> list[Any]:
        """What each of them gives, in the order of ranks. Every process calls it at the same points; no two
        threads of one at a time. Raises InfrastructureError where one is gone."""
        ...


class _Alone:
    """Implements Peers for one process that has everything."""

    rank = 0

    def exchange(self, value: Any) -> list[Any]:
        return [value]


class StoreWeights:
    """Publishes to a weight store, in the background, and hands the newest version over within the process.

    Two copies of the weights stay in host memory, or on disk: the version that was committed last, which the
    next delta is taken from, and the one on its way. A publication waits for the one before it.

    Several processes may publish together, each the parts that it holds (see `weights.parts`):

        every rank   copy, hash ── tell what ──> manifest      upload own files ── tell which ──┐
        rank 0       lease                                     where, which number               └─> commit

    No rank ever has the whole model, and each remembers no more than its own last parts. The version exists
    once rank 0 has committed it, which it does when all files are there; if any rank fails or dies before
    that, it never does, on any rank.
    """

    def __init__(
        self,
        store: WeightStore,
        options: WriterOptions | None = None,
        dtype: torch.dtype | None = None,
        peers: Peers | None = None,
        scratch: Path | None = None,
    ) -> None:
        """`dtype`: floating-point tensors are rounded to it on their way; None leaves all as they are.
        `peers`: see `join`. `scratch`: a directory on disk for the copies; None: they stay in memory.

        Raises StoreError, on the first of the peers, while another writer is alive, or where nothing can be
        written.
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
        """Of adapters: it is copied and hashed once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_shared(self) -> bool:
        """Whether each of several processes publishes its own parts."""
        return not isinstance(self._peers, _Alone)

    def join(self, peers: Peers) -> None:
        """From now on this process publishes with others, as their first: its own parts only.

        Raises StoreError if what it has published alone could not be uploaded.
        """
        self.flush()
        assert peers.rank == 0, "the first rank has the lease"
        self._peers, self._committed, self._current, self._spare, self._base = peers, None, None, {}, {}

    def publish(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """See WeightPublisher.publish. Returns when everything is copied and hashed; the upload goes on.

        With peers, `tensors` are this process's parts, by `Part.stored_name`; all of them make the model, and
        every rank gets the same manifest.

        Raises StoreError if nothing can be kept, or if the upload before this one failed: that version was
        never committed, and the next delta is taken from the last that was. With peers, all of them raise it.
        """
        self.flush()
        kept: list[Mapping[str, Tensor]] = []

        def keep() -> tuple[list[TensorEntry], int | None]:
            copies, own = self._keep(version, tensors)
            kept.append(copies)
            return own, self._writer and self._writer.next_sequence

        agreed = self._agree(keep)
        if self._dtype is not None:
            version = replace(version, format=dtype_name(self._dtype))
        entries = join_entries(entry for part, _ in agreed for entry in part)
        version = replace(version, digest=digest_entries(entries))
        base = None if self._committed is None else self._committed[0]
        self._current = (version, kept[0])
        self._upload = self._pool.submit(self._write, version, kept[0])
        return WeightManifest(version, entries, self._store.version_url(agreed[0][1]), base)

    def _keep(
        self, version: PolicyVersion, tensors: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor], list[TensorEntry]]:
        """Copies that nobody changes, and what they are."""
        if self._scratch is not None:
            if self._current is not None and self._current[1] is self._spare:
                self._current = None  # its upload failed
            self._spare = {}  # its file goes away before another is written
            kept = DiskTensors(self._scratch)
            own: list[TensorEntry] = []
            for name, tensor in tensors.items():
                copied = tensor.detach().to("cpu", _type_of(name, tensor, self._dtype))
                own.append(describe_tensor(name, copied))
                kept.add(name, copied)
            return kept, own
        held = self._base if version.adapter is not None else {}
        fresh = {name: tensor for name, tensor in tensors.items() if name not in held}
        copies = _copy(fresh, self._spare, self._dtype)
        found = {name: (tensor, describe_tensor(name, tensor)) for name, tensor in copies.items()} | held
        if version.adapter is not None:
            self._base = {name: one for name, one in found.items() if not name.startswith(ADAPTER_PREFIX)}
        return {name: tensor for name, (tensor, _) in found.items()}, [entry for _, entry in found.values()]

    def flush(self) -> None:
        """Waits until what was published is committed. Raises StoreError if it could not be, and what `Peers`
        raise."""
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.result()

    def fetch(self, manifest: WeightManifest) -> Mapping[str, Tensor]:
        """The newest version, for engines in this process: read, never write it, and not after the next but
        one is published. Raises WeightUpdateError for any other, and where it has only parts of it."""
        if self.is_shared or self._current is None or self._current[0] != manifest.version:
            raise WeightUpdateError(
                "only the newest version is at hand, and only where it is published whole",
                field="version",
                received=str(manifest.version),
                fix="fetch others with a Subscriber",
            )
        check_tensors(manifest, self._current[1])
        return self._current[1]

    def close(self) -> None:
        """Waits for the upload and lets the next writer in. Raises as `flush`."""
        try:
            self.flush()
        finally:
            self._pool.shutdown()
            if self._writer is not None:
                self._writer.close()

    def _write(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> None:
        """Uploads and commits, in the background; with peers, in step with them."""
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
        self._agree(lambda: writer and writer.tidy(commit))

    def _agree(self, work: Callable[[], Any]) -> list[Any]:
        """Each peer's result, or on each of them the first one's error."""
        result, failure = None, None
        try:
            result = work()
        except EtudeError as error:
            failure = error
        except Exception as error:  # whatever it is, the others must not wait for it
            failure = StoreError(f"publishing failed: {error!r}", field=f"rank {self._peers.rank}")
            failure.__cause__ = error
        exchanged = self._peers.exchange((result, failure))
        for rank, (_, theirs) in enumerate(exchanged):
            if theirs is not None:
                raise failure if rank == self._peers.rank and failure is not None else theirs
        return [value for value, _ in exchanged]


def _copy(
    tensors: Mapping[str, Tensor], spare: Mapping[str, Tensor], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Copies on the CPU, into `spare` where it fits."""
    copies: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            target, wanted = spare.get(name), _type_of(name, tensor, dtype)
            if target is None or (target.dtype, target.shape) != (wanted, tensor.shape):
                target = torch.empty(tensor.shape, dtype=wanted)
            target.copy_(tensor)
            copies[name] = target
    return copies


def _type_of(name: str, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """What a tensor is published as. Factors of adapters are not rounded."""
    rounds = tensor.is_floating_point() and not name.startswith(ADAPTER_PREFIX)
    return dtype if dtype is not None and rounds else tensor.dtype
