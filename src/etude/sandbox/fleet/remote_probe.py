"""How loaded a sandbox server's host is and what it has, as the server measures it: the client's end of
`GET /v1/pressure` and `GET /v1/capacity`. A fleet's heartbeat asks each server."""

from __future__ import annotations

from typing import Any

from etude.sandbox.fleet.hosts import Capacity, Pressure
from etude.sandbox.remote import RemoteBackend


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


def decode_capacity(raw: Any) -> Capacity:
    """Raises ValueError, TypeError, KeyError or ConfigError for what is no capacity."""
    cpus, memory, disk = _numbers(raw, "cpus", "memory_bytes", "disk_bytes")
    return Capacity(cpus, int(memory), int(disk))


def decode_pressure(raw: Any) -> Pressure | None:
    """Raises ValueError, TypeError or KeyError for what is no pressure."""
    return None if raw is None else Pressure(*_numbers(raw, "cpu", "memory", "disk"))


def _numbers(raw: Any, *names: str) -> list[float]:
    numbers = [float(raw[name]) for name in names]
    # A comparison with NaN is false, too: no host may look empty for it.
    if not all(0 <= number < float("inf") for number in numbers):
        raise ValueError(f"no measurement: {raw}")
    return numbers
