"""A consumer of a recorded stream in a process of its own, which may be killed at any of its moments."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from etude.store.blobs import FileBlobs
from etude.store.trajectories import TrajectoryLog
from etude.training import RlTrainer, load_checkpoint
from etude.training.checkpoints.saving import has_checkpoint
from etude.training.stream import RecordedStream
from etude.weights import MemoryWeights
from tests.model.builders import small_model
from tests.training.builders import rl_config

NUM_STEPS, GROUPS_PER_STEP = 4, 2
CONFIG = rl_config({"kind": "decoupled"}, num_steps=NUM_STEPS)


class Moments:
    """Counts what happens, and kills the process at the n-th."""

    def __init__(self, kill_at: int) -> None:
        self._left = kill_at

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def consume(directory: Path, kill_at: int) -> None:
    """Trains from the last checkpoint to the last step; `kill_at`: the moment of death, 0 for none.

    Moments: groups taken, step taken, checkpoint saved; and in between every fsync of the save.
    """
    torch.set_num_threads(1)
    moment = Moments(kill_at)
    fsync = os.fsync

    def dying_fsync(descriptor: int) -> None:
        fsync(descriptor)
        moment()

    os.fsync = dying_fsync
    checkpoint = directory / "checkpoint"
    trainer = RlTrainer(small_model(0), CONFIG, "run", MemoryWeights(), FileBlobs(directory / "routes").get)
    state: dict[str, Any] = {}
    if has_checkpoint(checkpoint):
        trainer.restore(checkpoint)
        state = load_checkpoint(checkpoint)[1] or {}
    stream = RecordedStream(TrajectoryLog(directory / "trajectories"), CONFIG, state.get("stream"))
    trained: list[str] = list(state.get("trained", []))
    while trainer.version.step < NUM_STEPS:
        groups = stream.next_groups(GROUPS_PER_STEP)
        moment()
        trainer.step(groups)
        moment()
        trained += [group.id for group in groups]
        trainer.save(checkpoint, {"stream": stream.state_dict(), "trained": trained})
        moment()
