"""The report's figures, drawn from the rows of `metrics.jsonl`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from etude.observe.metrics import MetricRow

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e7eb"
BLUE, RUST, TEAL, SAND = "#2a5d9f", "#c4532d", "#2a8c82", "#b8a17a"
SERIES_COLOURS = (BLUE, RUST, TEAL, SAND, MUTED)

_LEGEND_ROW_INCHES = 0.2

SPLIT_WORDS = {
    "before": "held-out tasks",
    "after": "held-out tasks",
    "during": "held-out tasks",
    "heldout": "held-out tasks",
    "family_before": "unseen families",
    "family": "unseen families",
    "heldout_family": "unseen families",
}
MODE_WORDS = {"sampled": "temperature 1"}

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}

Series = tuple[list[float], list[float]]


def draw_plots(rows: Sequence[MetricRow]) -> dict[str, bytes]:
    """PNG images by name, in reading order. A plot without data is left out."""
    drawn: dict[str, bytes] = {}
    with mpl.rc_context(STYLE):
        for name, draw in (
            ("pass_rate", _pass_rate),
            ("reward", _reward),
            ("behaviour", _behaviour),
            ("midtrain_loss", _midtrain_loss),
        ):
            figure = Figure(figsize=(6.4, 3.4), dpi=160, layout="constrained")
            axes = figure.add_subplot()
            if draw(axes, rows):
                drawn[name] = _png(figure)
    return drawn


def _pass_rate(axes: Axes, rows: Sequence[MetricRow]) -> bool:
    """Pass rate over wall time: in training, and on each evaluated split and mode."""
    training = _series(rows, "rl", "wall_s", "pass_rate")
    if training[0]:
        minutes = [second / 60 for second in training[0]]
        axes.plot(minutes, training[1], color=GRID, linewidth=1.0)
        axes.plot(minutes, _smooth(training[1]), color=MUTED, label="training tasks (temperature 1)")
    for index, (label, (seconds, rates)) in enumerate(_evaluations(rows).items()):
        colour = SERIES_COLOURS[index % len(SERIES_COLOURS)]
        axes.plot([second / 60 for second in seconds], rates, marker="o", color=colour, label=label)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    return _finish(axes, "Tasks solved", "minutes since the start")


def _evaluations(rows: Sequence[MetricRow]) -> dict[str, Series]:
    """Pass rates over seconds by what was evaluated and how.

    A row gives `pass_rate` in its `mode` (temperature 1 where it names none), and `greedy` if it has that.
    """
    found: dict[str, Series] = {}
    for row in rows:
        if row.get("kind") != "evaluation" or not _has(row, "wall_s"):
            continue
        split = str(row.get("split", ""))
        mode = MODE_WORDS.get(str(row.get("mode", "sampled")), str(row.get("mode")))
        for name, words in (("greedy", "greedy"), ("pass_rate", mode)):
            if _has(row, name):
                label = f"{SPLIT_WORDS.get(split, split)}, {words}"
                seconds, rates = found.setdefault(label, ([], []))
                seconds.append(float(row["wall_s"]))
                rates.append(float(row[name]))
    return found


def _reward(axes: Axes, rows: Sequence[MetricRow]) -> bool:
    steps, rewards = _series(rows, "rl", "step", "reward")
    if steps:
        axes.plot(steps, rewards, color=GRID, linewidth=1.0)
        axes.plot(steps, _smooth(rewards), color=BLUE, label="mean reward, smoothed")
    return _finish(axes, "Training reward", "RL step")


def _behaviour(axes: Axes, rows: Sequence[MetricRow]) -> bool:
    curves = (
        ("parallel_turns", "turns with parallel calls, per session", TEAL),
        ("reads_before_edits", "edits of files read before, share", RUST),
    )
    for name, label, colour in curves:
        steps, values = _series(rows, "rl", "step", name)
        if steps:
            axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
            axes.plot(steps, _smooth(values), color=colour, label=label)
    axes.set_ylim(bottom=0)
    return _finish(axes, "How the agent works", "RL step")


def _midtrain_loss(axes: Axes, rows: Sequence[MetricRow]) -> bool:
    for name, label, colour in (("loss", "all tokens", SAND), ("agent_loss", "the agent's tokens", BLUE)):
        steps, values = _series(rows, "midtrain", "step", name)
        if steps:
            axes.plot(steps, values, color=colour, label=label)
    axes.set_ylim(bottom=0)
    return _finish(axes, "Mid-training loss (nats per token)", "optimiser step")


def _series(rows: Sequence[MetricRow], kind: str, x: str, y: str) -> Series:
    """Both values of every row of `kind` that has them, in order."""
    pairs = [(row[x], row[y]) for row in rows if row.get("kind") == kind and _has(row, x) and _has(row, y)]
    return [float(pair[0]) for pair in pairs], [float(pair[1]) for pair in pairs]


def _has(row: MetricRow, name: str) -> bool:
    return isinstance(row.get(name), int | float)


def _smooth(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Exponential moving average, corrected for its start."""
    smoothed: list[float] = []
    total = mass = 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        mass = weight * mass + (1 - weight)
        smoothed.append(total / mass)
    return smoothed


def _finish(axes: Axes, title: str, x_label: str) -> bool:
    """Titles, and below the axes the legend; False where nothing was drawn."""
    handles, _ = axes.get_legend_handles_labels()
    if not handles:
        return False
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=10)
    axes.set_xlabel(x_label)
    axes.tick_params(length=0)
    axes.margins(x=0.02)
    figure = axes.get_figure(root=True)
    assert figure is not None
    legend = figure.legend(loc="outside lower left", ncols=2, fontsize=8.5)
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW_INCHES * -(-len(legend.texts) // 2))
    return True


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()
