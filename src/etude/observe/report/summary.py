"""The results of a run, finished or not, as rows for a page or a terminal.

Everything is read from `report.json`; rows whose keys are missing are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

Report = Mapping[str, Any]

MODES = (("greedy", "greedy"), ("sampled", "temperature 1"))

BEHAVIOUR_LABELS = {
    "calls": "tool calls per session",
    "calls_per_turn": "tool calls per turn",
    "parallel_turns": "turns with parallel calls",
    "parallel_share": "share of turns with parallel calls",
    "turns": "turns per session",
    "reads_before_edits": "edits of files read before",
    "edits": "edits per session",
    "test_runs": "test runs per session",
    "malformed": "malformed calls per session",
    "finish_share": "sessions ended by the agent",
    "sampled_tokens": "sampled tokens per session",
}
SHARES = frozenset({"parallel_share", "reads_before_edits", "finish_share"})


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measured figure with its 95 % confidence interval, where it has one."""

    value: float
    low: float | None = None
    high: float | None = None

    def text(self, share: bool) -> str:
        """`83.3 % (78.1-87.5)` for a share, `1.92` for a mean."""
        if not share:
            return f"{self.value:.3g}" if abs(self.value) < 100 else f"{self.value:.0f}"
        if self.low is None or self.high is None:
            return f"{100 * self.value:.1f} %"
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f}\N{EN DASH}{100 * self.high:.1f})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure before and after training."""

    label: str
    before: Estimate | None
    after: Estimate | None
    share: bool = True
    """Whether the figure is a share, shown in per cent."""
    detail: bool = False
    """Whether it is a breakdown of the row above."""

    @property
    def change(self) -> str:
        """The signed difference; empty where one side is missing."""
        if self.before is None or self.after is None:
            return ""
        difference = self.after.value - self.before.value
        return f"{100 * difference:+.1f}" if self.share else f"{difference:+.2f}"

    def cells(self) -> tuple[str, str, str]:
        """(before, after, change) as text."""
        before = self.before.text(self.share) if self.before else "\N{EM DASH}"
        after = self.after.text(self.share) if self.after else "\N{EM DASH}"
        return before, after, self.change


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Something to try next, with its command."""

    reason: str
    command: str


def results_comparisons(report: Report) -> list[Comparison]:
    """Pass rates before and after: both modes, by level, pass@k, unseen families, the first edit."""
    report = _before_alone(report)
    before, after = _mapping(report, "heldout_before"), _mapping(report, "heldout_after")
    family_before = _mapping(report, "heldout_family_before")
    family_after = _mapping(report, "heldout_family_after")
    rows: list[Comparison] = []
    for mode, words in MODES:
        old, new = before.get(mode), after.get(mode)
        rows.append(Comparison(f"held-out tasks, {words}", _estimate(old), _estimate(new)))
        rows.extend(_level_rows(old, new))
    for name in sorted({key.rpartition("_")[0] for key in report if key.startswith("pass_at_")}):
        old, new = report.get(f"{name}_before"), report.get(f"{name}_after")
        label = f"held-out tasks, at least one of {name.removeprefix('pass_at_')} at temperature 1"
        rows.append(Comparison(label, _estimate(old), _estimate(new)))
    for mode, words in MODES:
        label = f"unseen families, {words}"
        rows.append(Comparison(label, _estimate(family_before.get(mode)), _estimate(family_after.get(mode))))
    first_before, first_after = report.get("first_edit_right_before"), report.get("first_edit_right_after")
    rows.append(
        Comparison("first edit right, temperature 1", _estimate(first_before), _estimate(first_after))
    )
    rows += [row for name, sides in _mapping(report, "families").items() for row in _family_rows(name, sides)]
    return [row for row in rows if row.before or row.after]


def _family_rows(name: str, sides: Any) -> list[Comparison]:
    """Rows of a task family that can only be solved by acting."""
    before, after = _mapping(sides, "before"), _mapping(sides, "after")
    labels = [(mode, f"{name} tasks, {words}") for mode, words in MODES]
    for key in sorted({key for side in (before, after) for key in side if key.startswith("pass_at_")}):
        labels.append((key, f"{name} tasks, at least one of {key.removeprefix('pass_at_')} at temperature 1"))
    if "masked_ablation" in before or "masked_ablation" in after:
        ceiling = 100 * float(before.get("first_edit_ceiling", after.get("first_edit_ceiling", 0)))
        labels += [
            ("edits_after_run_share", f"{name} tasks, first edits after a test run"),
            ("masked_ablation", f"{name} tasks, output masked, first edit right (chance {ceiling:.1f} %)"),
        ]
    return [
        Comparison(label, _estimate(before.get(key)), _estimate(after.get(key)), detail=position > 0)
        for position, (key, label) in enumerate(labels)
    ]


