"""Finished sessions on their way from a cluster to the run's disk: unpacked, checked, kept.

The trajectory log takes groups when they are whole. Until then what has come lies in the inbox, on disk
before it is acknowledged: a run that is killed meanwhile finds it there when it is resumed, and nobody plays
it again.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from etude.config import ClustersConfig
from etude.controller.clusters.board import Lease
from etude.errors import StoreError
from etude.kit.durable import write_bytes
from etude.records import PolicyVersion, TrajectoryId, WeightManifest
from etude.store.bundles import Bundle, unpack_trajectory
from etude.weights.folders import Folder, open_folder

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


_KNOWN_VERSIONS = 64
"""By which a cluster's claim to serve one is checked."""


class AnnouncedWeights:
    """The manifest of the weights in service, and which versions were in service lately."""

    def __init__(self) -> None:
        self.manifest: WeightManifest | None = None
        """Of the weights in service."""
        self._digests: OrderedDict[tuple[str, int], str] = OrderedDict()
        """(lineage, step) -> digest of the newest versions."""

    @property
    def step(self) -> int:
        """Of the weights in service; 0 before there are any."""
        return 0 if self.manifest is None else self.manifest.version.step

    def announce(self, manifest: WeightManifest) -> None:
        """These are in service from now on."""
        version = manifest.version
        self.manifest = manifest
        self._digests[version.lineage, version.step] = version.digest
        while len(self._digests) > _KNOWN_VERSIONS:
            self._digests.popitem(last=False)

    def knows(self, version: PolicyVersion) -> bool:
        """Whether this version was announced, bit for bit."""
        return self._digests.get((version.lineage, version.step)) == version.digest


SESSIONS = "sessions"
"""Where sessions lie in a trajectory store."""


class DamagedSessionError(StoreError):
    """What came is not, bit for bit, a session that was asked for."""


class UnwrittenSessionError(StoreError):
    """The run cannot keep a session now: a full disk."""


@dataclass(slots=True)
class Traffic:
    """What crossed the control API, as far as it is sessions."""

    received_bytes: int = 0
    """Of finished sessions, repeated ones too."""
    damaged: int = 0
    """Sessions that were refused: a flipped bit, half an upload, another session than was asked for."""
    unwritten: int = 0
    """Sessions that could not be kept: a full disk."""


class Intake:
    """See above. For one event loop; what takes long runs in threads."""

    def __init__(self, settings: ClustersConfig, weights: AnnouncedWeights, inbox: Inbox) -> None:
        """`weights`: that may have sampled what comes."""
        self.traffic = Traffic()
        self._max_bytes = settings.max_result_bytes
        self._weights = weights
        self._inbox = inbox
        self._store: Folder | None = None
        if settings.trajectories_url:
            self._store = open_folder(settings.trajectories_url)

    async def list_left(self) -> list[str]:
        """What lies in the trajectory store. Raises StoreError."""
        return [] if self._store is None else await asyncio.to_thread(self._store.list, SESSIONS)

    async def delete(self, name: str) -> None:
        """Deletes from the trajectory store. Raises StoreError."""
        assert self._store is not None, "it was listed"
        await asyncio.to_thread(self._store.delete, name)

    async def fetch(self, lease_id: str) -> bytes:
        """A session that lies in the trajectory store. Raises DamagedSessionError."""
        try:
            if self._store is None:
                raise StoreError("the run has no trajectory store", fix="send the session itself")
            return await asyncio.to_thread(self._store.read, session_name(lease_id))
        except StoreError as error:
            raise self._damaged(error) from error

    async def unpack(self, data: bytes, lease: Lease) -> Bundle:
        """The session that a lease is for. Raises DamagedSessionError also for another."""
        try:
            bundle = await asyncio.to_thread(unpack_trajectory, data, self._max_bytes)
            self._check(bundle, lease)
        except StoreError as error:
            raise self._damaged(error) from error
        return bundle

    async def keep(self, bundle: Bundle, data: bytes) -> None:
        """Returns once the session is on disk. Raises UnwrittenSessionError."""
        try:
            await asyncio.to_thread(self._inbox.put, bundle.trajectory.id, data)
        except StoreError as error:
            self.traffic.unwritten += 1
            raise UnwrittenSessionError(
                error.message, field=error.field, received=error.received, fix=error.fix
            ) from error

    async def drop(self, identity: TrajectoryId) -> None:
        """Lets go of a session that was kept, and will never be in the trajectory log."""
        await asyncio.to_thread(self._inbox.forget, identity)

    def _damaged(self, error: StoreError) -> DamagedSessionError:
        self.traffic.damaged += 1
        return DamagedSessionError(error.message, field=error.field, received=error.received, fix=error.fix)

    def _check(self, bundle: Bundle, lease: Lease) -> None:
        """Raises StoreError unless this is the session that was asked for, sampled by weights that may."""
        trajectory, episode = bundle.trajectory, lease.episode
        if trajectory.id != episode.order.identity:
            raise StoreError("is another session", field="id", received=str(trajectory.id))
        if trajectory.cluster != lease.member.name:
            raise StoreError("names another cluster", field="cluster", received=trajectory.cluster)
        for segment in trajectory.segments:
            for version in (span.version for span in segment.version_spans):
                if not self._weights.knows(version):
                    raise StoreError(
                        "was sampled by weights of another run", field="version", received=str(version)
                    )
                if version.step < episode.min_step:
                    raise StoreError(
                        "was sampled by weights that are too old", field="version", received=str(version)
                    )


def session_name(lease_id: str) -> str:
    """Where a cluster puts a session in the trajectory store; it deletes it once that is answered."""
    return f"{SESSIONS}/{lease_id}.session"
