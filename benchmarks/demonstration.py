"""The demonstration of configs/smollm2.toml: SFT until it stops helping, then RL against more SFT, by seed.

    chats ──> SFT, round after round, until `validation` has not risen in two ──> the best round
                                                                                  ├──> RL
                                                                                  └──> SFT for the same time
                                                                                       (each for every seed)

All are commands of `etude`, each with a run directory or evaluation of its own. Unfinished runs are resumed
and finished ones reused, so that a stopped script can be started again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from common import Figures

from etude.evaluation import EvaluationResult, compare_results
from etude.evaluation.sessions import SessionRow
from etude.observe import RunDirectory, read_metrics

CONFIG = Path(__file__).parents[1] / "configs" / "smollm2.toml"
CHATS = "expert.jsonl"
ROUND_STEPS = 120
"""Steps of SFT in a round: with fewer the pass rate rises by less than 100 tasks can resolve."""
PATIENCE = 2
"""SFT ends after this many rounds that do not raise the pass rate on `validation`."""
SFT_SEED = 0
"""Seed of the SFT rounds, from whose best model all seeds start."""


def find_best(rates: Sequence[float], most_rounds: int = 0) -> tuple[int, bool]:
    """(first round with the highest pass rate, whether SFT has ended). `most_rounds` 0: no limit."""
    best = rates.index(max(rates))
    return best, len(rates) == most_rounds or len(rates) - 1 - best >= PATIENCE


def well_formed_share(
    before: Sequence[SessionRow], control: Sequence[SessionRow], trained: Sequence[SessionRow]
) -> float:
    """Share of the lead of `trained` over `control` that comes from tasks whose session `before` had no
    malformed call; 0 without a lead."""
    passed = [{row.task: float(bool(row.passed)) for row in rows} for rows in (control, trained)]
    leads = {row.task: passed[1][row.task] - passed[0][row.task] for row in before}
    total = sum(leads.values())
    formed = sum(leads[row.task] for row in before if not row.malformed)
    return formed / total if total > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One seed of the demonstration."""

    config: ClassVar[Path] = CONFIG
    directory: Path
    """Directory of model, chats, runs and evaluations; shared by seeds."""
    gguf: Path
    seed: int
    settings: Sequence[str] = ()
    """`KEY=VALUE` overrides for all runs."""
    num_tasks: int = 200
    num_validation_tasks: int = 100
    most_rounds: int = 0
    """Most rounds of SFT; 0: until the pass rate no longer rises."""
    num_sessions: int = 15_000
    has_control: bool = True
    """Whether to continue SFT for as long as RL took, for comparison."""

    def measure(self) -> Figures:
        """Runs what is missing, and returns the figures."""
        rates, tuned = self._tune(self.prepare())
        trained = self.train("train", f"rl-{self.seed}", tuned)
        stages = (trained.read_json(trained.report_file) or {})["stages"]
        before, after = (self.judge(run, "heldout", self.num_tasks) for run in (tuned, trained))
        figures = {
            "seed": float(self.seed),
            "sft_rounds": float(len(rates)),
            "validation_pass_rate": max(rates),
            "rl_s": stages["rl_s"],
            "heldout_sft": pass_rate(before),
            "heldout_rl": pass_rate(after),
            **lead_of(before, after, "rl_gain"),
        }
        if not self.has_control:
            return figures
        print(f"held out: {pass_rate(before):.1%}, after RL {pass_rate(after):.1%}", flush=True)
        num_steps = max(1, round(stages["rl_s"] / self._step_s("sft-1")))
        control = self.train("sft", f"more-{self.seed}", tuned, f"sft.num_steps={num_steps}")
        more = self.judge(control, "heldout", self.num_tasks)
        rows = [result.modes["sampled"].rows for result in (before, more, after)]
        return figures | {
            "more_sft_steps": float(num_steps),
            "heldout_more_sft": pass_rate(more),
            **lead_of(more, after, "rl_lead"),
            "rl_lead_in_well_formed": well_formed_share(*rows),
        }

    def prepare(self) -> Path:
        """Imports the model and generates the SFT chats next to it; returns the model's directory."""
        base, chats = self.directory / "base", self.directory / CHATS
        if not base.exists():
            self.run_etude("model", "import", self.gguf, base)
        if not chats.exists():
            options = ("--config", self.config, "--flawless", "--count", self.num_sessions)
            self.run_etude("tasks", "sessions", chats, *options)
        return base

    def _tune(self, base: Path) -> tuple[list[float], RunDirectory]:
        """SFT in rounds: (pass rate of each round, run of the best one)."""
        rounds: list[RunDirectory] = []
        rates: list[float] = []
        best, ended = 0, False
        while not ended:
            start = _final(rounds[-1]) if rounds else base
            settings = (f"sft.num_steps={ROUND_STEPS}", f"seed={SFT_SEED}")
            rounds.append(self.train("sft", f"sft-{len(rounds) + 1}", start, *settings))
            rates.append(pass_rate(self.judge(rounds[-1], "validation", self.num_validation_tasks)))
            best, ended = find_best(rates, self.most_rounds)
            print(f"SFT round {len(rates)}: {rates[-1]:.1%} of validation", flush=True)
        return rates, rounds[best]

    def train(self, command: str, name: str, start: Path | RunDirectory, *settings: str) -> RunDirectory:
        """Starts or resumes the run of this name if it is not finished; returns it."""
        path = self.run_path(name)
        chosen = self.options(start, *settings, f'name="{path.name}"')
        self.run_etude(command, *chosen, *(["--resume"] if path.exists() else []))
        return RunDirectory.open(path)

    def options(self, start: Path | RunDirectory, *settings: str) -> list[str]:
        """Command-line options of `etude` for a run from the weights of `start`."""
        chosen = [
            f"seed={self.seed}",
            *self.settings,
            *settings,
            f'runs_directory="{self.directory / "runs"}"',
            f'initial_checkpoint="{start if isinstance(start, Path) else _final(start)}"',
            f'sft.sources.expert.path="{self.directory / CHATS}"',
        ]
        return ["--config", str(self.config), *(part for setting in chosen for part in ("--set", setting))]

    def judge(self, run: RunDirectory, suite: str, num_tasks: int, samples: int = 1) -> EvaluationResult:
        """Evaluates `samples` sessions per task at temperature 1. `suite`: a split or a task directory."""
        out = self.directory / "evaluations" / f"{run.name}-{Path(suite).name}"
        options = ("--suite", suite, "--tasks", num_tasks, "--samples", samples)
        options = (*options, "--temperature", 1, "--out", out)
        self.run_etude("eval", run.path, *options)
        return EvaluationResult.read(out)

    def _step_s(self, name: str) -> float:
        """Wall seconds per SFT step of a run."""
        rows = read_metrics(RunDirectory.open(self.run_path(name)).metrics_file)
        wall_s = {row["step"]: row["wall_s"] for row in rows if row["kind"] in ("heldout", "sft")}
        first, last = min(wall_s), max(row["step"] for row in rows if row["kind"] == "sft")
        ended_s = next(row["wall_s"] for row in rows if row["kind"] == "sft" and row["step"] == last)
        return (ended_s - wall_s[first]) / (last - first)

    def run_path(self, name: str) -> Path:
        """The directory of the run of this name."""
        return self.directory / "runs" / name

    def run_etude(self, *words: Any) -> str:
        """Runs an etude command and returns its output. Raises subprocess.CalledProcessError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        command = [str(Path(sys.executable).with_name("etude")), *map(str, words)]
        print("$ etude", *command[1:], flush=True)
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _final(run: RunDirectory) -> Path:
    return run.checkpoints / "final"


def pass_rate(result: EvaluationResult) -> float:
    """Pass rate of sampled sessions."""
    return float(result.modes["sampled"].figures["pass_rate"])


def lead_of(before: EvaluationResult, after: EvaluationResult, name: str) -> Figures:
    """Rise of the pass rate on the same tasks, with its 95 % interval if there is one."""
    found = compare_results(before, after)["sampled"]["pass_rate"]
    low, high = found["ci95"] or (-1.0, 1.0)
    return {name: found["difference"], f"{name}_low": low, f"{name}_high": high}


def table_of(results: Sequence[Figures]) -> str:
    """The figures of several seeds as a Markdown table."""
    rows = [
        "| SFT | seed | before RL | after 30 steps of RL | gain | after SFT for the same time | RL's lead |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    named = ({key.removeprefix("demonstration_"): value for key, value in one.items()} for one in results)
    for found in sorted(named, key=lambda found: (found["sft_rounds"], found["seed"])):
        rounds = found["sft_rounds"]
        more = f"{found['heldout_more_sft']:.1%}" if "heldout_more_sft" in found else "not run"
        columns = [
            "one round" if rounds == 1 else f"best of {rounds:.0f} rounds",
            f"{found['seed']:.0f}",
            f"{found['heldout_sft']:.1%}",
            f"**{found['heldout_rl']:.1%}** ({found['rl_s'] / 60:.0f} min)",
            points({"rl_gain": found["heldout_rl"] - found["heldout_sft"], **found}, "rl_gain"),
            more,
            points(found, "rl_lead"),
        ]
        rows.append(f"| {' | '.join(columns)} |")
    return "\n".join(rows) + "\n"


def points(found: Figures, name: str) -> str:
    """A difference in points, with its interval if there is one."""
    if name not in found:
        return ""
    ends = [f"{100 * found[key]:+.1f}" for key in (f"{name}_low", f"{name}_high") if key in found]
    return f"{100 * found[name]:+.1f}" + (f" ({' to '.join(ends)})" if ends else "")
