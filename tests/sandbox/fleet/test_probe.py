"""Measuring a machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from etude.errors import ResourceError
from etude.sandbox.fleet.probe import MachineProbe, NoProbe

MEMINFO = "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    250 kB\n"


def write(proc: Path, busy: int, idle: int, load: float) -> None:
    (proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3\n")
    (proc / "meminfo").write_text(MEMINFO)
    (proc / "loadavg").write_text(f"{load} 0.00 0.00 1/100 1\n")


def test_pressure_is_what_was_used_since_the_last_look(tmp_path: Path):
    now_s = [100.0]
    probe = MachineProbe(tmp_path, tmp_path, lambda: now_s[0])
    with pytest.raises(ResourceError):  # which is not kept
        asyncio.run(probe.pressure())
    write(tmp_path, 100, 900, 0.1)
    first = asyncio.run(probe.pressure())
    assert (first.cpu, first.memory) == (pytest.approx(0.1), pytest.approx(0.75))
    assert 0 < first.disk < 1
    write(tmp_path, 150, 950, 0.1)
    assert asyncio.run(probe.pressure()) is first  # all who ask at once share one measurement
    now_s[0] += 1.0
    assert asyncio.run(probe.pressure()).cpu == pytest.approx(0.5)


def test_a_queue_before_busy_cores_raises_the_pressure_above_one(tmp_path: Path):
    probe = MachineProbe(tmp_path, tmp_path)
    write(tmp_path, 1000, 0, 1000.0)
    assert asyncio.run(probe.pressure()).cpu > 1


def test_an_unreadable_machine_is_an_error(tmp_path: Path):
    with pytest.raises(ResourceError, match="cannot measure"):
        asyncio.run(MachineProbe(tmp_path, tmp_path).pressure())
    assert asyncio.run(NoProbe().pressure()) is None
