"""Where simulated hosts have their images from: a store, or one another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from benchmarks.simulation.fleet.scenario import Scenario
from benchmarks.simulation.fleet.simulated_host import SimulatedHost
from benchmarks.simulation.flows import Endpoint, Flow, Transfers

Arrived = Callable[[SimulatedHost, str, bool], None]
"""Called with host, image and whether all of it is there."""


class ImageSources:
    """The store and, if the scenario says so, the hosts that have an image whole.

    With peers an image leaves the store for one host at a time: the others wait for that one. A fetch that
    finds neither a peer nor the store with a free slot waits, first come first served.
    """

    def __init__(self, scenario: Scenario, transfers: Transfers, arrived: Arrived) -> None:
        self.num_from_peers = 0
        self._scenario = scenario
        self._transfers = transfers
        self._arrived = arrived
        self._store = Endpoint(scenario.store_bytes_per_s)
        self._from_store: dict[str, int] = {}
        """Image -> transfers of it from the store."""
        self._num_from_store = 0
        self._holders: dict[str, dict[SimulatedHost, None]] = {}
        self._waiting: dict[str, dict[SimulatedHost, None]] = {}
        """Image -> hosts whose fetch of it waits for a source."""
        self._store_queue: dict[str, None] = {}
        """Images for which that source is the store, in order."""

    def fetch(self, host: SimulatedHost, image: str) -> None:
        """Brings as much of an image to a host as a start needs, as soon as a source has a slot."""
        self._waiting.setdefault(image, {})[host] = None
        self._serve(image)

    def forget(self, host: SimulatedHost, image: str) -> None:
        """The host no longer has the image."""
        holders = self._holders.get(image, {})
        holders.pop(host, None)

    def host_died(self, host: SimulatedHost) -> None:
        """Ends what went to the host; what came from it begins anew elsewhere."""
        for image in host.active:
            self._waiting.get(image, {}).pop(host, None)
        for image in host.whole:
            self.forget(host, image)
        for image, flow in list(host.active.items()):
            if flow is not None:
                self._transfers.stop(flow)
                self._release(flow, image)
        if host.background_flow is not None:
            self._transfers.stop(host.background_flow)
        broken = list(host.uploads.items())
        host.uploads.clear()
        for flow, (sink, image) in broken:
            if sink.alive and flow.version >= 0:
                self._transfers.stop(flow)
                if flow.is_background:
                    self._continue(sink, image, flow.left_bytes)
                else:
                    sink.active[image] = None
                    self.fetch(sink, image)
        for image in list(self._waiting):
            self._serve(image)

    def _begin(self, host: SimulatedHost, image: str) -> bool:
        """Starts a fetch if a source has a slot."""
        num_bytes = self._scenario.image_bytes * self._scenario.needed_fraction
        peer = self._peer(image)
        if peer is not None:
            flow = self._start(peer, host, image, num_bytes, False)
            self.num_from_peers += 1
        elif self._store_serves(image):
            self._num_from_store += 1
            self._from_store[image] = self._from_store.get(image, 0) + 1
            flow = self._start(None, host, image, num_bytes, False)
        else:
            return False
        host.active[image] = flow
        return True

    def _store_serves(self, image: str) -> bool:
        if self._scenario.peers and self._from_store.get(image):
            return False
        if self._scenario.peers and self._holders.get(image):
            # All who have it are busy with uploads: one of them is free sooner than the store is relieved.
            return False
        unbounded = self._scenario.store_bytes_per_s == math.inf
        return unbounded or self._num_from_store < self._scenario.store_slots

    def _peer(self, image: str) -> SimulatedHost | None:
        """The host with the fewest uploads among those that have the image and a free slot."""
        if not self._scenario.peers:
            return None
        holders = self._holders.get(image, {})
        peer = min(holders, key=lambda holder: len(holder.uploads), default=None)
        if peer is None or len(peer.uploads) >= self._scenario.upload_slots:
            return None
        return peer

    def _start(
        self, peer: SimulatedHost | None, host: SimulatedHost, image: str, num_bytes: float, background: bool
    ) -> Flow:
        source = self._store if peer is None else peer.egress

        def done() -> None:
            if peer is not None:
                peer.uploads.pop(flow, None)
                self._serve_uploads(peer)
            if background:
                self._whole(host, image)
            else:
                self._needed(host, image, flow)

        flow = self._transfers.start(source, host.ingress, num_bytes, done, background)
        if peer is not None:
            peer.uploads[flow] = (host, image)
        return flow

    def _needed(self, host: SimulatedHost, image: str, flow: Flow) -> None:
        """Enough of an image has arrived to start from it."""
        self._release(flow, image)
        left = self._scenario.image_bytes * (1 - self._scenario.needed_fraction)
        if left > 0:
            host.background.append(image)
        else:
            self.hold(host, image)
        self._arrived(host, image, left <= 0)
        self._next_background(host)
        self._serve(image)
        self._serve_store()

    def _whole(self, host: SimulatedHost, image: str) -> None:
        host.background_flow = None
        self.hold(host, image)
        self._arrived(host, image, True)
        self._next_background(host)
        self._serve(image)

    def _next_background(self, host: SimulatedHost) -> None:
        if host.background_flow is None and host.background:
            left = self._scenario.image_bytes * (1 - self._scenario.needed_fraction)
            self._continue(host, host.background.popleft(), left)

    def _continue(self, host: SimulatedHost, image: str, left_bytes: float) -> None:
        host.background_flow = self._start(self._peer(image), host, image, left_bytes, True)

    def hold(self, host: SimulatedHost, image: str) -> None:
        """The host has all of the image, and can serve it."""
        host.whole.add(image)
        self._holders.setdefault(image, {})[host] = None

    def _release(self, flow: Flow, image: str) -> None:
        """A transfer has ended: its slot at the store is free."""
        if flow.source is self._store:
            self._num_from_store -= 1
            self._from_store[image] -= 1

    def _serve(self, image: str) -> None:
        """Begins as many of the waiting fetches of an image as there are slots for."""
        waiting = self._waiting.get(image, {})
        for host in list(waiting):
            if not self._begin(host, image):
                break
            del waiting[host]
        if not waiting:
            self._waiting.pop(image, None)
            self._store_queue.pop(image, None)
        elif not self._scenario.peers or not (self._from_store.get(image) or self._holders.get(image)):
            self._store_queue.setdefault(image)

    def _serve_store(self) -> None:
        """Gives the store's free slots to those that wait for it, first come first served."""
        for image in list(itertools.islice(self._store_queue, 1)):
            self._serve(image)

    def _serve_uploads(self, peer: SimulatedHost) -> None:
        """A host has an upload slot free: serves what waits for an image that it has."""
        for image in [image for image in self._waiting if image in peer.whole]:
            self._serve(image)
