"""Processor time per session turn in a run's main process over Ray, with and without rollout workers.

    python benchmarks/rollout_workers.py --checkpoint DIR [--json FILE]

Real sessions of a given model on generated tasks, with sandboxes and grading, on one engine. Measured is the
processor time of all threads of the run's process, including Ray's: it limits the number of sessions of a
run. The two modes alternate; medians over blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Figures, median_figures, merge_result, print_table

from etude.config import RunConfig
from etude.controller.arrangement import RunContext, open_executor
from etude.controller.compute import choose_place
from etude.controller.engines import serve_model
from etude.controller.families import open_family
from etude.controller.models import resolve_model
from etude.controller.remote.arrangement import open_remote
from etude.evaluation import play_sessions, plays_of
from etude.model.loading import load_any_model
from etude.observe import MemorySink, RunDirectory
from etude.observe.observer import SilentObserver
from etude.records import SamplingParams
from etude.tokens.tokenizer import Tokenizer

_ROOM = {"cpus": 0.25}
_WARM_UP = 16
"""Unmeasured sessions at the start, which fill caches and open connections."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a model with its tokenizer")
    parser.add_argument("--sessions", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    blocks: dict[int, list[Figures]] = {0: [], asked.workers: []}
    for _ in range(asked.blocks):
        for num_workers, found in blocks.items():
            found.append(_measure(asked, num_workers))
            print(f"{num_workers} workers: {found[-1]}", flush=True)
    figures: Figures = {}
    for num_workers, found in blocks.items():
        values = median_figures(found)
        figures |= {f"{name}_with_{num_workers}_workers": value for name, value in values.items()}
    print_table("rollout workers", figures)
    if asked.json is not None:
        merge_result(
            asked.json, ["rollout_workers"], figures, {"blocks": {str(k): v for k, v in blocks.items()}}
        )


def _config(asked: argparse.Namespace, directory: str, num_workers: int) -> RunConfig:
    tree: dict[str, Any] = {
        "name": "workers",
        "runs_directory": directory,
        "initial_checkpoint": str(asked.checkpoint),
        "num_threads": 1,
        "executor": "ray",
        "engine": {"num_slots": asked.at_once, "native_threads": 1},
        "cluster": {
            "workers": num_workers,
            "trainer": _ROOM,
            "engine": _ROOM,
            "worker": _ROOM,
            "heartbeat_s": 1.0,
        },
    }
    config = resolve_model(RunConfig.model_validate(tree))
    place = choose_place()
    engine = config.engine.model_copy(update={"kernels": place.kernels})
    return config.model_copy(update={"device": place.device, "dtype": place.dtype, "engine": engine})


def _measure(asked: argparse.Namespace, num_workers: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="etude-workers-") as directory:
        config = _config(asked, directory, num_workers)
        with open_executor(config.cluster) as executor:
            return asyncio.run(_run(executor, config, asked))


async def _run(executor: Any, config: RunConfig, asked: argparse.Namespace) -> Figures:
    run_directory = RunDirectory(Path(config.runs_directory))
    context = RunContext(run_directory, asked.checkpoint, None, MemorySink(), SilentObserver(), faults={})
    model, tokenizer = load_any_model(asked.checkpoint), Tokenizer.load(asked.checkpoint)
    tasks = open_family(config).evaluation_tasks("heldout", asked.sessions + _WARM_UP)
    async with open_remote(executor, config, tokenizer, model, context) as arrangement:
        parts = arrangement.parts
        await serve_model(parts.weights, parts.service, model, config.name)

        async def run(first: int, count: int) -> int:
            """Runs `count` tasks from number `first` on; returns the number of turns."""
            some = tasks[first : first + count]
            ran = await play_sessions(
                parts.environment,
                parts.service,
                plays_of(some),
                f"s{first}",
                0,
                SamplingParams(),
                asked.at_once,
            )
            assert all(one.reward is not None for one in ran), "the infrastructure failed"
            return sum(len(one.turns) for one in ran)

        await run(0, _WARM_UP)
        began, used = time.perf_counter(), _processor_s()
        turns = await run(_WARM_UP, asked.sessions)
        elapsed_s, used = time.perf_counter() - began, _processor_s() - used
    return {
        "driver_us_per_turn": 1e6 * used / turns,
        "driver_us_per_session": 1e6 * used / asked.sessions,
        "driver_share_of_a_core": used / elapsed_s,
        "sessions_per_s": asked.sessions / elapsed_s,
        "turns_per_session": turns / asked.sessions,
    }


def _processor_s() -> float:
    """Processor time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
