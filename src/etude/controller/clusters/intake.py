"""Receives finished sessions from clusters: unpacks, checks and stores them.

The trajectory log takes complete groups only. Until then their sessions are in the inbox, on disk before they
are acknowledged: a run that is killed meanwhile finds them there when it is resumed, and they are not played
again.
"""

from __future__ import annotations

import asyncio
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
from etude.weights.folders import open_folder

_SUFFIX = ".session"


class DamagedSessionError(StoreError):
    """The received data is not, bit for bit, the leased session."""


class UnwrittenSessionError(StoreError):
    """The run cannot store a session now, such as on a full disk."""


class Inbox:
    """A directory of bundles, one a session. Methods may be called from any thread: each reads or changes the
    dict of paths in one step."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """`max_bytes`: limit of one unpacked session. Damaged files are deleted, and counted."""
        self.num_damaged = 0
        self._directory = directory
        self._max_bytes = max_bytes
        self._paths: dict[TrajectoryId, Path] = {}
        for path in sorted(directory.glob(f"*{_SUFFIX}")):
            try:
                bundle = unpack_trajectory(path.read_bytes(), max_bytes)
            except (StoreError, OSError):
                self.num_damaged += 1
                path.unlink(missing_ok=True)  # its session is played again
            else:
                self._paths[bundle.trajectory.id] = path

    def __len__(self) -> int:
        """Number of sessions in the inbox."""
        return len(self._paths)

    def put(self, identity: TrajectoryId, data: bytes) -> None:
        """Stores a bundle durably; replaces an earlier one of the same session.

        Raises UnwrittenSessionError.
        """
        path = self._directory / f"{blake3(repr(identity).encode()).hexdigest()[:32]}{_SUFFIX}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            write_bytes(path, data)
        except OSError as error:
            raise UnwrittenSessionError(
                f"a session could not be written: {error.strerror}",
                field="clusters",
                received=str(path),
                fix="check the disk's free space and permissions",
            ) from error
        self._paths[identity] = path

    def find(self, identity: TrajectoryId) -> Bundle | None:
        """The stored bundle of a session; None where there is none, or it is damaged."""
        path = self._paths.get(identity)
        if path is None:
            return None
        try:
            return unpack_trajectory(path.read_bytes(), self._max_bytes)
        except (StoreError, OSError):
            self.num_damaged += 1
            self.delete(identity)
            return None

    def sweep(self, is_logged: Callable[[TrajectoryId], bool]) -> None:
        """Deletes the sessions that the trajectory log contains."""
        for identity in list(self._paths):
            if is_logged(identity):
                self.delete(identity)

    def delete(self, identity: TrajectoryId) -> None:
        """Deletes a session; does nothing where there is none."""
        path = self._paths.pop(identity, None)
        if path is not None:
            path.unlink(missing_ok=True)


_KNOWN_VERSIONS = 64
"""How many announced versions are remembered, to check which version a cluster says that it serves."""


class AnnouncedWeights:
    """The manifest of the weights in service, and the digests of recent versions."""

    def __init__(self) -> None:
        self.manifest: WeightManifest | None = None
        """Manifest of the weights in service."""
        self._digests: dict[tuple[str, int], str] = {}
        """(lineage, step) -> digest of the newest versions."""

    @property
    def step(self) -> int:
        """Step of the weights in service; 0 before there are any."""
        return 0 if self.manifest is None else self.manifest.version.step

    def announce(self, manifest: WeightManifest) -> None:
        """Records the weights that are in service from now on."""
        version = manifest.version
        self.manifest = manifest
        self._digests[version.lineage, version.step] = version.digest
        while len(self._digests) > _KNOWN_VERSIONS:
            del self._digests[next(iter(self._digests))]

    def knows(self, version: PolicyVersion) -> bool:
        """Whether this version was announced lately, with the same digest."""
        return self._digests.get((version.lineage, version.step)) == version.digest


SESSIONS = "sessions"
"""Prefix of sessions' names in a trajectory store."""


@dataclass(slots=True)
class Traffic:
    """Counts of the sessions received over the control API."""

    received_bytes: int = 0
    """Of finished sessions, repeated ones included."""
    damaged: int = 0
    """Sessions that were refused: a flipped bit, half an upload, a session other than the leased one."""
    unwritten: int = 0
    """Sessions that could not be stored, such as on a full disk."""


class Intake:
    """Fetches, checks and stores finished sessions. For one event loop; slow work runs in threads."""

    def __init__(self, settings: ClustersConfig, weights: AnnouncedWeights, inbox: Inbox) -> None:
        """`weights`: versions that may have sampled the sessions."""
        self.traffic = Traffic()
        self._max_bytes = settings.max_result_bytes
        self._weights = weights
        self._inbox = inbox
        self._store = open_folder(settings.trajectories_url) if settings.trajectories_url else None

    async def list_leftovers(self) -> list[str]:
        """Names of all sessions in the trajectory store. Raises StoreError."""
        return [] if self._store is None else await asyncio.to_thread(self._store.list, SESSIONS)

    async def delete(self, name: str) -> None:
        """Deletes a session from the trajectory store. Raises StoreError."""
        assert self._store is not None, "it was listed"
        await asyncio.to_thread(self._store.delete, name)

    async def fetch(self, lease_id: str) -> bytes:
        """Reads a session from the trajectory store. Raises DamagedSessionError."""
        try:
            if self._store is None:
                raise StoreError("the run has no trajectory store", fix="send the session itself")
            return await asyncio.to_thread(self._store.read, session_name(lease_id))
        except StoreError as error:
            raise self._damaged(error) from error

    async def unpack(self, data: bytes, lease: Lease) -> Bundle:
        """Unpacks the session of a lease. Raises DamagedSessionError, also for any other session."""
        try:
            bundle = await asyncio.to_thread(unpack_trajectory, data, self._max_bytes)
            self._check(bundle, lease)
        except StoreError as error:
            raise self._damaged(error) from error
        return bundle

    async def store(self, bundle: Bundle, data: bytes) -> None:
        """Returns once the session is on disk. Raises UnwrittenSessionError."""
        try:
            await asyncio.to_thread(self._inbox.put, bundle.trajectory.id, data)
        except UnwrittenSessionError:
            self.traffic.unwritten += 1
            raise

    async def discard(self, identity: TrajectoryId) -> None:
        """Deletes a stored session that will never be in the trajectory log."""
        await asyncio.to_thread(self._inbox.delete, identity)

    def _damaged(self, error: StoreError) -> DamagedSessionError:
        self.traffic.damaged += 1
        return DamagedSessionError(error.message, field=error.field, received=error.received, fix=error.fix)

    def _check(self, bundle: Bundle, lease: Lease) -> None:
        """Raises StoreError unless this is the leased session, sampled by weights that are allowed to."""
        trajectory, session = bundle.trajectory, lease.session
        if trajectory.id != session.request.identity:
            raise StoreError("is another session", field="id", received=str(trajectory.id))
        if trajectory.cluster != lease.member.name:
            raise StoreError("names another cluster", field="cluster", received=trajectory.cluster)
        for segment in trajectory.segments:
            for version in (span.version for span in segment.version_spans):
                if not self._weights.knows(version):
                    raise StoreError(
                        "was sampled by weights of another run", field="version", received=str(version)
                    )
                if version.step < session.min_step:
                    raise StoreError(
                        "was sampled by weights that are too old", field="version", received=str(version)
                    )


def session_name(lease_id: str) -> str:
    """Name under which a cluster stores a session in the trajectory store until the run has answered."""
    return f"{SESSIONS}/{lease_id}.session"
