"""SmolLM2-135M trained by SFT and RL on a GPU: parity of engine and trainer, speed, and memory compared with
the prediction of `etude plan`.

All are commands of `etude` (see `demonstration.py`), with `device = "cuda"` unless a setting overrides it.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from common import Figures
from demonstration import Demonstration

from etude.observe import read_metrics

_LOOK_S = 0.5


def measure_gpu(shown: Demonstration, sft_steps: int, rl_steps: int) -> Figures:
    """Runs what is missing of SFT and RL, and returns the figures of RL."""
    tuned = shown.train("sft", f"gpu-sft-{shown.seed}", shown.prepare(), f"sft.num_steps={sft_steps}")
    planned = json.loads(shown.run_etude("plan", "--json", *shown.options(tuned)))
    with watch_memory() as seen:
        trained = shown.train("train", f"gpu-rl-{shown.seed}", tuned, f"rl.num_steps={rl_steps}")
    figures = summarize_rows(read_metrics(trained.metrics_file))
    return {
        **figures,
        "planned_bytes": planned["memory"][0]["total_bytes"],
        "seen_bytes": max(seen, default=0.0),
    }


def summarize_rows(rows: Sequence[Mapping[str, Any]]) -> Figures:
    """Figures from a run's metrics: k3 at publications, speed of sampling and of steps, pass rates."""
    published = [row["k3"] for row in rows if row["kind"] == "parity"]
    steps = [row for row in rows if row["kind"] == "rl"]
    ends = [row["wall_s"] for row in steps]
    tokens = sum(row["sampled_tokens"] * row["episodes"] for row in steps)
    quarter = max(1, len(steps) // 4)
    return {
        "steps": float(len(steps)),
        "publications": float(len(published)),
        "k3_median": statistics.median(published),
        "k3_max": max(published),
        "parity_max": max(row["max"] for row in rows if row["kind"] == "parity"),
        "step_s": statistics.median(after - before for before, after in pairwise(ends)),
        "sampled_tokens_per_s": tokens / sum(row["rollout_s"] for row in steps),
        "trained_tokens_per_s": sum(row.get("train_tokens", 0.0) for row in steps)
        / max(1e-9, sum(row["train_s"] for row in steps)),
        "pass_rate_first_quarter": statistics.fmean(row["pass_rate"] for row in steps[:quarter]),
        "pass_rate_last_quarter": statistics.fmean(row["pass_rate"] for row in steps[-quarter:]),
    }


@contextmanager
def watch_memory() -> Iterator[list[float]]:
    """Samples the GPU memory of all processes, in bytes, during the block; empty without nvidia-smi."""
    seen: list[float] = []
    ended = threading.Event()
    command = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")

    def look() -> None:
        while not ended.wait(_LOOK_S):
            found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            seen.append(sum(map(float, found)) * 2**20)

    looking = threading.Thread(target=look, daemon=True)
    if shutil.which(command[0]):
        looking.start()
    try:
        yield seen
    finally:
        ended.set()
        if looking.is_alive():
            looking.join()
