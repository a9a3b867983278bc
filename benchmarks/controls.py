"""Is it RL that helps? The same wall time spent on something else, from the same seeds.

    python benchmarks/controls.py runs/seed-0 [runs/seed-1 ...] [--only CONTROL] --json FILE

For each finished run, controls with its own configuration, seed and time:

- **midtraining**: from nothing, with as many more steps as fit into the time that RL took; the schedule is
  stretched over all of them. No RL.
- **rejection**: rejection-sampled fine-tuning. From the run's mid-trained weights, sessions are sampled for
  half of the time that RL took; for the other half the weights are fine-tuned on those that were solved.
- **on_policy_rejection**: the RL loop itself for as long, with the likelihood of solved sessions in place of
  the policy gradient: after each step the next sessions are sampled from the new weights.

Steps are counted out by the rates of the given run. The controls are ordinary runs beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from common import Figures, print_table, write_result

from etude.config import RunConfig
from etude.controller.train import MIDTRAINED, train
from etude.model.huggingface import load_model, save_model
from etude.observe import RunDirectory, SilentObserver
from etude.store.trajectories import TrajectoryLog
from etude.tokens.tokenizer import Tokenizer
from etude.training import Document, NextTokenTrainer, ShuffledDocuments

CONTROLS = ("midtraining", "rejection", "on_policy_rejection")


def main() -> None:
    arguments = parse_arguments()
    rows: dict[str, dict[str, Figures]] = {}
    for path in arguments.runs:
        run = RunDirectory.open(path)
        report = run.read_json(run.report_file)
        rows[run.name] = {"reinforcement": result_of(report)}
        for control in CONTROLS if arguments.only is None else [arguments.only]:
            rows[run.name][control] = result_of(run_control(run, report, control))
            print_table(f"{run.name}: {control}", rows[run.name][control])
    figures = compare(rows)
    print_table("reinforcement against the controls, worst seed", figures)
    if arguments.json:
        write_result(arguments.json, figures, {"runs": rows})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="finished run directories, one per seed")
    parser.add_argument("--only", choices=CONTROLS, help="run this control alone")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser.parse_args()


def run_control(run: RunDirectory, report: dict[str, Any], control: str) -> dict[str, Any]:
    """The report of a control of `run`; one that is there already is read."""
    if control == "midtraining":
        return report_of(midtraining_control(run, report["stages"]))
    if control == "on_policy_rejection":
        return report_of(on_policy_control(run, report["stages"]))
    sampling, num_tokens = sampling_control(run, report)
    report_of(sampling)
    tuned = run.path.parent / f"{run.name}-tuned"
    if not tuned.exists():
        fine_tune(run, solved_sessions(Path(sampling.runs_directory) / sampling.name), num_tokens, tuned)
    return report_of(evaluation_of(run, tuned))


def report_of(config: RunConfig) -> dict[str, Any]:
    """Runs a configuration unless it has run already."""
    directory = Path(config.runs_directory) / config.name
    if directory.exists():
        return RunDirectory.open(directory).read_json(directory / "report.json")
    return train(config, RunDirectory.create(config), SilentObserver(), resume=False)


def beside(run: RunDirectory, suffix: str, **changes: Any) -> RunConfig:
    """The run's configuration under another name in the same folder."""
    names = {"name": f"{run.name}-{suffix}", "runs_directory": str(run.path.parent), "max_wall_s": 0.0}
    return run.config.model_copy(update=names | changes)


def midtraining_control(run: RunDirectory, stages: dict[str, float]) -> RunConfig:
    """Mid-training for the time of mid-training and RL together."""
    config = run.config
    seconds = stages["midtrain_s"] + stages["rl_s"]
    num_steps = round(config.midtrain.num_steps * seconds / stages["midtrain_s"])
    return beside(
        run,
        "midtraining",
        midtrain=config.midtrain.model_copy(update={"num_steps": num_steps}),
        rl=config.rl.model_copy(update={"num_steps": 0}),
    )


