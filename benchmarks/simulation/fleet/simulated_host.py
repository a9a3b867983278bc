"""One simulated host: its image cache, its fetches, its starts."""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, deque
from dataclasses import dataclass

from benchmarks.simulation.fleet.scenario import Scenario
from benchmarks.simulation.flows import Endpoint, Flow

from etude.sandbox.fleet.hosts import Pressure


@dataclass(slots=True, eq=False)
class Start:
    """One request of the burst on its way to running."""

    image: str
    asked_s: float = 0.0
    ticket: int = 0
    running: bool = False
    done_s: float = 0.0


class ImageCache:
    """Images of one host by bytes, longest unused first; those in use stay."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._images: OrderedDict[str, int] = OrderedDict()
        self._uses: dict[str, int] = {}

    def __contains__(self, image: str) -> bool:
        return image in self._images

    def use(self, image: str) -> None:
        """A sandbox needs the image: it stays from now on, and counts as used just now."""
        self._uses[image] = self._uses.get(image, 0) + 1
        if image in self._images:
            self._images.move_to_end(image)

    def release(self, image: str) -> None:
        """That sandbox has ended."""
        self._uses[image] -= 1
        if not self._uses[image]:
            del self._uses[image]

    def add(self, image: str, num_bytes: int) -> list[str]:
        """Keeps an image; returns those that had to go. When all are in use it exceeds its limit."""
        if image in self._images:
            return []
        self._images[image] = num_bytes
        self.used_bytes += num_bytes
        evicted: list[str] = []
        if self.used_bytes <= self.limit_bytes:
            return evicted
        for old in list(self._images):
            if self.used_bytes <= self.limit_bytes:
                break
            if old != image and old not in self._uses:
                self.used_bytes -= self._images.pop(old)
                evicted.append(old)
        return evicted


class SimulatedHost:
    """What one host does with the starts that it is sent; the burst moves the bytes."""

    def __init__(self, name: str, scenario: Scenario) -> None:
        speed = scenario.capacity.network_bytes_per_s
        self.name = name
        self.alive = True
        self.ingress = Endpoint(speed)
        self.egress = Endpoint(speed)
        self.cache = ImageCache(scenario.cache_bytes)
        self.whole: set[str] = set()
        """Images that other hosts can have from here."""
        self.waiting: dict[str, list[Start]] = {}
        """Starts by the image that they wait for."""
        self.queue: dict[str, None] = {}
        """Images to be fetched, in order of demand's arrival."""
        self.active: dict[str, Flow | None] = {}
        """Images on their way; None: the source has no slot for it yet."""
        self.background: deque[str] = deque()
        """Images of which a part is there and the rest is to come, one at a time."""
        self.background_flow: Flow | None = None
        self.uploads: dict[Flow, tuple[SimulatedHost, str]] = {}
        self.last_beat_s = 0.0
        self._scenario = scenario
        self._free_s = [0.0] * scenario.create_slots
        self._used = [0.0, 0.0, 0.0]

    def next_fetch(self) -> str | None:
        """Takes the image for which most sandboxes wait, if there is a slot; the earliest of equals."""
        if not self.queue or len(self.active) >= self._scenario.fetch_slots:
            return None
        image = max(self.queue, key=lambda name: len(self.waiting[name]))
        del self.queue[image]
        self.active[image] = None
        return image

    def begin_create(self, now_s: float, duration_s: float) -> float:
        """Takes the first free slot for a start of that length; returns when it ends."""
        end_s = max(now_s, self._free_s[0]) + duration_s
        heapq.heapreplace(self._free_s, end_s)
        return end_s

    def run(self, source: random.Random) -> None:
        """One more sandbox runs here and uses what it happens to use."""
        scenario, capacity, policy = self._scenario, self._scenario.capacity, self._scenario.policy
        demand = scenario.demand
        shares = (
            demand.cpus / (capacity.cpus * policy.cpu_overcommit),
            demand.memory_bytes / (capacity.memory_bytes * policy.memory_overcommit),
            demand.disk_bytes / (capacity.disk_bytes * policy.disk_overcommit),
        )
        for place, share in enumerate(shares):
            self._used[place] += share * source.expovariate(1 / scenario.mean_use)

    def pressure(self) -> Pressure:
        """What a probe of this host would measure."""
        return Pressure(*self._used)
