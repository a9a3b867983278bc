"""Finished sessions on their way from a cluster to the run's disk: unpacked, checked, kept."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from etude.config import ClustersConfig
from etude.controller.clusters.announced import AnnouncedWeights
from etude.controller.clusters.board import Lease
from etude.controller.clusters.inbox import Inbox
from etude.errors import StoreError
from etude.records import TrajectoryId
from etude.store.bundles import Bundle, unpack_trajectory
from etude.weights.folders import Folder, open_folder

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
