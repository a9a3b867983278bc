"""Start-up is measured in processor time, and a failed start gives no figure."""

from __future__ import annotations

import subprocess
import sys

import pytest
import startup


def test_processor_time_is_that_of_the_process_and_not_of_its_sleep() -> None:
    busy = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    assert startup.processor_time_s([sys.executable, "-c", busy]) >= 0.2
    slept_s = startup.processor_time_s([sys.executable, "-S", "-c", "import time; time.sleep(0.5)"])
    assert slept_s < 0.5


def test_a_start_that_fails_is_no_figure() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        startup.processor_time_s([sys.executable, "-S", "-c", "raise SystemExit(3)"])


def test_ratios_are_of_starts_in_the_same_round() -> None:
    times = {name: [1.0, 10.0] for name in startup.STARTS} | {"torch": [0.5, 4.0]}
    figures = startup.summarise(times)
    assert figures["engine_over_torch"] == 2.25
    assert figures["engine_s"] == 5.5
