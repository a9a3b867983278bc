"""A training run whose processes are killed at random, compared with undisturbed runs.

    python benchmarks/chaos.py --config FILE [--set KEY=VALUE]... [--max-staleness N]... [--kills N]
                               [--gap-s S] [--seeds N] [--directory DIR] [--json FILE]

The run is `etude train --executor ray` with engines, rollout workers and a trainer in processes of their own;
weights go through an S3 server and a relay in front of it, sandboxes are on a sandbox server. Every few
seconds one of these processes is killed with SIGKILL, including a sandbox's and the run's own (which is then
restarted with `--resume`); servers restart after a while. Victim and time are drawn from a fixed seed. Then
the run directory is audited: every prompt exactly once, every step once, no token of an older version than
one sampled before it, and the reward within the range of undisturbed runs of several seeds (in one process).

With `--max-staleness 0` (sampling and training in turns) and one engine the disturbed run has the tokens and
weights of an undisturbed run of its seed, bit for bit. Figures of runs with more staleness begin with
`async_`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from chaos_audit import Audit, audit
from chaos_run import KINDS, Disturbance, Run
from chaos_services import open_servers
from common import Figures, merge_result, print_table

_NOISE = 2.0
"""Standard deviations between seeds within which rewards count as equal."""
_IN_PROCESSES = (
    'executor="ray"',
    "cluster.heartbeat_s=0.5",
    "cluster.backoff_s=0.1",
    "weights.lease_s=2",
    "weights.wait_s=180",
    "weights.patience_s=120",
    "sandbox.patience_s=120",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--max-staleness", type=int, action="append", metavar="N", help="default: 0 and 2")
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--gap-s", type=float, default=4.0, help="mean time between two kills")
    parser.add_argument("--seeds", type=int, default=3, help="undisturbed runs")
    parser.add_argument(
        "--directory", type=Path, help="keeps the runs; those that are there are only audited"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    failed: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # servers and runs end with it
    for max_staleness in arguments.max_staleness or (0, 2):
        with open_directory(arguments.directory) as directory:
            figures, peers = measure(
                arguments.config,
                [*arguments.settings, f"rl.max_staleness={max_staleness}"],
                arguments.kills,
                arguments.gap_s,
                arguments.seeds,
                directory / f"staleness-{max_staleness}",
            )
        name = "async_" if max_staleness else ""
        failed += [name + problem for problem in find_problems(figures, arguments.kills)]
        figures = {name + key: value for key, value in figures.items()}
        print_table(f"chaos, max_staleness = {max_staleness}", figures)
        for key, value in peers.items():
            print(f"  {key}: {value}")
        if arguments.json is not None:
            merge_result(
                arguments.json, [name or "in turns"], figures, {name + k: v for k, v in peers.items()}
            )
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


@contextlib.contextmanager
def open_directory(named: Path | None) -> Iterator[Path]:
    """The directory of the runs: `named`, or a temporary one."""
    if named is not None:
        yield named
        return
    with tempfile.TemporaryDirectory(prefix="etude-chaos-") as directory:
        yield Path(directory)


def find_problems(figures: Figures, kills: int) -> list[str]:
    """Names of the figures that violate their requirement."""
    wrong = [name for name in ("prompts_lost", "prompts_repeated", "old_versions") if figures[name]]
    if not figures["reward_within_noise"]:
        wrong.append("reward_within_noise")
    return wrong + (["chaos_kills"] if figures["chaos_kills"] < kills else [])


def measure(
    config: Path,
    settings: Sequence[str],
    kills: int,
    gap_s: float,
    seeds: int,
    directory: Path,
) -> tuple[Figures, dict[str, Any]]:
    """(figures, details for the JSON). `settings` override `config` in all runs. Only the disturbed run has
    rollout workers."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = [*settings, f"runs_directory={json.dumps(str(directory))}"]
    undisturbed: list[Audit] = []
    for seed in range(seeds):
        own = [*settings, "cluster.workers=0", f'name="seed-{seed}"', f"seed={seed}"]
        run = Run(config, own, directory / f"seed-{seed}")
        if not run.is_finished:
            run.run_to_end()
        undisturbed.append(audit(run.directory, run.loaded.rl))
    disturbance = Disturbance(kills, random.Random(0), gap_s)
    run = Run(config, [*settings, *_IN_PROCESSES, 'name="disturbed"', "seed=0"], directory / "disturbed")
    record = directory / "disturbed.json"
    if run.is_finished and record.exists():
        saved = json.loads(record.read_text(encoding="utf-8"))
        disturbance.killed.update(saved["killed"])
        run.sittings, run.wall_s = saved["sittings"], saved["wall_s"]
    else:
        with open_servers(directory / "servers") as servers:
            run.use_servers(servers)
            run.run_to_end(disturbance)
        saved = {"killed": disturbance.killed, "sittings": run.sittings, "wall_s": run.wall_s}
        record.write_text(json.dumps(saved), encoding="utf-8")
    disturbed = audit(run.directory, run.loaded.rl)
    rewards = [one.reward for one in undisturbed]
    spread = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    mean = statistics.mean(rewards)
    killed = disturbance.killed
    figures = {
        "chaos_kills": float(killed.total()),
        **{f"kills_{kind.replace(' ', '_')}": float(killed[kind]) for kind in KINDS},
        "sittings": float(run.sittings),
        "prompts": float(disturbed.prompts),
        "prompts_undisturbed": float(undisturbed[0].prompts),
        "prompts_lost": float(disturbed.lost),
        "prompts_repeated": float(disturbed.repeated),
        "steps": float(disturbed.steps),
        "trained_groups": float(disturbed.trained),
        "trained_groups_undisturbed": float(undisturbed[0].trained),
        "old_versions": float(disturbed.old_versions),
        "infrastructure_failures": float(disturbed.failures),
        "reward_disturbed": disturbed.reward,
        "reward_undisturbed_mean": mean,
        "reward_undisturbed_min": min(rewards),
        "reward_undisturbed_max": max(rewards),
        "reward_undisturbed_stdev": spread,
        "reward_within_noise": float(abs(disturbed.reward - mean) <= _NOISE * spread + 1e-9),
        "same_prompts_as_undisturbed": float(disturbed.numbers == undisturbed[0].numbers),
        "same_weights_as_undisturbed": float(disturbed.weights == undisturbed[0].weights),
        "wall_s_disturbed": run.wall_s,
    }
    return figures, {
        "undisturbed rewards by seed": [round(one.reward, 4) for one in undisturbed],
        "undisturbed trained groups by seed": [one.trained for one in undisturbed],
        "faults as the run counted them": disturbed.faults,
    }


if __name__ == "__main__":
    main()
