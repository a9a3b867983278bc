"""How loaded a sandbox server's host is and what it has, as the server measures it: both ends of
`GET /v1/pressure` and `GET /v1/capacity`.

A fleet's heartbeat asks each server; a server has one measurement for all who ask.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from etude.sandbox.fleet.hosts import Capacity, Pressure
from etude.sandbox.fleet.probe import HostProbe
from etude.sandbox.remote import RemoteBackend

FRESH_S = 0.25
"""How long one measurement serves everybody who asks."""


class RemoteProbe:
    """`HostProbe` of the host behind a `RemoteBackend`. That the server answers is the heartbeat."""

    def __init__(self, backend: RemoteBackend) -> None:
        self._backend = backend

    async def capacity(self) -> Capacity:
        """What the server's machine has. First of all it greets the server, which ends what an earlier client
        of the same name has left there. Raises as `pressure`."""
        await self._backend.hello()
        line = self._backend.line
        return line.decoded(decode_capacity, await line.call("GET", "capacity"))

    async def pressure(self) -> Pressure | None:
        """The pressure as the server measures it; None if it measures nothing.

        Never sent twice: the next heartbeat asks anew. Raises SandboxLostError if the server cannot be
        reached, SandboxError for an answer that is no pressure, and what the server raises.
        """
        line = self._backend.line
        return line.decoded(decode_pressure, await line.call("GET", "pressure"))


class SharedProbe:
    """`HostProbe` over another one that measures what happened since it last looked.

    Several fleets ask one server: without this each would shorten the others' interval, down to nothing,
    and see an idle processor.
    """

    def __init__(
        self, probe: HostProbe, fresh_s: float = FRESH_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._probe = probe
        self._fresh_s = fresh_s
        self._clock = clock
        self._lock = asyncio.Lock()
        self._measured_s: float | None = None
        self._last: Pressure | None = None

    async def pressure(self) -> Pressure | None:
        """The last measurement, or a new one if it is older than `fresh_s`. Raises what measuring raises."""
        async with self._lock:
            now_s = self._clock()
            if self._measured_s is None or now_s - self._measured_s >= self._fresh_s:
                self._last = await self._probe.pressure()
                self._measured_s = now_s
            return self._last


def encode_capacity(capacity: Capacity) -> dict[str, float]:
    """The JSON of what a machine has."""
    return asdict(capacity)


def decode_capacity(raw: Any) -> Capacity:
    """Raises ValueError, TypeError or KeyError for what `encode_capacity` does not write."""
    cpus, memory, disk = (float(raw[name]) for name in ("cpus", "memory_bytes", "disk_bytes"))
    if not all(0 < size < float("inf") for size in (cpus, memory, disk)):
        raise ValueError(f"no capacity: {raw}")
    return Capacity(cpus, int(memory), int(disk))


def encode_pressure(pressure: Pressure | None) -> dict[str, float] | None:
    """The JSON of a pressure."""
    return None if pressure is None else asdict(pressure)


def decode_pressure(raw: Any) -> Pressure | None:
    """Raises ValueError, TypeError or KeyError for what `encode_pressure` does not write."""
    if raw is None:
        return None
    cpu, memory, disk = (float(raw[name]) for name in ("cpu", "memory", "disk"))
    # A comparison with NaN is false, too: no host may look empty for it.
    if not all(0 <= part < float("inf") for part in (cpu, memory, disk)):
        raise ValueError(f"no pressure: {raw}")
    return Pressure(cpu, memory, disk)
