"""The result of an evaluation: figures for people and programs, and the sessions that they summarise.

OUT/plan.json       what is evaluated: another evaluation may not use the directory
OUT/trajectories/   the sessions, stored as they end
OUT/result.json     figures, and a row for each session
OUT/result.md       the figures as a table
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import ConfigError, StoreError
from etude.evaluation.sessions import SessionRow
from etude.kit.durable import make_directory, write_json, write_text

_SIGNIFICANCE = 0.05
PLAN, RESULT, TABLE, TRAJECTORIES = "plan.json", "result.json", "result.md", "trajectories"


@dataclass(frozen=True, slots=True)
class ModeResult:
    """The results of a model at one temperature."""

    temperature: float | None
    """None: the endpoint's own."""
    figures: Mapping[str, Any]
    """See `session_figures` and `summarize`."""
    rows: tuple[SessionRow, ...]


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The results of a model on a suite."""

    target: Mapping[str, Any]
    """The evaluated model: `label`, for people, and the other keys that identify it."""
    suite: str
    seed: int
    modes: Mapping[str, ModeResult]
    """By name: `greedy` (temperature 0) and `sampled`."""
    behaviour: Mapping[str, float]
    """See `summarize_behaviour`; of the last mode."""

    def to_json(self) -> dict[str, Any]:
        """The figures; `sessions_to_json` returns the sessions."""
        figures = {
            name: {"temperature": mode.temperature, **mode.figures} for name, mode in self.modes.items()
        }
        about = {"target": dict(self.target), "suite": self.suite, "seed": self.seed}
        return {**about, **figures, "behaviour": dict(self.behaviour)}

    def sessions_to_json(self) -> dict[str, Any]:
        """Mode -> one row for each session."""
        return {name: [row.to_json() for row in mode.rows] for name, mode in self.modes.items()}

    def write(self, directory: Path) -> None:
        """Writes `result.json` and `result.md`."""
        make_directory(directory)
        write_json(directory / RESULT, {**self.to_json(), "sessions": self.sessions_to_json()})
        write_text(directory / TABLE, markdown_table(result_rows(self.to_json())))

    @classmethod
    def read(cls, path: Path) -> EvaluationResult:
        """The result at `path`, a file or the directory that holds it. Raises ConfigError, StoreError."""
        file = path / RESULT if path.is_dir() else path
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"cannot be read: {error.strerror}",
                field="result",
                received=str(file),
                fix="name a directory that `etude eval ... --out DIR` wrote",
            ) from error
        except ValueError as error:
            raise StoreError(f"is not valid JSON: {error}", field="result", received=str(file)) from error
        try:
            modes = {name: _mode(document, name) for name in document["sessions"]}
            about = (document["target"], document["suite"], document["seed"])
            return cls(*about, modes, document["behaviour"])
        except (KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"is not a result of an evaluation: {error!r}",
                field="result",
                received=str(file),
                fix="name a directory that `etude eval ... --out DIR` wrote",
            ) from error


def _mode(document: Mapping[str, Any], name: str) -> ModeResult:
    figures = dict(document[name])
    rows = tuple(SessionRow.from_json(row) for row in document["sessions"][name])
    return ModeResult(figures.pop("temperature"), figures, rows)


_SHARES = {"parallel_share": "turns with parallel calls", "first_edit_right": "first edit right"}
_NUMBERS = {
    "reward": "reward",
    "turns": "turns per session",
    "calls": "tool calls per session",
    "malformed": "malformed calls per session",
    "tokens": "sampled tokens per session",
    "input_tokens": "tokens read per session",
    "seconds": "seconds per session",
    "tokens_per_solved": "sampled tokens per solved task",
    "seconds_per_solved": "seconds per solved task",
    "cost_per_solved": "cost per solved task",
}


def result_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """A table of the figures in `EvaluationResult.to_json`: a row of headings, then one for each figure."""
    modes = [result[name] for name in ("greedy", "sampled") if name in result]
    rows = [["", *(_temperature(mode["temperature"]) for mode in modes)]]

    def add(label: str, cells: Sequence[str]) -> None:
        if any(cells):
            rows.append([label, *cells])

    add("tasks", [str(mode["tasks"]) for mode in modes])
    add("sessions", [str(mode["sessions"]) for mode in modes])
    add("solved (pass@1)", [_share(mode["pass_rate"], mode["ci95"]) for mode in modes])
    for k in sorted({k for mode in modes for k in mode["pass_at"] if k != "1"}, key=int):
        add(f"solved in one of {k} (pass@{k})", [_share(mode["pass_at"].get(k)) for mode in modes])
    if any(mode["voided"] for mode in modes):
        add("voided sessions", [str(mode["voided"]) for mode in modes])
        for cause in sorted({cause for mode in modes for cause in mode.get("voided_by_cause", ())}):
            add(f"  {cause}", [_share(mode.get("voided_by_cause", {}).get(cause)) for mode in modes])
        add("solved, voided as failed", [_share(mode["pass_rate_voided_failed"]) for mode in modes])
    for level in sorted({level for mode in modes for level in mode.get("by_level", ())}):
        add(f"  level {level}", [_share(mode["by_level"].get(level)) for mode in modes])
    for name, label in _SHARES.items():
        add(label, [_share(mode.get(name)) for mode in modes])
    for name, label in _NUMBERS.items():
        add(label, [_number(mode.get(name)) for mode in modes])
    return rows


def comparison_rows(compared: Mapping[str, Any], mode: str) -> list[list[str]]:
    """A table of one mode of the result of `compare_results`: headings, then a row for each figure."""
    figures = compared[mode]
    rows = [["", compared["first"], compared["second"], "difference", "95 %"]]
    rate, strict = figures["pass_rate"], figures["pass_rate_voided_failed"]
    shares = {"solved (pass@1)": rate}
    if (rate["first"], rate["second"]) != (strict["first"], strict["second"]):
        shares["solved, voided as failed"] = strict
    shares |= {f"solved in one of {k} (pass@{k})": one for k, one in figures.get("pass_at", {}).items()}
    for label, one in shares.items():
        cells = [_share(one["first"]), _share(one["second"]), f"{100 * one['difference']:+.1f}"]
        rows.append([label, *cells, _span(one["ci95"], 100)])
        if one.get("exact95") is not None:
            rows.append(["  exact bounds", "", "", "", _span(one["exact95"], 100)])
    for name, label in _NUMBERS.items():
        if name in figures:
            one = figures[name]
            cells = [_number(one["first"]), _number(one["second"]), f"{one['difference']:+.3g}"]
            rows.append([label, *cells, _span(one["ci95"], 1)])
    return rows


def conclusion(pass_rate: Mapping[str, Any]) -> str:
    """One sentence on the comparison of pass rates. A difference counts as shown only if both the exact test
    and the bootstrap interval show it."""
    p, num_clusters, interval = pass_rate["p_value"], pass_rate["clusters"], pass_rate["ci95"]
    if 2 / 2**num_clusters >= _SIGNIFICANCE:  # even if all agreed
        verdict = "undecided: so few clusters cannot show a difference"
    elif (p < _SIGNIFICANCE) != (not interval[0] <= 0 <= interval[1]):
        verdict = "undecided: only one of interval and exact test shows a difference"
    else:
        verdict = "a tie: no difference is shown" if p >= _SIGNIFICANCE else "a difference is shown"
    better, worse, tasks = pass_rate["better"], pass_rate["worse"], pass_rate["tasks"]
    counts = f"the second is better on {better} and worse on {worse} of {tasks} tasks"
    return f"{verdict} (p = {p:.3g}; {counts}, in {num_clusters} clusters)"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; its first column is left-aligned."""
    lines = [[cell.replace("|", "\\|").strip() for cell in row] for row in rows]
    marks = ["---", *("---:" for _ in lines[0][1:])]
    return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], marks, *lines[1:]))


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """The same as plain text in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "".join(line.rstrip() + "\n" for line in lines)


def _temperature(value: float | None) -> str:
    if value is None:
        return "the endpoint's temperature"
    return "greedy" if value == 0 else f"temperature {value:g}"


def _share(value: float | None, interval: Sequence[float] | None = None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f} %" + (f" ({_span(interval, 100)})" if interval else "")


def _span(interval: Sequence[float] | None, scale: float) -> str:
    if interval is None:
        return ""
    form = "{:.1f}" if scale == 100 else "{:.3g}"
    return " to ".join(form.format(scale * value) for value in interval)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
