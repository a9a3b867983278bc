"""Small whole runs, in this process or in one that may be killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from safetensors.torch import load_file

from etude.config import RunConfig, dump_config
from etude.controller.forecast import Speeds
from etude.controller.probing import Probe
from etude.controller.train import train
from etude.observe import Observer, RunDirectory
from etude.observe.metrics import read_metrics
from etude.observe.observer import SilentObserver
from etude.store.trajectories import TrajectoryLog

_SET_CHILD_SUBREAPER = 36
_COMMAND = "from etude.cli import main; main()"


def tiny_config(directory: Path, **sections: Any) -> RunConfig:
    """A run of seconds, from nothing to a report; `sections` are merged over its own."""
    tree: dict[str, Any] = {
        "name": "tiny",
        "runs_directory": str(directory),
        "num_threads": 1,
        "tokenizer": {"vocab_size": 400},
        "model": {
            "hidden_size": 32,
            "num_layers": 1,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 16,
            "num_experts": 4,
            "expert_size": 32,
        },
        "agent": {"max_turns": 2, "max_tokens": 512, "max_message_tokens": 12},
        "engine": {"num_slots": 16},
        "midtrain": {
            "num_sessions": 40,
            "num_fix_documents": 20,
            "num_rewrite_documents": 20,
            "num_code_documents": 20,
            "num_steps": 20,
            "tokens_per_step": 256,
        },
        "rl": {
            "num_steps": 2,
            "groups_per_step": 2,
            "group_size": 2,
            "updates_per_step": 1,
            "max_refill_rounds": 0,
            "reward": {"price": {"validation_tasks": 2}},
        },
        "evaluation": {"num_tasks": 4, "num_samples": 2, "num_repeated_tasks": 3},
        "checkpoint": {"every_s": 0.001, "curve_every_steps": 1},
    }
    for name, values in sections.items():
        tree[name] = {**tree[name], **values} if isinstance(values, dict) and name in tree else values
    return RunConfig.model_validate(tree)


def changed(config: RunConfig, **sections: Any) -> RunConfig:
    """With other values in some sections."""
    tree = config.model_dump(mode="json", exclude_none=True)
    for name, values in sections.items():
        tree[name] = {**tree[name], **values} if isinstance(values, dict) else values
    return RunConfig.model_validate(tree)


def run_here(
    config: RunConfig,
    resume: bool = False,
    observer: Observer | None = None,
    probe: Probe = lambda *_: Speeds(midtrain_step_s=1.0, rl_step_s=10.0, evaluation_s=5.0),
) -> tuple[RunDirectory, dict[str, Any]]:
    """The run's directory and its report. `probe`: stands in for a measurement of this machine."""
    path = Path(config.runs_directory) / config.name
    run = RunDirectory.open(path) if resume else RunDirectory.create(config)
    return run, train(config, run, observer or SilentObserver(), resume, probe)


@contextlib.contextmanager
def run_elsewhere(config: RunConfig, resume: bool = False) -> Iterator[subprocess.Popen[str]]:
    """`etude train` in a process of its own; killed in the end if it still runs."""
    directory = Path(config.runs_directory)
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{config.name}.toml"
    file.write_text(dump_config(config))
    command = [sys.executable, "-c", _COMMAND, "train", "--config", str(file)]
    process = subprocess.Popen(
        [*command, "--resume"] if resume else command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(process: subprocess.Popen[str], holds: Callable[[], bool], timeout_s: float = 300.0) -> None:
    """Waits for a condition while the process runs. Fails with the process's output if it ends before."""
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end_s, "it takes too long"
        time.sleep(0.02)


def die_when(holds: Callable[[], bool]) -> None:
    """Kills this process and all others of its group as soon as a condition holds."""

    def watch() -> None:
        while not holds():
            time.sleep(0.005)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def num_rl_steps(config: RunConfig) -> int:
    """The last RL step that the run's metrics tell of."""
    rows = read_metrics(Path(config.runs_directory) / config.name / "metrics.jsonl")
    return max((row["step"] for row in rows if row["kind"] == "rl"), default=0)


def num_stored_parts(config: RunConfig) -> int:
    """Of the log: each is a group, or a few."""
    return len(list((Path(config.runs_directory) / config.name / "trajectories").glob("part-*")))


def final_weights(run: RunDirectory) -> dict[str, str]:
    """A digest of each of the final checkpoint's tensors, by name."""
    return weights_of(run.checkpoints / "final")


def weights_of(checkpoint: Path) -> dict[str, str]:
    """A digest of each tensor, by name."""
    tensors = load_file(checkpoint / "model.safetensors")
    return {name: _digest(tensor.view(torch.uint8).numpy()) for name, tensor in tensors.items()}


def collected(run: RunDirectory) -> list[tuple[str, str, str, str]]:
    """Every stored session in the order of storage: id, status, digests of tokens and log-probabilities."""
    return [
        (str(m.id), m.status.value, _digest(m.segments[0].tokens), _digest(m.segments[0].logprobs))
        for group in TrajectoryLog(run.trajectories).read()
        for m in group.members
    ]


@contextlib.contextmanager
def adopting_orphans() -> Iterator[Callable[[], list[int]]]:
    """What children leave behind becomes a child of this process. Yields a listing of those alive."""
    libc = ctypes.CDLL(None)
    assert libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    before = set(_children())
    try:
        yield lambda: [pid for pid in _children() if pid not in before]
    finally:
        libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _children() -> list[int]:
    """Children of this process that are alive: what has ended and waits to be reaped does not count."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.append(int(entry.name))
    return found


def _digest(values: np.ndarray) -> str:
    return blake3(values.tobytes()).hexdigest(8)
