"""Draws the demonstration: sessions that RL solved by step, and held-out tasks before and after it.

    python benchmarks/demonstration_plot.py [DIRECTORY] [--plot FILE]

DIRECTORY: of `your_model.py --parts demonstration`, whose runs `rl-SEED` are written to `CURVES` first.
Without it the figure is drawn from the committed JSON alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).resolve().parent / "results"
CURVES = RESULTS / "curves_demonstration.json"
_WINDOW = 5


def read_curves(directory: Path) -> dict[str, list[float]]:
    """Share of the sessions solved in each RL step, by seed."""
    curves: dict[str, list[float]] = {}
    for path in sorted(directory.glob("runs/rl-*/metrics.jsonl")):
        rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        curves[path.parent.name.removeprefix("rl-")] = [r["pass_rate"] for r in rows if r["kind"] == "rl"]
    return curves


def draw(path: Path) -> None:
    """Writes the figure; the path's suffix gives the format."""
    curves = json.loads(CURVES.read_text(encoding="utf-8"))
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "demonstration", "font.size": 9}):
        figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
        for seed, rates in curves.items():
            _draw_seed(axes, seed, np.array(rates))
        axes.set_xlabel("RL steps from where SFT has ended")
        axes.set_ylabel("solved at temperature 1, percent")
        axes.legend(loc="upper left", frameon=False, ncols=2)
        axes.set_ylim(25, 85)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _draw_seed(axes: Any, seed: str, rates: np.ndarray) -> None:
    """Draws training sessions as a line, and the 200 held-out tasks before, after RL and after SFT."""
    figures = json.loads((RESULTS / f"demonstration_end_{seed}.json").read_text(encoding="utf-8"))["figures"]
    means = np.convolve(rates, np.ones(_WINDOW) / _WINDOW, mode="valid") * 100
    steps = np.arange(len(means)) + (_WINDOW + 1) / 2
    (line,) = axes.plot(steps, means, linewidth=1, alpha=0.7, label=f"seed {seed}: sessions of training")
    after = [100 * figures[f"demonstration_heldout_{name}"] for name in ("sft", "rl", "more_sft")]
    place = len(rates) + 1 + int(seed) / 2
    colour = line.get_color()
    axes.plot([0, place], after[:2], "o", color=colour, label=f"seed {seed}: held-out tasks")
    axes.plot([place], after[2:], "x", color=colour)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--plot", type=Path, default=RESULTS.parents[1] / "docs/figures/demonstration.svg")
    options = parser.parse_args()
    if options.directory is not None:
        CURVES.write_text(json.dumps(read_curves(options.directory), indent=1) + "\n", encoding="utf-8")
    draw(options.plot)
