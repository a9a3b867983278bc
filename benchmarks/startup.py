"""Start-up cost of commands and of a run's processes: processor time of the whole process.

    python benchmarks/startup.py [--rounds N] [--json FILE]

Each is started in turn, round after round; medians, and for those that need PyTorch the median ratio to
importing PyTorch alone in the same round. An unmeasured first round fills the page cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from common import Figures, median_ratio, merge_result, print_table

_ETUDE = ("-c", "from etude.cli import main; main()")
STARTS: dict[str, Sequence[str]] = {
    "torch": ("-c", "import torch"),
    "interpreter": ("-c", ""),
    "version": (*_ETUDE, "--version"),
    "help": (*_ETUDE, "--help"),
    "sandbox_help": (*_ETUDE, "sandbox", "--help"),
    "train_help": (*_ETUDE, "train", "--help"),
    "run": ("-c", "import etude.controller.train"),
    "engine": ("-c", "import etude.controller.remote.engine_part"),
    "trainer": ("-c", "import etude.controller.remote.trainers"),
    "rollout_worker": ("-c", "import etude.controller.remote.rollout_part"),
}
_OVER_TORCH = ("run", "engine", "trainer", "rollout_worker")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    times = measure(asked.rounds)
    figures = summarise(times)
    print_table("processor time until it begins", figures)
    if asked.json is not None:
        merge_result(asked.json, ["startup"], figures, {"rounds": times})


def measure(rounds: int) -> dict[str, list[float]]:
    """Processor seconds of each start, by name and round."""
    times: dict[str, list[float]] = {name: [] for name in STARTS}
    for number in range(rounds + 1):
        for name, arguments in STARTS.items():
            spent_s = processor_time_s([sys.executable, *arguments])
            if number:
                times[name].append(spent_s)
    return times


def summarise(times: dict[str, list[float]]) -> Figures:
    """Medians, and ratios to PyTorch alone."""
    figures = {f"{name}_s": statistics.median(values) for name, values in times.items()}
    ratios = {f"{name}_over_torch": median_ratio(times[name], times["torch"]) for name in _OVER_TORCH}
    return figures | ratios


def processor_time_s(command: Sequence[str]) -> float:
    """User and system time of a process and its finished children. Raises CalledProcessError."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
