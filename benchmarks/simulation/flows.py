"""A network of capacities and transfers in virtual time.

Every transfer runs from one endpoint to another, at the smaller of the two fair shares. What one side leaves
unused is not given to others, so the rates are a lower bound of max-min fairness. Background transfers
move only where no foreground transfer touches either endpoint.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

Action = Callable[[], None]


class VirtualClock:
    """Events in order of time; those of one instant in the order in which they were planned."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, action: Action) -> None:
        """Plans `action` for `time_s`, or for now if that has passed."""
        heapq.heappush(self._heap, (max(time_s, self.now_s), next(self._numbers), action))

    def after(self, delay_s: float, action: Action) -> None:
        """Plans `action` for `delay_s` from now."""
        self.at(self.now_s + delay_s, action)

    def run(self, until: Callable[[], bool]) -> None:
        """Runs events until none is left or `until()` holds."""
        while self._heap and not until():
            self.now_s, _, action = heapq.heappop(self._heap)
            action()


@dataclass(slots=True, eq=False)
class Endpoint:
    """One direction of a network interface, or a store's egress."""

    bytes_per_s: float
    """math.inf: never the bottleneck."""
    foreground: dict[Flow, None] = field(default_factory=dict)
    background: dict[Flow, None] = field(default_factory=dict)

    def share(self, is_background: bool) -> float:
        """The rate that each transfer of that kind may have here."""
        if self.bytes_per_s == math.inf:
            return math.inf
        if is_background:
            return 0.0 if self.foreground else self.bytes_per_s / len(self.background)
        return self.bytes_per_s / len(self.foreground)


@dataclass(slots=True, eq=False)
class Flow:
    """One transfer."""

    source: Endpoint
    sink: Endpoint
    left_bytes: float
    done: Action
    is_background: bool
    rate: float = 0.0
    since_s: float = 0.0
    """Up to when `left_bytes` is settled."""
    version: int = 0
    """Of its planned end: one planned at another rate is void."""


class Transfers:
    """All transfers under way."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def start(
        self, source: Endpoint, sink: Endpoint, num_bytes: float, done: Action, is_background: bool = False
    ) -> Flow:
        """Begins a transfer; `done` is called at its end."""
        flow = Flow(source, sink, num_bytes, done, is_background, since_s=self._clock.now_s)
        for end in (source, sink):
            (end.background if is_background else end.foreground)[flow] = None
        self._rebalance(flow)
        return flow

    def stop(self, flow: Flow) -> None:
        """Breaks a transfer off; `done` is not called."""
        flow.version = -1
        for end in (flow.source, flow.sink):
            (end.background if flow.is_background else end.foreground).pop(flow, None)
        self._rebalance(flow)

    def _rebalance(self, cause: Flow) -> None:
        """New rates for all that share an endpoint with a transfer that began or ended."""
        for end in (cause.source, cause.sink):
            if end.bytes_per_s == math.inf:
                if cause in end.foreground or cause in end.background:
                    self._set_rate(cause)
                continue
            for flow in (*end.foreground, *end.background):
                self._set_rate(flow)

    def _set_rate(self, flow: Flow) -> None:
        rate = min(flow.source.share(flow.is_background), flow.sink.share(flow.is_background))
        if rate == flow.rate:
            return
        now_s = self._clock.now_s
        flow.left_bytes -= flow.rate * (now_s - flow.since_s)
        flow.rate, flow.since_s = rate, now_s
        flow.version += 1
        self._plan(flow)

    def _plan(self, flow: Flow) -> None:
        if flow.rate > 0:
            version = flow.version
            self._clock.after(max(0.0, flow.left_bytes) / flow.rate, lambda: self._end(flow, version))

    def _end(self, flow: Flow, version: int) -> None:
        if flow.version == version:
            self.stop(flow)
            flow.done()