def behaviour_comparisons(report: Report) -> list[Comparison]:
    """How the agent works, before and after."""
    report = _before_alone(report)
    before, after = _mapping(report, "behaviour_before"), _mapping(report, "behaviour_after")
    names = [*BEHAVIOUR_LABELS, *sorted((set(before) | set(after)) - set(BEHAVIOUR_LABELS))]
    rows = [
        Comparison(
            BEHAVIOUR_LABELS.get(name, name.replace("_", " ")),
            _estimate(before.get(name)),
            _estimate(after.get(name)),
            share=name in SHARES,
        )
        for name in names
        if name != "first_edit_right"
    ]
    return [row for row in rows if row.before or row.after]


def headline(report: Report) -> str:
    """One sentence with the main result."""
    before = _estimate(_mapping(report, "heldout_before").get("greedy"))
    after = _estimate(_mapping(report, "heldout_after").get("greedy"))
    if before and after:
        took = (
            f" The whole run took {_duration(report['wall_s'])}." if _is_number(report.get("wall_s")) else ""
        )
        last = before if report.get("rl_steps") == 0 else after
        compared = f"{100 * before.value:.1f} % before {_taken(report)}reinforcement learning"
        if last is before:
            compared = "no step of reinforcement learning was taken"
        return f"The model solves {100 * last.value:.1f} % of the held-out tasks; {compared}.{took}"
    if before:
        rate = f"{100 * before.value:.1f} %"
        return f"Before reinforcement learning the model solves {rate} of the held-out tasks."
    return "This run has not been evaluated yet."


def _before_alone(report: Report) -> Report:
    """The report, with "after" values as "before" if no RL step was taken: both are of one model."""
    if report.get("rl_steps") != 0:
        return report
    after = {key: value for key, value in report.items() if key.endswith("_after")}
    others = {key: value for key, value in report.items() if key not in after}
    families = {
        name: {"before": sides.get("before", sides.get("after"))}
        for name, sides in _mapping(report, "families").items()
        if isinstance(sides, Mapping)
    }
    moved = {f"{key.removesuffix('_after')}_before": value for key, value in after.items()}
    return {**moved, **others, "families": families}


def _taken(report: Report) -> str:
    """`80 steps of `, `1 of 80 steps of `; empty where the report does not say."""
    taken, planned = report.get("rl_steps"), report.get("rl_steps_planned")
    if not _is_number(taken):
        return ""
    if not _is_number(planned) or taken == planned:
        return f"{taken} {'step' if taken == 1 else 'steps'} of "
    return f"{taken} of {planned} {'step' if planned == 1 else 'steps'} of "


def next_steps(report: Report, run_path: str, program: str = "etude") -> list[Suggestion]:
    """Suggestions based on the results. The commands contain `run_path` and `program`: further runs start
    from the configuration that this one has stored."""

    def train_again(name: str, settings: str) -> str:
        return f"{program} train --config {run_path}/config.toml --name {name} {settings}"

    suggestions = [
        Suggestion("let the agent work on files of your own", f"{program} agent --run {run_path} PATH"),
        Suggestion("read what it did, token by token", f"{program} trajectory list {run_path}"),
    ]
    after = _mapping(report, "heldout_after").get("greedy")
    levels = {name: estimate.value for name, estimate in _levels(after).items()}
    if len(levels) == 3 and min(levels.values()) < max(levels.values()) - 0.1:
        hardest = min(levels, key=lambda name: levels[name])
        weights = ",".join("2" if name == hardest else "1" for name in sorted(levels))
        suggestions.append(
            Suggestion(
                f"level {hardest} is the weakest: draw it twice as often",
                train_again(f"level{hardest}", f"--set 'rl.level_weights=[{weights}]'"),
            )
        )
    malformed = _estimate(_mapping(report, "behaviour_after").get("malformed"))
    if malformed and malformed.value > 0.1:
        suggestions.append(
            Suggestion(
                f"{malformed.value:.2f} calls per session are malformed: penalise them more",
                train_again("tidy", "--set rl.reward.malformed_penalty=0.1"),
            )
        )
    suggestions += [
        Suggestion("train longer", train_again("longer", f"--set rl.num_steps={_more_steps(report)}")),
        Suggestion("see how much is chance: train with another seed", train_again("seed1", "--seed 1")),
        Suggestion(
            "train a control that cannot learn", train_again("control", "--set rl.optimizer.learning_rate=0")
        ),
    ]
    return suggestions


