"""Sessions that came from clusters and are not in the trajectory log yet: on disk before any is acknowledged.

The log takes groups when they are whole. Until then what has come lies here, so that a run that is killed
meanwhile finds it when it is resumed, and nobody plays it again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from etude.errors import StoreError
from etude.kit.durable import write_bytes
from etude.records import TrajectoryId
from etude.store.bundles import Bundle, unpack_trajectory

_SUFFIX = ".session"


class Inbox:
    """A directory of bundles, one a session. Methods may be called from any thread."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """`max_bytes`: of one session, unpacked. What is damaged there is left out, and counted."""
        self.num_damaged = 0
        self._directory = directory
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: dict[TrajectoryId, Path] = {}
        for path in sorted(directory.glob(f"*{_SUFFIX}")):
            try:
                bundle = unpack_trajectory(path.read_bytes(), max_bytes)
            except (StoreError, OSError):
                self.num_damaged += 1
                path.unlink(missing_ok=True)  # its session is played again
            else:
                self._held[bundle.trajectory.id] = path

    def __len__(self) -> int:
        """Number of sessions held."""
        return len(self._held)

    def put(self, identity: TrajectoryId, data: bytes) -> None:
        """Keeps a bundle durably, in the place of another of this session. Raises StoreError if it cannot."""
        path = self._directory / f"{blake3(repr(identity).encode()).hexdigest()[:32]}{_SUFFIX}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            write_bytes(path, data)
        except OSError as error:
            raise StoreError(
                f"a session could not be written: {error.strerror}",
                field="clusters",
                received=str(path),
                fix="check the disk's free space and permissions",
            ) from error
        with self._lock:
            self._held[identity] = path

    def find(self, identity: TrajectoryId) -> Bundle | None:
        """What is held of a session; None where there is nothing, or nothing whole."""
        with self._lock:
            path = self._held.get(identity)
        if path is None:
            return None
        try:
            return unpack_trajectory(path.read_bytes(), self._max_bytes)
        except (StoreError, OSError):
            self.num_damaged += 1
            self.forget(identity)
            return None

    def sweep(self, is_logged: Callable[[TrajectoryId], bool]) -> None:
        """Lets go of what the trajectory log has."""
        with self._lock:
            held = list(self._held)
        for identity in held:
            if is_logged(identity):
                self.forget(identity)

    def forget(self, identity: TrajectoryId) -> None:
        """Lets go of a session."""
        with self._lock:
            path = self._held.pop(identity, None)
        if path is not None:
            path.unlink(missing_ok=True)
