"""`report.html`: one page with everything inlined, readable anywhere without a network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from etude.kit.durable import write_bytes, write_text
from etude.observe.metrics import read_metrics
from etude.observe.report.plots import draw_plots
from etude.observe.report.summary import (
    Comparison,
    Suggestion,
    behaviour_comparisons,
    facts,
    headline,
    next_steps,
    results_comparisons,
)
from etude.observe.run_directory import RunDirectory

CAPTIONS = {
    "pass_rate": "Share of the tasks solved, over the whole run.",
    "reward": "Mean reward of the trajectories of each RL step.",
    "behaviour": "Habits that are not rewarded directly, and how reinforcement learning changes them.",
    "midtrain_loss": "Next-token loss before reinforcement learning.",
}


def build_report(run: RunDirectory) -> Path:
    """Draws `plots/*.png` and writes `report.html` from what the run has written so far; returns its path.

    Raises RunDirectoryError where one of the run's files is damaged.
    """
    report = run.read_json(run.report_file) or {}
    examples = run.read_json(run.examples_file) or []
    plots = draw_plots(read_metrics(run.metrics_file))
    run.plots.mkdir(exist_ok=True)
    for name, image in plots.items():
        write_bytes(run.plots / f"{name}.png", image)
    write_text(run.html_file, render_page(report, examples, plots, run.name, str(run.path)))
    return run.html_file


def render_page(
    report: Mapping[str, Any],
    examples: Sequence[Mapping[str, Any]],
    plots: Mapping[str, bytes],
    name: str,
    run_path: str,
) -> str:
    """The page as text. Every value is escaped; `plots` maps names to PNG images."""
    template = Template(resources.files("etude.observe.report").joinpath("page.html").read_text("utf-8"))
    sections = (
        _section("Before and after", _comparison_table(results_comparisons(report), interval=True)),
        _section("Over time", "".join(_figure(key, image) for key, image in plots.items())),
        _section("How the agent works", _comparison_table(behaviour_comparisons(report), interval=False)),
        _section("Two sessions", "".join(_example(example) for example in examples)),
        _section("Time, throughput, parity", _fact_table(facts(report))),
        _section("What to try next", _suggestion_list(next_steps(report, run_path))),
        _section("What it ran on", _fact_table(_origin(report))),
    )
    return template.substitute(
        name=escape(str(report.get("name", name))),
        headline=escape(headline(report)),
        sections="\n".join(section for section in sections if section),
    )


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>" if body else ""


def _comparison_table(rows: Sequence[Comparison], interval: bool) -> str:
    if not rows:
        return ""
    lines = [_comparison_row(row) for row in rows]
    note = "<p class='note'>In brackets: 95 % confidence intervals.</p>" if interval else ""
    head = "<tr><th></th><th>before</th><th>after</th><th>change</th></tr>"
    return f"<table>\n<thead>{head}</thead>\n<tbody>\n{''.join(lines)}</tbody>\n</table>\n{note}"


def _comparison_row(row: Comparison) -> str:
    kind = " class='detail'" if row.detail else ""
    before, after, change = (escape(cell) for cell in row.cells())
    cells = f"<td>{before}</td><td class='after'>{after}</td><td>{change}</td>"
    return f"<tr{kind}><th scope='row'>{escape(row.label)}</th>{cells}</tr>\n"


def _figure(name: str, image: bytes) -> str:
    source = base64.b64encode(image).decode("ascii")
    caption = escape(CAPTIONS.get(name, name))
    return (
        f"<figure><img alt='{caption}' src='data:image/png;base64,{source}'>"
        f"<figcaption>{caption}</figcaption></figure>\n"
    )


def _example(example: Mapping[str, Any]) -> str:
    title = escape(str(example.get("title") or example.get("task", "")))
    columns = "".join(
        f"<div><h4>{when}</h4><pre>{escape(str(example.get(when, '')))}</pre></div>"
        for when in ("before", "after")
    )
    return f"<h3>{title}</h3>\n<div class='sessions'>{columns}</div>\n"


def _fact_table(rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return ""
    lines = (f"<tr><th scope='row'>{escape(key)}</th><td>{escape(value)}</td></tr>\n" for key, value in rows)
    return f"<table class='facts'>\n<tbody>\n{''.join(lines)}</tbody>\n</table>"


def _suggestion_list(suggestions: Sequence[Suggestion]) -> str:
    items = (
        f"<li><span>{escape(item.reason)}</span><code>{escape(item.command)}</code></li>\n"
        for item in suggestions
    )
    return f"<ul class='next'>\n{''.join(items)}</ul>"


def _origin(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Seed, commit, machine and versions as rows."""
    rows = [(name, str(report[name])) for name in ("seed", "commit") if report.get(name) not in (None, "")]
    machine, versions = report.get("machine"), report.get("versions")
    if isinstance(machine, Mapping):
        rows += [(str(key).replace("_", " "), _plain(key, value)) for key, value in machine.items() if value]
    if isinstance(versions, Mapping):
        rows.append(("versions", ", ".join(f"{key} {value}" for key, value in versions.items())))
    return rows


def _plain(key: str, value: Any) -> str:
    if key.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**30:.1f} GiB"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
