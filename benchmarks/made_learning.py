"""RL on made tasks, one seed: SFT on sessions of other modules until the model solves some, then RL.

    tasks ──split──> of modules trained on ──reference sessions──> SFT, round after round ──┐
               ├───> the easiest of the other modules ──pass@8 after each round────────────>┴──> RL on these
               └───> the next easy ones of these modules: judged before and after RL, which never sees them

With configs/made-tasks.toml, on tasks of `etude tasks make`, of one project or of several in one directory.
All are commands of `etude`; unfinished runs are resumed and finished ones reused, so that a stopped script
can be started again.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from common import Figures
from demonstration import CHATS, SFT_SEED, Demonstration, lead_of, pass_rate, points

from etude.evaluation import EvaluationResult, pass_at_k
from etude.evaluation.statistics import verdicts_by_task
from etude.observe import RunDirectory, read_metrics
from etude.tasks.harbor import find_directories, read_harbor

SAMPLES = 8
ENOUGH = 0.2
"""Least pass@8 with which RL begins."""
ROUND_STEPS = 120


@dataclass(frozen=True, slots=True)
class MadeLearning(Demonstration):
    """One seed of the measurement."""

    config: ClassVar[Path] = Path(__file__).parents[1] / "configs" / "made-tasks.toml"
    num_tasks: int = 24
    """Most tasks for RL; each occurs in one or two of its steps."""
    tasks: Path = field(kw_only=True)
    """Directory of made tasks."""
    most_rounds: int = field(default=3, kw_only=True)
    """Most rounds of SFT; if pass@8 is below `ENOUGH` after them, there is no RL."""

    def measure(self) -> Figures:
        """Runs what is missing, and returns the figures."""
        base = self.prepare()
        tried = self._fine_tune(base)
        tuned, before = tried[-1]
        figures = {
            "seed": float(self.seed),
            "sft_rounds": float(len(tried)),
            "rl_tasks": float(len(self._choose()[0])),
            "sft_pass_at_8": solved_share(before),
            "sft_pass_at_1": pass_rate(before),
        }
        if solved_share(before) < ENOUGH:
            return figures
        trained = self.train("train", f"rl-{self.seed}", tuned)
        after = self.judge(trained, str(self._suite), self.num_tasks, SAMPLES)
        rows = [row for row in read_metrics(trained.metrics_file) if row["kind"] == "rl"]
        quarter = max(1, len(rows) // 4)
        figures |= {
            "rl_steps": float(len(rows)),
            "rl_pass_rate_first_quarter": sum(row["pass_rate"] for row in rows[:quarter]) / quarter,
            "rl_pass_rate_last_quarter": sum(row["pass_rate"] for row in rows[-quarter:]) / quarter,
            "rl_pass_at_8": solved_share(after),
            "rl_pass_at_1": pass_rate(after),
            **lead_of(before, after, "rl_lead"),
        }
        if not self._others.exists():  # RL uses all easy tasks
            return figures
        unseen_before = self.judge(tuned, str(self._others), self.num_tasks, SAMPLES)
        unseen_after = self.judge(trained, str(self._others), self.num_tasks, SAMPLES)
        return figures | {
            "unseen_sft_pass_at_1": pass_rate(unseen_before),
            "unseen_rl_pass_at_1": pass_rate(unseen_after),
            **lead_of(unseen_before, unseen_after, "unseen_rl_lead"),
        }

    def prepare(self) -> Path:
        """Imports the model and writes SFT chats and RL tasks next to it; returns the model's directory."""
        base, chats = self.directory / "base", self.directory / CHATS
        if not base.exists():
            self.run_etude("model", "import", self.gguf, base)
        for suite, tasks in zip((self._suite, self._others), self._choose(), strict=True):
            for task in (task for task in tasks if not (suite / task.name).exists()):
                shutil.copytree(task, suite / task.name, symlinks=True)
        if not chats.exists():
            chosen = (f'tasks.directory="{self.tasks}"', *self.settings)
            options = ("--config", self.config, *(word for one in chosen for word in ("--set", one)))
            self.run_etude("tasks", "sessions", chats, *options, "--count", self.num_sessions)
        return base

    def options(self, start: Path | RunDirectory, *settings: str) -> list[str]:
        """See Demonstration.options; with the tasks of RL."""
        return Demonstration.options(self, start, f'tasks.directory="{self._suite}"', *settings)

    @property
    def _suite(self) -> Path:
        return self.directory / "easiest"

    @property
    def _others(self) -> Path:
        return self.directory / "others"

    def _choose(self) -> tuple[list[Path], list[Path]]:
        """(RL's tasks, as many others): the easy tasks of modules not used for SFT, those whose solution
        changes the fewest lines first."""
        found = [(path, read_harbor(path).metadata) for path in find_directories(self.tasks, "--learn")]
        easy = [(path, known["split"]) for path, known in found if known["difficulty"] == "easy"]
        others = [path for path, split in easy if split != "train"]
        ranked = sorted(others, key=lambda path: (count_changed_lines(path), path.name))
        return ranked[: self.num_tasks], ranked[self.num_tasks : 2 * self.num_tasks]

    def _fine_tune(self, base: Path) -> list[tuple[RunDirectory, EvaluationResult]]:
        """Rounds of SFT: (run, evaluation on RL's tasks) of each."""
        found: list[tuple[RunDirectory, EvaluationResult]] = []
        while len(found) < self.most_rounds and (not found or solved_share(found[-1][1]) < ENOUGH):
            start = found[-1][0] if found else base
            name = f"sft-{len(found) + 1}"
            run = self.train("sft", name, start, f"sft.num_steps={ROUND_STEPS}", f"seed={SFT_SEED}")
            found.append((run, self.judge(run, str(self._suite), self.num_tasks, SAMPLES)))
            print(f"SFT round {len(found)}: pass@{SAMPLES} {solved_share(found[-1][1]):.1%}", flush=True)
        return found


