"""The reader of a weight store: keeps one version in host memory and updates it to the requested one.

held version ──delta──> ... ──delta──> wanted version
      └─ broken chain, wrong base, damage, missed versions ─> full snapshot (+ deltas after it)
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3
from torch import Tensor

from etude.errors import StoreError, WeightUpdateError
from etude.records import PolicyVersion, TensorEntry, WeightManifest
from etude.weights.commits import Commit, StoredFile, find_chain, find_snapshot_chain
from etude.weights.delta import KernelChoice, apply_update, read_update_manifest
from etude.weights.folders import UnavailableError
from etude.weights.manifest import digest_entries
from etude.weights.parts import TensorSet, join_entries
from etude.weights.patience import PatientFolder
from etude.weights.store import WeightStore, split_url


@dataclass(slots=True)
class SubscriberCounters:
    """Counters of a subscriber."""

    deltas: int = 0
    """Versions reached by a delta."""
    snapshots: int = 0
    """Versions reached by a full snapshot."""
    fallbacks: int = 0
    """Times that a delta failed and a full snapshot was fetched instead."""
    unpinned: int = 0
    """Times that a pin could not be written to the store."""
    fetched_bytes: int = 0
    last_fallback: str = ""
    """Cause of the last fallback."""


class Subscriber:
    """Fetches the versions that manifests name. Thread-safe: concurrent calls of `fetch` wait for each other.

    Two sets of tensors are kept, the held version and a spare into which the next is decoded: tensors
    returned by `fetch` may be overwritten by the next fetch.
    """

    def __init__(
        self,
        store: WeightStore,
        *,
        wait_s: float = 60.0,
        pin_s: float = 3600.0,
        workers: int = 1,
        kernels: KernelChoice = "auto",
        link: PatientFolder | None = None,
    ) -> None:
        """`wait_s`: to wait for a version that is still being uploaded. `pin_s`: time after each fetch for
        which the store keeps the deltas from the held version on; 0: no pins. `link`: the store's folder, if
        that retries."""
        self._store = store
        self._link = link
        self._wait_s = wait_s
        self._pin_s = pin_s
        self._workers = workers
        self._kernels: KernelChoice = kernels
        self._name = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._current, self._spare = TensorSet(), TensorSet()
        self._version: PolicyVersion | None = None
        self.counters = SubscriberCounters()

    @property
    def version(self) -> PolicyVersion | None:
        """The version in host memory."""
        return self._version

    @property
    def trouble(self) -> str:
        """Cause of a fetch that is being retried now; empty without any. Callable from any thread."""
        return "" if self._link is None else self._link.trouble

    def close(self) -> None:
        """Ends the retries of a fetch. Callable from any thread; idempotent."""
        if self._link is not None:
            self._link.close()

    def fetch(self, manifest: WeightManifest) -> Mapping[str, Tensor]:
        """The checked tensors of a manifest, which must not be modified. Blocks.

        Raises WeightUpdateError if the version cannot be assembled, StoreError if the store does not answer;
        then the held version is unchanged.
        """
        sequence = split_url(manifest.url)[1]
        if digest_entries(manifest.tensors) != manifest.version.digest:
            raise WeightUpdateError(
                "manifest does not match its version's digest",
                field="digest",
                received=manifest.version.digest,
            )
        with self._lock:
            if self._version is None or self._version.digest != manifest.version.digest:
                self._update_to(self._store.wait_for(sequence, self._wait_s), manifest.version)
            self._pin(sequence + 1)
            return dict(self._current.whole)

    def _pin(self, sequence: int) -> None:
        """Pins later deltas. Readers without write access work too, but need snapshots for broken chains."""
        if self._pin_s:
            try:
                self._store.pin(self._name, sequence, self._pin_s)
            except StoreError:
                self.counters.unpinned += 1

    def _update_to(self, target: Commit, wanted: PolicyVersion) -> None:
        if target.version.digest != wanted.digest:
            raise WeightUpdateError(
                "the store has a different version under this number",
                field="digest",
                received=target.version.digest,
                fix=f"stage the manifest of {target.version}",
            )
        commits = self._store.commits()
        held = None if self._version is None else self._version.digest
        deltas = None if held is None else find_chain(commits, target, held)
        snapshot = find_snapshot_chain(commits, target)
        if deltas is not None and not (snapshot and _size(snapshot, snapshot=True) < _size(deltas)):
            try:
                self._apply_deltas(deltas)
            except (WeightUpdateError, StoreError) as error:
                self.counters.fallbacks += 1
                self.counters.last_fallback = str(error)
            else:
                return
        self._load_snapshot(target)

    def _load_snapshot(self, target: Commit) -> None:
        """Loads the nearest full snapshot and later deltas; tries twice, in case of damaged transfers."""
        failure: Exception | None = None
        for _ in range(2):
            chain = find_snapshot_chain(self._store.commits(), target)
            if chain is None:
                break
            try:
                self._apply(chain[0], chain[0].full, None)
                self.counters.snapshots += 1
                self._apply_deltas(chain[1:])
            except (WeightUpdateError, StoreError) as error:
                failure = error
            else:
                return
        if isinstance(failure, UnavailableError):
            raise failure
        with contextlib.suppress(StoreError):  # the error below matters more
            self._store.request_snapshot(self._name)
        raise WeightUpdateError(
            f"{target.version} cannot be fetched: {failure or 'no full snapshot leads to it'}",
            field="weights.url",
            received=self._store.folder.url,
            fix="stage the next version, which will have a full snapshot",
        ) from failure

    def _apply_deltas(self, chain: Sequence[Commit]) -> None:
        for commit in chain:
            self._apply(commit, commit.delta, self._current.stored)
            self.counters.deltas += 1

    def _apply(self, commit: Commit, files: Sequence[StoredFile], base: dict[str, Tensor] | None) -> None:
        """Decodes `commit` and makes it the held version; on failure nothing changes."""
        found = TensorSet()
        entries: list[TensorEntry] = []
        for file in files:
            data = self._read(file)
            own_entries = read_update_manifest(data).tensors
            entries += own_entries
            names = [entry.name for entry in own_entries]
            own = None if base is None else {name: base[name] for name in names if name in base}
            room = found.allocate(own_entries, self._spare)
            found.add(apply_update(own, data, out=room, workers=self._workers, kernels=self._kernels))
        if digest_entries(join_entries(entries)) != commit.version.digest:
            raise WeightUpdateError(
                f"the files of {commit.version} do not have its digest",
                field="commit",
                received=commit.sequence,
            )
        self._spare, self._current, self._version = self._current, found, commit.version

    def _read(self, file: StoredFile) -> bytes:
        data = self._store.folder.read(file.name)
        self.counters.fetched_bytes += len(data)
        if len(data) != file.size_bytes or blake3(data).hexdigest() != file.digest:
            raise WeightUpdateError("an update file is damaged", field="file", received=file.name)
        return data


def _size(chain: Sequence[Commit], *, snapshot: bool = False) -> int:
    """Bytes to fetch."""
    deltas = chain[1:] if snapshot else chain
    first = sum(file.size_bytes for file in chain[0].full) if snapshot else 0
    return first + sum(file.size_bytes for commit in deltas for file in commit.delta)