def on_policy_control(run: RunDirectory, stages: dict[str, float]) -> RunConfig:
    """Rejection sampling step by step from the run's mid-trained weights, for as many seconds as RL took: a
    time limit becomes a plan of steps, in which the evaluations are counted."""
    return beside(
        run,
        "on-policy-rejection",
        initial_checkpoint=str(run.checkpoints / MIDTRAINED),
        max_wall_s=stages["rl_s"] + stages["evaluation_s"],
        rl=run.config.rl.model_copy(update={"algorithm": "rejection_sampling"}),
    )


def sampling_control(run: RunDirectory, report: dict[str, Any]) -> tuple[RunConfig, int]:
    """Sampling from the mid-trained weights for half of RL's time, and the tokens to train on in the rest."""
    rl, half_s = run.config.rl, report["stages"]["rl_s"] / 2
    rates = report["throughput"]
    num_steps = round(report["rl_steps"] * half_s / rates["rollout_s"])
    optimizer = rl.optimizer.model_copy(update={"learning_rate": 0.0})
    config = beside(
        run,
        "samples",
        initial_checkpoint=str(run.checkpoints / MIDTRAINED),
        evaluation=run.config.evaluation.model_copy(update={"num_tasks": 1}),
        rl=rl.model_copy(update={"num_steps": num_steps, "optimizer": optimizer}),
    )
    return config, round(half_s * rates["training_tokens_per_s"])


def evaluation_of(run: RunDirectory, tuned: Path) -> RunConfig:
    """A run that only judges `tuned`."""
    rl = run.config.rl.model_copy(update={"num_steps": 0})
    return beside(run, "rejection", initial_checkpoint=str(tuned), rl=rl)


def solved_sessions(directory: Path) -> list[Document]:
    """Every solved session of a run; what the agent wrote counts."""
    log = TrajectoryLog(RunDirectory.open(directory).trajectories)
    members = [member for group in log.read() for member in group.members]
    return [
        Document(segment.tokens, segment.sampled.astype(np.float32), segment.sampled)
        for member in members
        if member.reward is not None and member.reward.task == 1.0
        for segment in member.segments
    ]


def fine_tune(run: RunDirectory, documents: list[Document], num_tokens: int, directory: Path) -> None:
    """AdamW at RL's peak rate over `num_tokens` tokens of the documents; saves model and tokenizer."""
    source = run.checkpoints / MIDTRAINED
    model, config = load_model(source), run.config.midtrain
    settings = config.model_copy(
        update={
            "num_steps": num_tokens // config.tokens_per_step,
            "optimizer": config.optimizer.model_copy(
                update={
                    "matrix_optimizer": "adamw",
                    "learning_rate": run.config.rl.optimizer.learning_rate,
                }
            ),
        }
    )
    trainer = NextTokenTrainer(
        model, ShuffledDocuments(documents, settings.tokens_per_step, run.config.seed), settings
    )
    for _ in range(settings.num_steps):
        trainer.step()
    save_model(model, directory)
    Tokenizer.load(source).save(directory)


def result_of(report: dict[str, Any]) -> Figures:
    """What is compared."""
    after = report["heldout_after"]
    return {
        "wall_s": report["wall_s"],
        "rl_steps": report["rl_steps"],
        "greedy": after["greedy"]["pass_rate"],
        "sampled": after["sampled"]["pass_rate"],
        "family_greedy": report["heldout_family_after"]["greedy"]["pass_rate"],
    }


def compare(rows: dict[str, dict[str, Figures]]) -> Figures:
    """Least lead of RL over each control, in pass rate."""
    return {
        f"{mode}_lead_over_{control}": min(
            row["reinforcement"][mode] - row[control][mode] for row in rows.values()
        )
        for control in CONTROLS
        if all(control in row for row in rows.values())
        for mode in ("greedy", "sampled")
    }


if __name__ == "__main__":
    main()
