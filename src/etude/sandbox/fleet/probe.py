"""Probes: they measure how loaded a host is."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from etude.errors import ResourceError
from etude.observe.machine import available_cores, total_memory_bytes
from etude.sandbox.fleet.hosts import Capacity, Pressure


class HostProbe(Protocol):
    """Measures one host. An answer counts as the host's heartbeat."""

    async def pressure(self) -> Pressure | None:
        """The pressure now; None if nothing is measured: the scheduler then relies on its promises."""
        ...


class NoProbe:
    """Measures nothing. The heartbeat is then the backend's list of sandboxes."""

    async def pressure(self) -> Pressure | None:
        return None


class MachineProbe:
    """Measures the machine on which it runs, from `/proc` and the disk that holds `directory`.

    A measurement is reused for `FRESH_S`: with several fleets on one server, each call would otherwise
    shorten the interval of the others, down to nothing, and report an idle processor.
    """

    def __init__(
        self, directory: Path, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory
        self._proc = proc
        self._clock = clock
        self._lock = threading.Lock()
        self._before = (0, 0)
        self._last: tuple[float, Pressure] | None = None

    async def pressure(self) -> Pressure:
        """Processor use since the last measurement (the first time: since boot), memory and disk in use.

        Raises ResourceError where `/proc` cannot be read.
        """
        return await asyncio.to_thread(self._pressure)

    def _pressure(self) -> Pressure:
        with self._lock:
            now_s = self._clock()
            if self._last is None or now_s - self._last[0] >= FRESH_S:
                self._last = now_s, self._measure()
            return self._last[1]

    def _measure(self) -> Pressure:
        try:
            cpu = self._cpu((self._proc / "stat").read_text())
            memory = _memory((self._proc / "meminfo").read_text())
            running = float((self._proc / "loadavg").read_text().split()[0])
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ResourceError(
                f"cannot measure this machine: {error}",
                field="probe",
                received=str(self._proc),
                fix="mount /proc, or use NoProbe",
            ) from error
        usage = shutil.disk_usage(self._directory)
        # Where all cores are busy, the run queue distinguishes loaded hosts from overloaded ones.
        waiting = running / (os.cpu_count() or 1)
        return Pressure(max(cpu, waiting) if cpu > _BUSY else cpu, memory, usage.used / usage.total)

    def _cpu(self, stat: str) -> float:
        fields = [int(field) for field in stat.split("\n", 1)[0].split()[1:9]]
        total, idle = sum(fields), fields[3] + fields[4]
        before, self._before = self._before, (total, idle)
        passed = total - before[0]
        return 1 - (idle - before[1]) / passed if passed > 0 else 0.0


def machine_capacity(directory: Path) -> Capacity:
    """What this machine, or this process's share of it, has; its disk is the one that holds `directory`."""
    disk_bytes = shutil.disk_usage(directory).total
    return Capacity(available_cores(), total_memory_bytes(), disk_bytes)


FRESH_S = 0.25
"""How long a measurement is reused."""

_BUSY = 0.95


def _memory(meminfo: str) -> float:
    rows = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    return 1 - int(rows["MemAvailable"].split()[0]) / int(rows["MemTotal"].split()[0])
