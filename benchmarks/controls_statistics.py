"""Figures and the table of benchmarks/controls.py, from the verdicts in its results file.

RL and a control are paired by seed and task, over all suites together. One bootstrap resamples clusters of
tasks (families), another whole seeds, because a seed is one model. The interval is the wider of the two.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common import Figures
from controls_recipes import CONTROLS, RL, Recipe

from etude.controller.evaluate import MIDTRAINED
from etude.evaluation.comparison import bootstrap_interval
from etude.evaluation.results import markdown_table

Peers = Mapping[str, Any]
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Lead:
    """Difference of the shares of tasks solved by RL and by a control, with its interval."""

    mean: float
    low: float
    high: float

    @property
    def is_tie(self) -> bool:
        """Whether the 95 % interval contains 0."""
        return self.low <= 0.0 <= self.high

    def text(self) -> str:
        """The lead in percentage points; a tie is marked as such."""
        figures = f"{100 * self.mean:+.1f} ({100 * self.low:+.1f} to {100 * self.high:+.1f})"
        return f"tie: {figures}" if self.is_tie else figures


def lead_over(peers: Peers, recipe: Recipe, budget: str = "wall", mode: str = "sampled") -> Lead | None:
    """Lead of RL over a recipe, over all seeds that have both; None without any."""
    differences, families, seeds = list[float](), list[str](), list[str]()
    for seed, rows in peers["runs"].items():
        if RL.name not in rows or budget not in rows.get(recipe.name, {}):
            continue
        ours, theirs = rows[RL.name]["wall"]["verdicts"], rows[recipe.name][budget]["verdicts"]
        for suite, clusters in peers["clusters"].items():
            pairs = zip(*(side.get(suite, {}).get(mode, "") for side in (ours, theirs)), strict=True)
            for (one, other), cluster in zip(pairs, clusters.split(), strict=False):
                if "x" not in (one, other):
                    differences.append(float(int(one) - int(other)))
                    families.append(f"{suite}/{cluster}")
                    seeds.append(seed)
    if not differences:
        return None
    found = [bootstrap_interval(differences, clusters) for clusters in (families, seeds)]
    bounds = [interval for interval in found if interval is not None] or [(-1.0, 1.0)]
    return Lead(statistics.fmean(differences), min(low for low, _ in bounds), max(high for _, high in bounds))


def share_solved(verdicts: Mapping[str, Mapping[str, str]]) -> float:
    """Share of solved tasks over all suites at temperature 1; voided sessions are left out."""
    signs = "".join(modes["sampled"] for modes in verdicts.values())
    return signs.count("1") / max(1, len(signs) - signs.count("x"))


def mean_of(peers: Peers, name: str, figure: Callable[[Row], float | None]) -> float | None:
    """Mean of a recipe's figure over the seeds that have it; None without any."""
    found = [figure(rows[name]) for rows in peers["runs"].values() if name in rows]
    present = [value for value in found if value is not None]
    return statistics.fmean(present) if present else None


def figures_of(peers: Peers) -> Figures:
    """Leads of RL with their intervals, in shares of tasks, and RL's own results.

    The best control is the one that solves most at temperature 1 and equal wall time.
    """
    figures: Figures = {"seeds": float(sum(RL.name in rows for rows in peers["runs"].values()))}
    best: tuple[float, Lead] | None = None
    for recipe in CONTROLS:
        for budget in ("wall", "tokens"):
            for mode in ("greedy", "sampled"):
                lead = lead_over(peers, recipe, budget, mode)
                if lead is None:
                    continue
                _put_lead(figures, f"rl_over_{recipe.name}_{mode}_equal_{budget}", lead)
                rate = mean_of(peers, recipe.name, lambda row: share_solved(row["wall"]["verdicts"]))
                if (budget, mode) == ("wall", "sampled") and rate is not None and rate > (best or (-1.0,))[0]:
                    best = rate, lead
                    _put_lead(figures, "rl_over_best_control_sampled", lead)
                if (budget, mode, recipe.name) == ("wall", "sampled", "best_of_group"):
                    _put_lead(figures, "rl_over_best_of_group", lead)
    names = ("observed_first_edit_ceiling", "observed_masked_ablation")
    for name in (*names, "calls_per_turn_before", "calls_per_turn_after"):
        value = mean_of(peers, RL.name, lambda row, name=name: row["wall"].get(name))
        if value is not None:
            figures[name] = value
    return figures