def _more_steps(report: Report) -> int:
    """1.5 times the planned steps; without a plan those of the quickstart."""
    planned = report.get("rl_steps_planned")
    return math.ceil(1.5 * planned) if _is_number(planned) and planned else 200


def facts(report: Report) -> list[tuple[str, str]]:
    """Time, throughput and parity as (label, value) rows."""
    rows: list[tuple[str, str]] = []
    if _is_number(report.get("wall_s")):
        rows.append(("whole run", _duration(report["wall_s"])))
    if _is_number(report.get("forecast_s")):
        rows.append(("forecast at its start", _duration(report["forecast_s"])))
    if _is_number(report.get("rl_steps")) and _is_number(report.get("rl_steps_planned")):
        rows.append(("RL steps", f"{report['rl_steps']} of {report['rl_steps_planned']}"))
    for name, value in _numbers(report, "stages").items():
        rows.append((name.removesuffix("_s").replace("_", " "), _duration(value)))
    for name, value in _numbers(report, "throughput").items():
        label, unit = _with_unit(name)
        rows.append((label, f"{value:,.0f} {unit}".strip() if value >= 10 else f"{value:.3g} {unit}"))
    sessions = _numbers(report, "rl_sessions")
    if played := sessions.pop("played", 0):
        rows.append(("voided sessions", f"{100 * sum(sessions.values()) / played:.1f} % of {played:,.0f}"))
        rows += [(f"voided by {cause}", f"{100 * count / played:.2f} %") for cause, count in sessions.items()]
    labels = {"k3": "engine against trainer, k3", "max_abs_dlogp": "largest difference of a log-probability"}
    for name, value in _numbers(report, "parity").items():
        rows.append((labels.get(name, name.replace("_", " ")), f"{value:.3g}"))
    for name, value in _numbers(report, "parity_gate").items():
        rows.append((f"parity gate, {name}", f"{value:.3g}"))
    return rows


def _level_rows(old: object, new: object) -> list[Comparison]:
    before, after = _levels(old), _levels(new)
    return [
        Comparison(f"level {name}", before.get(name), after.get(name), detail=True)
        for name in sorted(set(before) | set(after))
    ]


def _levels(value: object) -> dict[str, Estimate]:
    levels = value.get("by_level") if isinstance(value, Mapping) else None
    if not isinstance(levels, Mapping):
        return {}
    found = {str(name): _estimate(level) for name, level in levels.items()}
    return {name: estimate for name, estimate in found.items() if estimate}


def _estimate(value: object) -> Estimate | None:
    """From a bare number, or a mapping with `pass_rate`, `ci95` and `n`."""
    if _is_number(value):
        return Estimate(float(value))
    if not isinstance(value, Mapping) or not _is_number(value.get("pass_rate")):
        return None
    interval = value.get("ci95")
    low, high = interval if isinstance(interval, list | tuple) and len(interval) == 2 else (None, None)
    return Estimate(float(value["pass_rate"]), low, high)


def _mapping(report: Report, name: str) -> Mapping[str, Any]:
    value = report.get(name)
    return value if isinstance(value, Mapping) else {}


def _numbers(report: Report, name: str) -> dict[str, float]:
    return {key: value for key, value in _mapping(report, name).items() if _is_number(value)}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _with_unit(name: str) -> tuple[str, str]:
    """`decode_tokens_per_s` -> (decode, tokens/s); `peak_memory_bytes` -> (peak memory, bytes)."""
    for suffix, unit in (
        ("_tokens_per_s", "tokens/s"),
        ("_per_s", "per s"),
        ("_bytes", "bytes"),
        ("_s", "s"),
    ):
        if name.endswith(suffix):
            return name.removesuffix(suffix).replace("_", " "), unit
    return name.replace("_", " "), ""