def count_changed_lines(task: Path) -> int:
    """Lines that a made task's solution removes from or adds to its workspace."""
    files, workspace = task / "solution" / "files", task / "environment" / "workspace"
    total = 0
    for path in (path for path in files.rglob("*") if path.is_file()):
        old = workspace / path.relative_to(files)
        before = old.read_text().splitlines() if old.exists() else []
        changes = difflib.ndiff(before, path.read_text().splitlines())
        total += sum(line[0] in "+-" for line in changes)
    return total


def solved_share(result: EvaluationResult) -> float:
    """pass@8 over the tasks with at least 8 sessions."""
    verdicts = verdicts_by_task(result.modes["sampled"].rows).values()
    rates = [pass_at_k(len(some), sum(some), SAMPLES) for some in verdicts if len(some) >= SAMPLES]
    return sum(rates) / len(rates) if rates else 0.0


def learned_table(results: Sequence[Figures]) -> str:
    """The figures of several seeds as a Markdown table."""
    rows = [
        "| seed | sessions that solve their task, after SFT | after RL | gain | tasks solved in at least one "
        "of eight sessions | RL's own sessions that passed, first and last quarter of its steps |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    named = ({key.removeprefix("learning_"): value for key, value in one.items()} for one in results)
    for found in sorted(named, key=lambda found: found["seed"]):
        gain = {"rl_lead": found["rl_pass_at_1"] - found["sft_pass_at_1"], **found}
        solved = (found["rl_tasks"] * found[key] for key in ("sft_pass_at_8", "rl_pass_at_8"))
        quarters = (found[f"rl_pass_rate_{quarter}_quarter"] for quarter in ("first", "last"))
        columns = [
            f"{found['seed']:.0f}",
            f"{found['sft_pass_at_1']:.1%}",
            f"**{found['rl_pass_at_1']:.1%}**",
            points(gain, "rl_lead"),
            f"{' → '.join(f'{count:.0f}' for count in solved)} of {found['rl_tasks']:.0f}",
            " → ".join(f"{rate:.0%}" for rate in quarters),
        ]
        rows.append(f"| {' | '.join(columns)} |")
    return "\n".join(rows) + "\n"
