"""Asynchronous against synchronous RL, and how many sessions one controller can drive.

    python benchmarks/async_rl.py --json FILE            all of `_MEASURED`, or those that --measure names
    python benchmarks/async_rl.py --real CONFIG ...      the same comparison as real runs on this machine
    python benchmarks/async_rl.py --measure --json FILE  measures nothing, only merges (see below)

Each call replaces the figures in FILE that it measured, copies those of chaos.json and forks.json from the
same folder, and leaves the others; `parts` in FILE has the commit at which each was measured.

Simulated: loop, collectors, buffer, log and agent sessions are real; engine, tools, graders and trainer only
take time. The synchronous baseline has continuous batching, and the better of its refill settings. Scale: the
processor time of this process per session turn, all included: agent, parsing, records, storing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from async_rl_real import compare_real
from async_rl_simulation import Machine, Outcome, simulate
from benchmarks.simulation.rollout import SessionShapes
from common import Figures, median_ratio, merge_result, print_table

from etude.config import load_config

_STEPS = 16
_SESSIONS = 512
"""Limit of concurrent sessions: more than either mode ever runs."""
_BOUND = 4
_MEASURED = ("simulated", "publications", "scale")
_SLOW_LINK = {"trainer_tokens_per_s": 900.0, "stage_s": 30.0}
"""The machine on which sequential and overlapped publication are compared: its trainer is about as slow as
its engine, and weights take long to arrive."""
_FROM = {
    "chaos.json": ("chaos_kills", "prompts_lost", "prompts_repeated"),
    "forks.json": ("fork_vs_plain_reward",),
}
"""Result file of another benchmark -> figures to copy from it."""


def main() -> None:
    """Prints tables and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=5, help="pairs of simulated runs")
    parser.add_argument("--measure", nargs="*", choices=_MEASURED, default=_MEASURED)
    parser.add_argument("--most-sessions", type=int, default=10_000, help="largest row of the scale table")
    parser.add_argument("--real", type=Path, help="instead: real runs of this TOML, which names a checkpoint")
    parser.add_argument("--executor", default="local", help="of the real runs: local or ray")
    parser.add_argument("--steps", type=int, default=6, help="of each real run")
    parser.add_argument("--real-seeds", type=int, default=1)
    parser.add_argument("--figure", type=Path, help="where the real runs' utilisation is drawn (SVG)")
    parser.add_argument("--set", action="append", default=[], help="override of the real runs: KEY=VALUE")
    options = parser.parse_args()
    figures: Figures = {}
    rows: dict[str, Any] = {}
    parts: list[str] = list(options.measure)
    if options.real is not None:
        config = load_config(options.real, [f"executor={options.executor}", *options.set])
        figures, rows = compare_real(config, options.steps, options.real_seeds, options.figure)
        parts = ["real"]
    elif "simulated" in parts:
        figures, rows = compare_simulated(options.seeds)
    if "publications" in parts:
        figures |= compare_publications(options.seeds)
    if "scale" in parts:
        figures |= scale(options.most_sessions)
    print_table("figures", figures)
    if options.json is not None:
        merge_result(options.json, parts, figures, rows)
        merge_other_results(options.json)


def merge_other_results(path: Path) -> None:
    """Copies the figures of `_FROM` from the folder of `path` into it, with the commits of measurement."""
    result = json.loads(path.read_text(encoding="utf-8"))
    for name, keys in _FROM.items():
        other = path.parent / name
        if other.exists():
            found = json.loads(other.read_text(encoding="utf-8"))
            result["figures"] |= {key: found["figures"][key] for key in keys}
            result.setdefault("parts", {})[name.removesuffix(".json")] = {"commit": found["commit"]}
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def compare_simulated(num_seeds: int) -> tuple[Figures, dict[str, Any]]:
    """(figures over all pairs of runs, one row per mode of the first pair)."""
    rates: dict[str, list[float]] = {}
    outcomes: dict[str, list[Outcome]] = {}
    for seed in range(num_seeds):
        machine = Machine(shapes=SessionShapes(seed=seed))
        for name, settings in _modes().items():
            outcome = simulate(machine, {"num_steps": _STEPS, **settings}, _SESSIONS, seed)
            rates.setdefault(name, []).append(outcome.trained / outcome.virtual_s)
            outcomes.setdefault(name, []).append(outcome)
            print(f"seed {seed} {name:28s} {_describe(outcome)}", flush=True)
    sync = [max(pair) for pair in zip(rates["sync"], rates["sync, no refill"], strict=True)]
    best = outcomes[f"async {_BOUND}"]
    figures = {
        "async_vs_sync_trajectories": median_ratio(rates[f"async {_BOUND}"], sync),
        "async_vs_sync_trajectories_least": min(
            ours / theirs for ours, theirs in zip(rates[f"async {_BOUND}"], sync, strict=True)
        ),
        "engine_busy_share": statistics.median(outcome.engine_busy_share for outcome in best),
        "engine_busy_share_sync": statistics.median(
            outcome.engine_busy_share for outcome in outcomes["sync"]
        ),
        "trainer_busy_share": statistics.median(outcome.trainer_busy_share for outcome in best),
        "trainer_busy_share_sync": statistics.median(
            outcome.trainer_busy_share for outcome in outcomes["sync"]
        ),
        "largest_lag": float(max(max(outcome.lags) for outcome in best)),
        "dropped_for_age_share": max(row["left_out_share"] for outcome in best for row in _rl_rows(outcome)),
    }
    for bound in (1, 2):
        figures[f"async_vs_sync_trajectories_bound_{bound}"] = median_ratio(rates[f"async {bound}"], sync)
    rows = {name: _describe_all(found) for name, found in outcomes.items()}
    return figures, rows


