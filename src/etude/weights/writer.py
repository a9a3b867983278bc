"""The writer of a weight store: encodes, uploads and commits versions, and collects garbage."""

from __future__ import annotations

import contextlib
import io
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3
from torch import Tensor

from etude.errors import StoreError
from etude.kit.memory import return_free_memory
from etude.records import PolicyVersion
from etude.weights.commits import Commit, StoredFile, commit_name, pack_commit
from etude.weights.delta import KernelChoice, write_update
from etude.weights.disk import DiskTensors, TensorSubset
from etude.weights.folders import ExistsError, Folder, MissingError, UnavailableError
from etude.weights.lease import WriterLease
from etude.weights.store import FILES, WANTED, Pins, WeightStore

_LEAST_SHARD_BYTES = 1 << 23


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """How versions are encoded and how long they are kept."""

    snapshot_every: int = 20
    """Versions between full snapshots: the longest chain of deltas that a new reader needs."""
    keep_snapshots: int = 2
    """Full snapshots to keep, with all deltas after the oldest of them."""
    overwrite: bool = False
    """See encode_update."""
    workers: int = 1
    """Encoding threads."""
    shard_bytes: int = 1 << 28
    """Most bytes of tensors in one file, which bounds the memory for writing a full snapshot."""
    lease_s: float = 10.0
    """See WriterLease."""
    kernels: KernelChoice = "auto"


@dataclass(frozen=True, slots=True)
class Publication:
    """A version that is being published."""

    sequence: int
    directory: str
    """Directory of its files."""
    with_snapshot: bool
    """Whether it gets a full snapshot in addition to the delta."""


Uploaded = Mapping[str, Sequence[StoredFile]]
"""The update files of a version that one process has uploaded: `delta` and `full`."""


def upload(
    folder: Folder,
    publication: Publication,
    options: WriterOptions,
    target: Mapping[str, Tensor],
    base: Mapping[str, Tensor] | None,
    process: int = 0,
) -> Uploaded:
    """Writes the update files of `target`, which are invisible before the commit. `base`: the last committed
    version, if any. `process`: rank among the publishing processes. Raises StoreError."""
    uploaded: dict[str, list[StoredFile]] = {"delta": [], "full": []}
    bases: dict[str, Mapping[str, Tensor] | None] = {} if base is None else {"delta": base}
    if base is None or publication.with_snapshot:
        bases["full"] = None
    for kind, own_base in bases.items():
        for index, names in enumerate(_shards(target, options.shard_bytes)):
            stream = io.BytesIO()
            own = None if own_base is None else TensorSubset(own_base, names)
            write_update(
                stream, own, TensorSubset(target, names), overwrite=options.overwrite,
                workers=options.workers, kernels=options.kernels,
            )  # fmt: skip
            data = stream.getvalue()
            name = f"{publication.directory}/{kind}-{process:04d}-{index:05d}.etude"
            folder.write(name, data)
            uploaded[kind].append(StoredFile(name, len(data), blake3(data).hexdigest()))
            if isinstance(target, DiskTensors):
                del stream, data
                return_free_memory()
    return uploaded


