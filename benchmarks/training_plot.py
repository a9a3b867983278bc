"""Draws the figure of `training.py`: reward by samples seen, ours and TRL's, seed by seed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("agg")
import matplotlib.pyplot as plt

_SIDES = {"ours": "Étude", "trl": "TRL's GRPOTrainer"}
_SHAPES = {"": "8 samples of 256 tokens a step", "_wide": "64 samples of 32 tokens a step"}
_SAMPLES = {"": 8, "_wide": 64}


def draw_curves(path: Path, result: Mapping[str, Any]) -> None:
    """Writes the figure from `result`, the benchmark's JSON; the path's suffix gives the format."""
    shapes = [suffix for suffix in _SHAPES if f"curves{suffix}" in result["peers"]]
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "training", "font.size": 9}):
        figure, places = plt.subplots(
            1, max(1, len(shapes)), figsize=(11, 4), layout="constrained", squeeze=False, sharey=True
        )
        for axes, suffix in zip(places[0], shapes, strict=False):
            _draw_shape(axes, result["peers"][f"curves{suffix}"], _SAMPLES[suffix])
            axes.set_title(_SHAPES[suffix])
        places[0][0].set_ylabel("mean reward")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _draw_shape(axes: Any, curves: Mapping[str, Any], samples_per_step: int) -> None:
    """Draws a thin line per seed and a thick one for the mean."""
    for side, label in _SIDES.items():
        rewards = np.array(curves[side])
        samples = np.arange(1, rewards.shape[1] + 1) * samples_per_step
        (line,) = axes.plot(samples, rewards.mean(axis=0), label=label, linewidth=2)
        for seed in rewards:
            axes.plot(samples, seed, color=line.get_color(), alpha=0.3, linewidth=0.8)
    axes.set_xlabel("samples")
    axes.legend(loc="upper left", frameon=False)
