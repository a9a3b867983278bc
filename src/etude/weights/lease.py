"""The writer's lease: one writer at a time, by a heartbeat, and epochs that fence a writer presumed dead.

Clocks of two machines are never compared: a new writer observes by its own clock whether a lease still beats.
"""

from __future__ import annotations

import json
import threading
import time
import uuid

from etude.errors import StoreError
from etude.weights.folders import ExistsError, Folder, MissingError

WRITERS = "writers"
_LOOKS = 10
"""Reads of a lease without a heartbeat after which it is dead."""


class WriterLease:
    """The lease of a store's writer, held from construction to `close`. A thread sends the heartbeat."""

    def __init__(self, folder: Folder, lease_s: float = 10.0) -> None:
        """`lease_s`: time without a heartbeat after which a lease is dead; equal for all writers of a store.

        Raises StoreError while another writer is alive.
        """
        self._folder = folder
        self._lease_s = lease_s
        self._owner = uuid.uuid4().hex
        self._beats = 0
        self.epoch = self._acquire()
        self._ended = threading.Event()
        self._failure: StoreError | None = None
        self._thread = threading.Thread(target=self._run_heartbeat, name="weight-writer-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises StoreError if another writer has taken over, or while the lease cannot be kept alive."""
        if self._failure is not None:
            raise self._failure
        if self._newest() != self.epoch:
            raise _refused(self._folder, "another writer has taken this weight store over")

    def close(self) -> None:
        """Releases the lease, so that the next writer need not wait. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        if self._newest() == self.epoch:
            self._folder.write(_name(self.epoch), self._content(released=True))

    def _acquire(self) -> int:
        newest = self._newest()
        if newest and self._is_alive(newest):
            raise _refused(self._folder, "another writer publishes to this weight store")
        try:
            self._folder.create(_name(newest + 1), self._content())
        except ExistsError as error:
            raise _refused(self._folder, "another writer acquired the lease first") from error
        for old in range(max(1, newest - 1), newest + 1):
            self._folder.delete(_name(old))
        return newest + 1

    def _newest(self) -> int:
        names = self._folder.list(WRITERS)
        return max((int(name.rpartition("/")[2].removesuffix(".json")) for name in names), default=0)

    def _is_alive(self, epoch: int) -> bool:
        before = self._read(epoch)
        if before is None or _is_released(before):
            return False
        # Counts reads, not seconds: an observer that is itself suspended does not see heartbeats.
        for _ in range(_LOOKS):
            time.sleep(self._lease_s / _LOOKS)
            now = self._read(epoch)
            if now != before:
                return now is not None and not _is_released(now)
        return False

    def _read(self, epoch: int) -> bytes | None:
        try:
            return self._folder.read(_name(epoch))
        except MissingError:
            return None

    def _run_heartbeat(self) -> None:
        missed = 0
        while not self._ended.wait(self._lease_s / 5):
            self._beats += 1
            try:
                self._folder.write(_name(self.epoch), self._content())
                missed, self._failure = 0, None
            except StoreError as error:
                missed += 1
                if missed >= 5:
                    self._failure = error

    def _content(self, *, released: bool = False) -> bytes:
        return json.dumps({"owner": self._owner, "beats": self._beats, "released": released}).encode()


def _is_released(content: bytes) -> bool:
    """Whether a lease is released. Unknown, hence False, for a partial file: its writer may have been killed
    while writing, or may still be writing."""
    try:
        return bool(json.loads(content)["released"])
    except (ValueError, KeyError, TypeError):
        return False


def _name(epoch: int) -> str:
    return f"{WRITERS}/{epoch:08d}.json"


def _refused(folder: Folder, problem: str) -> StoreError:
    return StoreError(
        problem, field="weights.url", received=folder.url, fix="stop the other run, or name another store"
    )