def _modes() -> dict[str, dict[str, Any]]:
    modes: dict[str, dict[str, Any]] = {"sync": {}, "sync, no refill": {"max_refill_rounds": 0}}
    modes |= {f"async {bound}": {"max_staleness": bound} for bound in (1, 2, _BOUND)}
    modes["async 4, two extra members"] = {"max_staleness": _BOUND, "extra_members": 2}
    modes["async 4, longest first of 16"] = {
        "max_staleness": _BOUND,
        "curriculum": {"longest_first": 16},
    }
    return modes


def compare_publications(num_seeds: int) -> Figures:
    """Overlapped publication against a trainer that waits until the engine serves its weights."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(num_seeds):
        machine = replace(Machine(shapes=SessionShapes(seed=seed)), **_SLOW_LINK)
        for overlapped, found in rates.items():
            rl = {"num_steps": _STEPS, "max_staleness": _BOUND, "overlap_publication": overlapped}
            outcome = simulate(machine, rl, _SESSIONS, seed)
            found.append(outcome.trained / outcome.virtual_s)
            name = "overlapped" if overlapped else "in turn"
            print(f"seed {seed} slow link, {name:17s} {_describe(outcome)}", flush=True)
    return {
        "overlapped_vs_in_turn_trajectories": median_ratio(rates[True], rates[False]),
        "overlapped_vs_in_turn_least": min(a / b for a, b in zip(rates[True], rates[False], strict=True)),
    }


def scale(most_sessions: int) -> Figures:
    """Processor time per session turn, by the number of concurrent sessions."""
    figures: Figures = {}
    for count in (100, 1_000, 10_000):
        if count > most_sessions:
            break
        machine = replace(
            Machine(),
            num_slots=count,
            engine_tokens_per_s=40.0 * count,
            trainer_tokens_per_s=1e9,
            stage_s=0.0,
        )
        rl = {"num_steps": 2, "max_staleness": 1, "groups_per_step": count // 16, "group_size": 8}
        outcomes = [simulate(machine, rl, count, seed) for seed in range(5 if count < 10_000 else 1)]
        cost = statistics.median(1e6 * outcome.cpu_s / outcome.turns for outcome in outcomes)
        figures[f"cost_per_turn_us_at_{count}"] = cost
        figures["sessions_per_controller"] = float(max(outcome.most_running for outcome in outcomes))
        print(f"{count} sessions: {cost:.0f} us per turn; {_describe(outcomes[0])}", flush=True)
    return figures


def _describe(outcome: Outcome) -> str:
    return (
        f"{outcome.trained} trained, {outcome.ended} ended in {outcome.virtual_s:.0f} s, "
        f"engine {outcome.engine_busy_share:.2f}, trainer {outcome.trainer_busy_share:.2f} busy, "
        f"lag {max(outcome.lags)}, most {outcome.most_running} at once"
    )


def _describe_all(outcomes: list[Outcome]) -> dict[str, float]:
    rates = [outcome.trained / outcome.virtual_s for outcome in outcomes]
    left_out = [row.get("left_out_share", 0.0) for outcome in outcomes for row in _rl_rows(outcome)[-1:]]
    lags = [lag for outcome in outcomes for lag in outcome.lags]
    return {
        "trained_per_s": statistics.median(rates),
        "ended_per_s": statistics.median(outcome.ended / outcome.virtual_s for outcome in outcomes),
        "engine_busy_share": statistics.median(outcome.engine_busy_share for outcome in outcomes),
        "trainer_busy_share": statistics.median(outcome.trainer_busy_share for outcome in outcomes),
        "mean_lag": statistics.fmean(lags),
        "largest_lag": float(max(lags)),
        "left_out_share": statistics.median(left_out),
    }


def _rl_rows(outcome: Outcome) -> list[dict[str, Any]]:
    return [row for row in outcome.rows if row["kind"] == "rl"]


if __name__ == "__main__":
    main()