class StoreWriter:
    """The single writer of a store. Not thread-safe."""

    def __init__(self, store: WeightStore, options: WriterOptions) -> None:
        """Raises StoreError while another writer is alive, or if the store cannot be written."""
        self._store = store
        self._options = options
        self._lease = WriterLease(store.folder, options.lease_s)
        self._pins = Pins(store.folder)
        try:
            self._remove_orphans()
            self.next_sequence = store.newest_sequence() + 1
        except BaseException:
            with contextlib.suppress(StoreError):  # the first error counts
                self._lease.close()
            raise

    def close(self) -> None:
        """Releases the lease. Idempotent."""
        self._lease.close()

    def begin(self) -> Publication:
        """Begins a publication: its number, directory and kinds of files. Raises StoreError."""
        self._lease.check()
        sequence = self.next_sequence
        return Publication(
            sequence, f"{FILES}/{sequence:012d}-{uuid.uuid4().hex[:8]}", self._wants_snapshot(sequence)
        )

    def commit(
        self,
        publication: Publication,
        version: PolicyVersion,
        base: PolicyVersion | None,
        files: Sequence[Uploaded],
    ) -> Commit:
        """Commits a version whose files are all uploaded. `base`: the version that the deltas apply to.

        Raises StoreError; then the version does not exist, unless the outcome is unknown (UnavailableError),
        in which case its number is not reused.
        """
        delta, full = (tuple(file for part in files for file in part[kind]) for kind in ("delta", "full"))
        commit = Commit(publication.sequence, version, base, delta, full)
        self._lease.check()
        try:
            self._store.folder.create(commit_name(commit.sequence), pack_commit(commit))
        except ExistsError as error:
            raise StoreError(
                "another writer has committed to this weight store",
                field="weights.url",
                received=self._store.folder.url,
                fix="stop the other run, or name another store",
            ) from error
        except UnavailableError:
            self.next_sequence = commit.sequence + 1
            raise
        self.next_sequence = commit.sequence + 1
        return commit

    def clean_up(self, commit: Commit) -> None:
        """Removes what a commit has made obsolete. Raises StoreError."""
        if commit.full:
            for name in self._store.folder.list(WANTED):
                self._store.folder.delete(name)
            self.collect()

    def discard(self, publication: Publication) -> None:
        """Removes the files of a failed publication, unless it was committed."""
        # The first error counts; remaining files are orphans, which the next writer removes.
        with contextlib.suppress(StoreError):
            if not self._is_committed(publication):
                for name in self._store.folder.list(publication.directory):
                    self._store.folder.delete(name)

    def _is_committed(self, publication: Publication) -> bool:
        """Whether the commit exists: the response to it may have been lost."""
        try:
            commit = self._store.folder.read(commit_name(publication.sequence))
        except MissingError:
            return False
        return publication.directory.encode() in commit

    def collect(self) -> None:
        """Removes versions older than the kept snapshots and not pinned: commits first, then files."""
        commits = self._store.commits()
        snapshots = [sequence for sequence, commit in sorted(commits.items()) if commit.full]
        bound = snapshots[-min(self._options.keep_snapshots, len(snapshots))]
        pinned = self._pins.lowest()
        if pinned is not None and pinned < bound:
            # A delta is only useful to a reader that holds its base; a new reader begins at a snapshot.
            bound = pinned
        old = [commit for sequence, commit in sorted(commits.items()) if sequence < bound]
        for commit in old:
            self._store.folder.delete(commit_name(commit.sequence))
        for commit in old:
            for file in commit.files:
                self._store.folder.delete(file.name)

    def _wants_snapshot(self, sequence: int) -> bool:
        if self._store.folder.list(WANTED):
            return True
        last = max((number for number, commit in self._store.commits().items() if commit.full), default=None)
        return last is None or sequence - last >= self._options.snapshot_every

    def _remove_orphans(self) -> None:
        """Removes files of writers that died before they committed."""
        self._store.folder.sweep(FILES)
        kept = {file.name for commit in self._store.commits().values() for file in commit.files}
        for name in self._store.folder.list(FILES):
            if name not in kept:
                self._store.folder.delete(name)


def _shards(tensors: Mapping[str, Tensor], shard_bytes: int) -> Iterator[list[str]]:
    """Groups names, in order, into shards of at most `shard_bytes` (or one tensor); for tensors on disk,
    which serve to save memory, also of at most a 64th of the total."""
    if isinstance(tensors, DiskTensors):
        sizes = {name: tensors.num_bytes(name) for name in sorted(tensors)}
        shard_bytes = min(shard_bytes, max(_LEAST_SHARD_BYTES, sum(sizes.values()) // 64))
    else:
        sizes = {name: tensors[name].nbytes for name in sorted(tensors)}
    names: list[str] = []
    size = 0
    for name, own in sizes.items():
        if names and size + own > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += own
    yield names
