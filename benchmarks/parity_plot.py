"""Draws the figure of `parity.py`: mismatch by number format and routing, and its effect on learning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("agg")
import matplotlib.pyplot as plt
from parity_learning import EXACT

from etude.controller.parity_report import REPLAYED, SAMPLED

_FLOOR = 1e-17
"""Lower end of the bars."""
_GATE = 1e-3
LEARNING = ("router noise 0.3", "router noise 1", "3 bits")
"""Engines whose learning curves are drawn, each with the exact engine's."""


def draw(path: Path, mismatch: Mapping[str, Any], curves: Mapping[str, Any]) -> None:
    """Writes the figure; its format is the path's suffix."""
    # Fonts by name instead of outlines, and no date, so that the same figures give the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "parity", "font.size": 9}):
        figure, places = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
        first, *others = places.flat
        _draw_mismatch(first, mismatch)
        for axes, engine in zip(others, LEARNING, strict=True):
            _draw_curves(axes, engine, curves)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _draw_mismatch(axes: Any, mismatch: Mapping[str, Any]) -> None:
    names = list(mismatch)
    places = np.arange(len(names))
    for offset, comparison, label in (
        (-0.2, SAMPLED, "experts chosen anew"),
        (0.2, SAMPLED + REPLAYED, "experts replayed"),
    ):
        by_size = [
            [report["figures"][comparison]["k3"] for report in mismatch[name]["by_micro_batch"].values()]
            for name in names
        ]
        widths = [max(0.0, max(values) - _FLOOR) for values in by_size]
        axes.barh(places + offset, widths, height=0.38, left=_FLOOR, label=label)
    axes.set_xscale("log")
    axes.set_xlim(_FLOOR, 1e-1)
    axes.axvline(_GATE, color="black", linewidth=1, linestyle="--")
    axes.text(_GATE, -0.75, "gate", ha="center", va="bottom")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel("k3 of sampled tokens, worst micro-batch (no bar: exactly 0)")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.04), ncols=2, frameon=False)


def _draw_curves(axes: Any, engine: str, curves: Mapping[str, Any]) -> None:
    for name, values in curves.items():
        by, _, treatment = name.partition(": ")
        if name != EXACT and by != engine:
            continue
        label = "exact engine" if name == EXACT else treatment
        accuracy = np.array(values["accuracy"])
        (line,) = axes.plot(values["steps"], accuracy.mean(axis=0), label=label, linewidth=2)
        for one in accuracy:
            axes.plot(values["steps"], one, color=line.get_color(), alpha=0.25, linewidth=0.8)
    axes.set_xlabel(f"RL steps, engine with {engine}")
    axes.set_ylabel("right symbols on unseen prompts")
    axes.set_ylim(0, 1)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, fontsize=8)
