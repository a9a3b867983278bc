"""Is it RL that helps? Compares RL with other uses of the same time or the same sampled tokens.

    python benchmarks/controls.py --config configs/quickstart.toml        tunes, then runs what is missing
    python benchmarks/controls.py --seeds 3,4 --minutes 240               a part of it, on another night
    python benchmarks/controls.py --table README.md                       puts the table into README.md

Each seed has a whole run of RL. Every control (controls_recipes.py) begins with that run's weights or
configuration and is compared with it at equal wall time and, where it samples, at equal sampled tokens. RL
and each control choose among equally many settings on the split `validation`, with a seed used for nothing
else. All models then play the same held-out tasks of all families. Runs end after a number of steps, not by a
clock: the processor time per step is known from the tuning runs.

Results in the file are not measured again, and existing run directories are not run again: a stopped script
resumes. Another machine or core can continue with a copy of the results file, and `--join` merges its
results; all of one seed belongs on one machine, because controls need the weights of its run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import print_table, put_table, write_result
from controls_recipes import (
    CONTROLS,
    RL,
    Pace,
    Recipe,
    Reference,
    Trained,
    begin_reference,
)
from controls_statistics import figures_of, share_solved, table_of

from etude.controller.evaluate import MIDTRAINED
from etude.controller.evaluation import EvaluationRequest, evaluate
from etude.controller.families import open_family
from etude.observe import SilentObserver, commit, describe_machine

RESULTS = Path(__file__).parent / "results" / "controls.json"
TUNING_SEED = 1000


@dataclass
class Results:
    """Results so far, stored in the committed results file."""

    path: Path
    peers: dict[str, Any]
    """`tuning`: recipe -> trials. `timing`: see Reference; of the first trial. `clusters`: suite -> the
    cluster of each task. `runs`: seed -> recipe -> budget -> figures, and a verdict per task: 1 solved, 0
    failed, x voided."""

    @classmethod
    def load(cls, path: Path) -> Results:
        stored = json.loads(path.read_text(encoding="utf-8"))["peers"] if path.exists() else {}
        return cls(path, {"tuning": {}, "timing": None, "clusters": {}, "runs": {}} | stored)

    def save(self) -> None:
        """Writes everything; called after each run, so that a stopped script loses one run at most."""
        write_result(self.path, figures_of(self.peers), self.peers)

    def merge(self, others: Sequence[Path]) -> None:
        """Adds the trials, seeds and recipes of seeds that other files have and this one lacks."""
        for other in others:
            peers = Results.load(other).peers
            for recipe, trials in peers["tuning"].items():
                ours = self.peers["tuning"].setdefault(recipe, [])
                ours += trials[len(ours) :]
            for seed, rows in peers["runs"].items():
                self.peers["runs"][seed] = rows | self.peers["runs"].get(seed, {})
            self.peers["clusters"] = peers["clusters"] | self.peers["clusters"]
            self.peers["timing"] = self.peers["timing"] or peers["timing"]
        self.save()

    def settings_of(self, recipe: Recipe) -> int:
        """Index of the trial that solved most validation tasks; the first among equals."""
        solved = [trial["solved"] for trial in self.peers["tuning"][recipe.name]]
        return solved.index(max(solved))

    def pace_of(self, recipe: Recipe) -> Pace:
        """Cost of a recipe's step in RL steps: sampled tokens of each with its best settings, and processor
        time, which other programs hardly affect, or wall time where that was not measured. An RL step is
        assumed to take equally long at every learning rate."""
        ours, rl = (self.peers["tuning"][one.name][self.settings_of(one)] for one in (recipe, RL))
        if not ours["rl_steps"]:
            return Pace()
        timed = max(self.peers["tuning"][RL.name], key=lambda trial: trial["processor_s"])
        time_s = "processor_s" if ours["processor_s"] and timed["processor_s"] else "train_s"
        seconds = _by_step(ours, time_s) / _by_step(timed, time_s)
        return Pace(seconds, _by_step(ours, "sampled_tokens") / _by_step(rl, "sampled_tokens"))


def _by_step(trial: Mapping[str, float], name: str) -> float:
    return trial[name] / trial["rl_steps"]


class OutOfTimeError(Exception):
    """The script's time limit has passed: no further run may begin."""