def _put_lead(figures: Figures, name: str, lead: Lead) -> None:
    figures |= {name: lead.mean, f"{name}_low": lead.low, f"{name}_high": lead.high}


def table_of(peers: Peers) -> str:
    """The table of README in Markdown; empty before there is a comparison."""
    rows = [_table_row(peers, recipe) for recipe in CONTROLS]
    if not any(rows):
        return ""
    heads = [
        "instead of RL",
        "chosen on `validation`",
        "solved",
        "RL ahead, equal wall time",
        "sampled tokens",
        "solved",
        "RL ahead, equal sampled tokens",
    ]
    nothing = ["mid-training alone", "", _solved(peers, MIDTRAINED, "wall"), "", "0", "", ""]
    ours = ["RL", _settings(peers, RL), _solved(peers, RL.name, "wall"), "", _tokens(peers, RL.name, "wall")]
    return f"{_caption(peers)}\n\n{markdown_table([heads, nothing, [*ours, '', ''], *filter(None, rows)])}"


def _caption(peers: Peers) -> str:
    """The table's caption: what was measured, machine and commits."""
    measured = [rows[RL.name]["wall"] for rows in peers["runs"].values() if RL.name in rows]
    found = {name: ", ".join(sorted({row[name] for row in measured})) for name in ("machine", "commit")}
    num_tasks = sum(len(modes["sampled"]) for modes in measured[0]["verdicts"].values())
    rl_s = f"{peers['timing']['stages']['rl_s']:.0f} s of RL on an idle machine"
    return (
        f"Percent of {num_tasks} held-out tasks solved at temperature 1, means of {len(measured)} seeds, "
        f"after the same mid-training and {rl_s}, or as much of something else. RL's lead in points with its "
        f"95 % interval; a tie is a lead whose interval holds 0. {found['machine']}; commit "
        f"{found['commit']}; `benchmarks/controls.py`."
    )


def _table_row(peers: Peers, recipe: Recipe) -> list[str]:
    lead = lead_over(peers, recipe)
    if lead is None:
        return []
    row = [recipe.title, _settings(peers, recipe), _solved(peers, recipe.name, "wall"), lead.text()]
    equal = lead_over(peers, recipe, "tokens")
    if equal is None:
        return [*row, "samples none", "", ""]
    return [
        *row,
        _tokens(peers, recipe.name, "tokens"),
        _solved(peers, recipe.name, "tokens"),
        equal.text(),
    ]


def _settings(peers: Peers, recipe: Recipe) -> str:
    trials = peers["tuning"].get(recipe.name)
    if not trials:
        return ""
    best = max(trials, key=lambda trial: trial["solved"])
    words = [word.partition("=") for word in best["settings"] if "algorithm" not in word]
    return ", ".join(f"`{key.rpartition('.')[2]} = {value}`" for key, _, value in words)


def _solved(peers: Peers, name: str, budget: str) -> str:
    """Percent of tasks solved at temperature 1."""
    rate = mean_of(peers, name, lambda row: share_solved(row[budget]["verdicts"]))
    return "" if rate is None else f"{100 * rate:.1f} %"


def _tokens(peers: Peers, name: str, budget: str) -> str:
    tokens = mean_of(peers, name, lambda row: row[budget]["sampled_tokens"])
    return f"{tokens or 0:,.0f}"
