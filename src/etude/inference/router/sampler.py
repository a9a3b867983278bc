"""A Sampler over several samplers: the routing policy in front of this process's engines, for rollouts.

    stream() -> Router.begin -> replica.stream ──chunks──> caller
                    ^                |
                    └── retry on another <── the engine failed before its first chunk

Its clock counts requests, not seconds, so that nothing here depends on wall time. Routing still depends on
the order in which requests begin and end: with engines on a deterministic schedule it is reproducible.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from etude.errors import PrefixMissError, SamplerError
from etude.inference.requests import already_open, serves
from etude.inference.router.members import Members
from etude.inference.router.policy import Router
from etude.inference.router.types import NoReplicaError, RouteRequest, RoutingConfig
from etude.kit.tasks import closing
from etude.protocols import Sampler
from etude.records import PolicyVersion, SampleChunk, SampleRequest, Scores

_POOL = "rollout"


class SamplerReplica(Sampler, Protocol):
    """A sampler that can be routed to: an engine's service, or any other that names its weights."""

    def current(self) -> PolicyVersion | None: ...


class RoutedSampler:
    """A Sampler over replicas, each of which serves the version of the last `set_version`. Use within one
    event loop.

    A replica that fails before its first chunk is ejected until the next `set_version` for it, and the
    request is retried on another; a later failure raises SamplerError to the caller. An error that names a
    field is about the request: it is raised unchanged and does not count as a failure of the replica. A
    session that moves gets PrefixMissError from its new replica, as the protocol says, and is sent whole.
    """

    def __init__(self, replicas: Mapping[str, SamplerReplica]) -> None:
        self.router = Router(RoutingConfig(learn_rates=False))
        self.members = Members(self.router)
        self._replicas: dict[str, SamplerReplica] = {}
        self._clock = 0
        self._open: dict[str, str] = {}
        """Session -> the replica where it is open."""
        self._lengths: dict[str, int] = {}
        """Session -> its number of tokens after its last answer."""
        self._replica_of: dict[str, str] = {}
        """Request -> the replica that has it."""
        for name, replica in replicas.items():
            self.join(name, replica)

    def join(self, name: str, replica: SamplerReplica) -> None:
        """Adds a replica; it gets requests once it serves a named version."""
        self._replicas[name] = replica
        current = replica.current()
        self.members.join(name, _POOL, str(current) if current is not None else None)

    def set_version(self, name: str, version: PolicyVersion | None) -> None:
        """Sets the version that a replica serves from now on; None: none, so that its sessions move."""
        self.members.record_probe(name, self._clock, None if version is None else str(version))

    # ---- Sampler --------------------------------------------------------------------------------

    def open(self, session_id: str, sibling: str | None = None) -> None:
        if session_id in self._open:
            raise already_open(session_id)
        self._move_session(session_id, self.router.place(session_id, self._now(), _POOL, sibling), sibling)

    def close(self, session_id: str) -> None:
        name = self._open.pop(session_id, None)
        if name is not None:
            self._replicas[name].close(session_id)
        self._lengths.pop(session_id, None)
        self.router.close_session(session_id)

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        failed: dict[str, SamplerError] = {}
        while True:
            try:
                name = self.router.begin(self._routing_request(request), self._now(), failed)
            except NoReplicaError:
                if failed:
                    raise next(reversed(failed.values())) from None
                raise
            self._replica_of[request.id] = name
            generated, held, begun = 0, None, False
            try:
                self._move_session(request.session_id, name)
                async with closing(self._replicas[name].stream(request)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        generated += len(chunk.tokens)
                        self.router.progress(request.id, generated)
                        if chunk.finish is not None:
                            held = self._length(request) + generated
                            if request.session_id in self._open:  # else it was closed meanwhile
                                self._lengths[request.session_id] = held
                            self.members.record_success(name)
                        yield chunk
                return
            except SamplerError as error:
                if error.field is not None or isinstance(error, PrefixMissError):
                    raise
                self.members.record_failure(name, self._clock, str(error), fatal=True)
                failed[name] = error
                if begun:
                    raise
            finally:
                self._replica_of.pop(request.id, None)
                self.router.end(request.id, self._clock, generated, held)

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        routed = RouteRequest(f"score-{self._now()}", len(tokens), 0, None, _POOL, frozenset({str(version)}))
        name = self.router.begin(routed, self._clock)
        try:
            return await self._replicas[name].score(tokens, version)
        finally:
            self.router.end(routed.id, self._clock, 0)

    def abort(self, request_id: str) -> None:
        name = self._replica_of.get(request_id)
        if name is not None:
            self._replicas[name].abort(request_id)

    # ---- bookkeeping ----------------------------------------------------------------------------

    def _now(self) -> int:
        self._clock += 1
        return self._clock

    def _move_session(self, session_id: str, name: str, sibling: str | None = None) -> None:
        """Opens a session on the replica `name`, and closes it on the one where it was open."""
        home = self._open.get(session_id)
        if home == name:
            return
        if home is not None:
            self._replicas[home].close(session_id)
        is_shared = sibling is not None and self._open.get(sibling) == name
        self._replicas[name].open(session_id, sibling if is_shared else None)
        self._open[session_id] = name

    def _routing_request(self, request: SampleRequest) -> RouteRequest:
        versions = None
        wanted = request.version
        if wanted is not None:
            served = [replica.current() for replica in self._replicas.values()]
            versions = frozenset(
                str(version) for version in served if serves(version, wanted, request.version_is_minimum)
            )
        return RouteRequest(
            request.id,
            self._length(request),
            request.params.max_tokens,
            request.session_id,
            request.pool,
            versions,
        )

    def _length(self, request: SampleRequest) -> int:
        """Number of tokens of the whole input."""
        before = self._lengths.get(request.session_id, 0) if request.prefix_digest is not None else 0
        return before + len(request.suffix)