class Comparison:
    """One execution of the script: tuning and comparing."""

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self._options, self._results = options, results
        self._ends_s = time.monotonic() + 60.0 * options.minutes
        names = options.only.split(",") if options.only else [recipe.name for recipe in (RL, *CONTROLS)]
        self._recipes = [recipe for recipe in (RL, *CONTROLS) if recipe.name in names]

    def run(self) -> None:
        """Tunes and compares everything that the results lack."""
        if not self._options.seeds:
            return
        self._tune()
        for seed in self._options.seeds.split(","):
            self._compare(int(seed))

    def _tune(self) -> None:
        """Runs every trial of each recipe and stores its share of solved validation tasks."""
        for recipe in self._recipes:
            trials = self._results.peers["tuning"].setdefault(recipe.name, [])
            for number in range(len(trials), min(self._options.trials, len(recipe.trials))):
                self._check_time()
                reference = self._reference(TUNING_SEED, RL.trials[0])
                trained = recipe.train(reference, recipe, number, Pace())["wall"]
                verdicts = self._judge(reference, trained.checkpoint, "validation")
                trial = {"settings": recipe.trials[number], "solved": share_solved(verdicts)}
                trials.append(trial | trained.figures())
                self._results.save()
                print(f"{recipe.name} {number}: {trials[-1]}", flush=True)

    def _compare(self, seed: int) -> None:
        """Runs RL and all controls of one seed."""
        rows = self._results.peers["runs"].setdefault(str(seed), {})
        settings = RL.trials[self._results.settings_of(RL)]
        for recipe in self._recipes:
            if recipe.name in rows:
                continue
            self._check_time()
            reference = self._reference(seed, settings)
            if recipe is RL:
                rows[MIDTRAINED] = {
                    "wall": self._row(reference, Trained(reference.run.checkpoints / MIDTRAINED))
                }
                rows[RL.name] = {"wall": self._row(reference, reference.trained) | reference.behaviour}
            else:
                number, pace = self._results.settings_of(recipe), self._results.pace_of(recipe)
                found = recipe.train(reference, recipe, number, pace)
                rows[recipe.name] = {
                    budget: self._row(reference, trained) for budget, trained in found.items()
                }
            self._results.save()
            print_table(f"after {recipe.name} of seed {seed}", figures_of(self._results.peers))

    def _reference(self, seed: int, settings: Sequence[str]) -> Reference:
        options, peers = self._options, self._results.peers
        reference = begin_reference(options.config, options.runs, seed, settings, peers["timing"])
        peers["timing"] = reference.timing
        return reference

    def _row(self, reference: Reference, trained: Trained) -> dict[str, Any]:
        """A model's figures and verdicts, and the commit and machine of its training."""
        about = {"commit": commit(), "machine": describe_machine().get("cpu", "")}
        return trained.figures() | about | {"verdicts": self._judge(reference, trained.checkpoint, "heldout")}

    def _judge(self, reference: Reference, checkpoint: Path, split: str) -> dict[str, dict[str, str]]:
        """suite -> greedy, sampled -> the verdict of each task; `split`: validation or heldout."""
        found = dict[str, dict[str, str]]()
        for suite in suites_of(reference, split):
            out = self._options.runs / "evaluations" / checkpoint.parents[1].name / checkpoint.name / suite
            request = EvaluationRequest(str(checkpoint), suite, self._options.tasks, out=out)
            modes = evaluate(request, SilentObserver()).modes
            clusters = " ".join(row.cluster for row in modes["sampled"].rows)
            if self._results.peers["clusters"].setdefault(suite, clusters) != clusters:
                raise SystemExit(f"{self._results.path} was measured with other tasks of {suite}: remove it")
            found[suite] = {name: "".join(_sign(row.passed) for row in modes[name].rows) for name in modes}
        return found

    def _check_time(self) -> None:
        if time.monotonic() > self._ends_s:
            raise OutOfTimeError


def suites_of(reference: Reference, split: str) -> list[str]:
    """Suites of a split: all families that the run trains on; for `heldout` also families it never sees."""
    suites = [split, *(["heldout_family"] if split == "heldout" else [])]
    known = open_family(reference.run.config).splits
    return [suite for suite in suites if suite in known] + [
        f"{name}_{split}" for name in reference.report.get("families", {})
    ]


def _sign(passed: bool | None) -> str:
    return "x" if passed is None else str(int(passed))


def main() -> None:
    """Runs what is missing, and prints the figures or the table."""
    options = parse_arguments()
    results = Results.load(options.json)
    if options.join:
        results.merge(options.join)
    if options.table is not None:
        put_table(options.table, "controls.py", table_of(results.peers))
        return
    try:
        Comparison(options, results).run()
    except OutOfTimeError:
        print("no time for a further run; the same command goes on")
    print_table("RL over the controls, in shares of solved tasks", figures_of(results.peers))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.toml"))
    parser.add_argument("--runs", type=Path, default=Path("runs/controls"), help="where runs are kept")
    parser.add_argument(
        "--seeds", default="0,1,2,3,4", help='seeds of the comparison; "" only prints what is stored'
    )
    parser.add_argument("--only", help="names of recipes, with commas between them")
    parser.add_argument("--trials", type=int, default=3, help="settings to choose from, at most")
    parser.add_argument("--tasks", type=int, default=120, help="of each suite, at most")
    parser.add_argument("--join", type=Path, nargs="+", default=[], help="files of results to take up first")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no run begins after these")
    parser.add_argument(
        "--json", type=Path, nargs="?", default=RESULTS, const=RESULTS, help="file of the results"
    )
    parser.add_argument("--table", type=Path, help="put the table into this document, and run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
