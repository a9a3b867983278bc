"""A relay: a cache that fetches each file once over the slow link to the store and serves it locally."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from etude.errors import ConfigError, StoreError, WeightUpdateError
from etude.kit.retry import Backoff, retry
from etude.weights.commits import COMMITS, StoredFile, unpack_commit
from etude.weights.folders import DirectoryFolder, Folder, MissingError, UnavailableError
from etude.weights.store import FILES, PINS, WANTED

_AT_ONCE = Backoff(base_s=0.0, attempts=3)


class ReadOnlyError(StoreError):
    """A write that readers may not make."""


@dataclass(slots=True)
class RelayCounters:
    """Traffic of a relay."""

    fetched_bytes: int = 0
    """Bytes fetched from the store."""
    served_bytes: int = 0
    """Bytes served to readers."""
    damaged: int = 0
    """Files that arrived or were cached damaged, and were fetched again."""


class Relay:
    """Reads a store through a cache on disk. Methods may be called from any thread.

    Files in a store never change, so the cache is never stale; lists always come from the store.
    """

    def __init__(self, source: Folder, cache: Path, max_bytes: int = 1 << 40) -> None:
        """`max_bytes`: of cached files; the oldest versions are evicted first. Raises ConfigError if `cache`
        cannot be written."""
        _check_writable(cache)
        self._source = source
        self._cache = DirectoryFolder(cache)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._in_flight: dict[str, Future[bytes]] = {}
        self._commits: dict[str, bytes] = {}
        self._expected: dict[str, StoredFile] = {}
        self.counters = RelayCounters()
        self._cache.sweep(FILES)
        self._sizes = {name: (cache / name).stat().st_size for name in self._cache.list(FILES)}

    @property
    def is_fetching(self) -> bool:
        """Whether files are being fetched from the store."""
        return bool(self._in_flight)

    def list(self, prefix: str) -> list[str]:
        """See Folder.list."""
        names = self._source.list(prefix)
        if prefix == COMMITS:
            self._drop_commits(set(names))
        return names

    def read(self, name: str) -> bytes:
        """See Folder.read. Of several callers one fetches, and the others wait for it."""
        top = name.partition("/")[0]
        if top == COMMITS:
            data = self._read_commit(name)
        elif top == FILES:
            data = self._read_file(name)
        else:
            data = self._source.read(name)
        with self._lock:
            self.counters.served_bytes += len(data)
        return data

    def write(self, name: str, data: bytes) -> None:
        """Forwards the notes that readers may write. Raises StoreError for anything else."""
        if name.partition("/")[0] not in (PINS, WANTED):
            raise ReadOnlyError("a relay is read-only", field="name", received=name)
        self._source.write(name, data)

    def _read_commit(self, name: str) -> bytes:
        """Reads a commit through a cache in memory: commits are small, and read by every replica."""
        data = self._commits.get(name)
        if data is None:
            data = self._source.read(name)
            try:
                commit = unpack_commit(data)
            except WeightUpdateError:  # readers detect the damage themselves, and may retry
                return data
            with self._lock:
                self._commits[name] = data
                self._expected |= {file.name: file for file in commit.files}
        return data

    def _drop_commits(self, existing: set[str]) -> None:
        """Drops cached commits that the store has garbage-collected."""
        with self._lock:
            for name in self._commits.keys() - existing:
                for file in unpack_commit(self._commits.pop(name)).files:
                    self._expected.pop(file.name, None)

    def _read_file(self, name: str) -> bytes:
        with self._lock:
            held = name in self._sizes
            waiting = self._in_flight.get(name)
            own: Future[bytes] = Future()
            if not held and waiting is None:
                self._in_flight[name] = own
        if held:
            return self._read_cached(name)
        if waiting is not None:
            return waiting.result()
        try:
            data = self._fetch_file(name)
            self._cache_file(name, data)
            own.set_result(data)
            return data
        except BaseException as error:
            own.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._in_flight[name]

    def _read_cached(self, name: str) -> bytes:
        """Reads from the disk cache, or from the store if the cached file is missing or damaged."""
        with contextlib.suppress(MissingError):
            data = self._cache.read(name)
            if self._is_whole(name, data):
                return data
            with self._lock:
                self.counters.damaged += 1
        with self._lock:
            self._sizes.pop(name, None)
        return self._read_file(name)

    def _fetch_file(self, name: str) -> bytes:
        """Fetches from the store; retries damaged files. Raises WeightUpdateError if they stay damaged."""

        def fetch() -> bytes:
            data = self._source.read(name)
            is_whole = self._is_whole(name, data)
            with self._lock:
                self.counters.fetched_bytes += len(data)
                self.counters.damaged += not is_whole
            if is_whole:
                return data
            raise WeightUpdateError("an update file is damaged in the store", field="file", received=name)

        return retry(fetch, WeightUpdateError, _AT_ONCE)

    def _is_whole(self, name: str, data: bytes) -> bool:
        """Whether the digest matches the commit, if that is known; readers check too."""
        expected = self._expected.get(name)
        return expected is None or blake3(data).hexdigest() == expected.digest

    def _cache_file(self, name: str, data: bytes) -> None:
        """Caches a file on disk, evicting the oldest versions if the disk is full; skips it if that fails."""
        while True:
            try:
                self._cache.write(name, data)
                break
            except UnavailableError:  # the disk is full
                if not self._evict(name, 1):
                    return
        with self._lock:
            self._sizes[name] = len(data)
        self._evict(name)

    def _evict(self, name: str, num_bytes: int = 0) -> bool:
        """Evicts files older than `name`: `num_bytes`, or the excess over `max_bytes`; whether it did."""
        old: list[str] = []
        with self._lock:
            excess = max(num_bytes, sum(self._sizes.values()) - self._max_bytes)
            for other in sorted(self._sizes):
                if excess <= 0 or other == name:
                    break
                old.append(other)
                excess -= self._sizes[other]
            for other in old:
                del self._sizes[other]
        for other in old:
            self._cache.delete(other)
        return bool(old)


def _check_writable(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot be written to: {error.strerror}",
            field="cache",
            received=str(cache),
            fix="name a directory that this user can write to",
        ) from error
