"""How loaded a host is: measured on the host, or not at all."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Protocol

from etude.errors import ResourceError
from etude.observe.machine import available_cores, total_memory_bytes
from etude.sandbox.fleet.hosts import Capacity, Pressure


class HostProbe(Protocol):
    """Looks at one host. That it answers is the host's heartbeat."""

    async def pressure(self) -> Pressure | None:
        """The pressure now; None if nothing is measured: the scheduler then goes by its promises."""
        ...


class NoProbe:
    """Measures nothing. The heartbeat is then that the backend lists its sandboxes."""

    async def pressure(self) -> Pressure | None:
        return None


class MachineProbe:
    """Measures the machine on which it runs, from `/proc` and the disk that holds `directory`."""

    def __init__(self, directory: Path, proc: Path = Path("/proc")) -> None:
        self._directory = directory
        self._proc = proc
        self._before: tuple[int, int] | None = None

    async def pressure(self) -> Pressure:
        """Processor use since the last call (the first time: since boot), memory and disk in use now.

        Raises ResourceError where `/proc` cannot be read.
        """
        return await asyncio.to_thread(self._measure)

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
        # Where all cores are busy, the queue before them tells loaded hosts from overloaded ones.
        waiting = running / (os.cpu_count() or 1)
        return Pressure(max(cpu, waiting) if cpu > _BUSY else cpu, memory, usage.used / usage.total)

    def _cpu(self, stat: str) -> float:
        fields = [int(field) for field in stat.split("\n", 1)[0].split()[1:9]]
        total, idle = sum(fields), fields[3] + fields[4]
        before, self._before = self._before or (0, 0), (total, idle)
        passed = total - before[0]
        return 1 - (idle - before[1]) / passed if passed > 0 else 0.0


def machine_capacity(directory: Path) -> Capacity:
    """What this machine, or this process's share of it, has; its disk is the one that holds `directory`."""
    disk_bytes = shutil.disk_usage(directory).total
    return Capacity(available_cores(), total_memory_bytes(), disk_bytes)


_BUSY = 0.95


def _memory(meminfo: str) -> float:
    rows = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    return 1 - int(rows["MemAvailable"].split()[0]) / int(rows["MemTotal"].split()[0])
