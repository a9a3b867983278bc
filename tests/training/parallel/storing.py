"""Functions that tests of checkpoints run on every rank."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from etude.config import CheckpointConfig
from etude.config.optimizer import MidtrainOptimizerConfig
from etude.errors import EtudeError
from etude.model import LanguageModel
from etude.observe import MemorySink, SilentObserver
from etude.training import NextTokenTrainer, ShuffledDocuments
from etude.training.checkpoints import (
    CheckpointKeeper,
    FollowerWriter,
    load_checkpoint,
    load_stored,
    save_checkpoint,
)
from etude.training.parallel.mesh_ranks import MeshRanks
from etude.training.parallel.ranks import Ranks
from tests.training.builders import midtrain_config, midtrain_documents
from tests.training.parallel.bodies import model_of

Dtype = Literal["float32", "bfloat16"]
Values = dict[str, np.ndarray]
"""Whole weights and optimiser states by name."""


def trainer_on(
    ranks: Ranks, seed: int, dtype: Dtype = "float32", model: LanguageModel | None = None
) -> NextTokenTrainer:
    """With Adam's and Muon's states in this type; several micro-batches in a step."""
    model = model or model_of(seed)
    if isinstance(ranks, MeshRanks):
        ranks.place(model)
    optimizer = MidtrainOptimizerConfig(warmup_steps=2, matrix_learning_rate=0.02, state_dtype=dtype)
    config = midtrain_config(micro_batch_tokens=32, balance_weight=0.0, optimizer=optimizer)
    batches = ShuffledDocuments(midtrain_documents(), config.tokens_per_step, 0)
    return NextTokenTrainer(model, batches, config, ranks=ranks)


def values_of(ranks: Ranks, trainer: NextTokenTrainer) -> Values:
    """Brought together by other means than a checkpoint's."""
    layout = ranks.layout(trainer.model)
    found = {name: layout.gather(name, part).detach().float() for name, part in layout.parts.items()}
    optimizer = trainer._optimizer
    for name, state in optimizer._adamw.state.items():
        for key, part in state.items():
            found[f"{name} {key}"] = layout.gather(name, part).float() if part.ndim else part
    for name, part in optimizer._muon.buffers.items():
        found[f"{name} momentum"] = layout.gather(name, part).float()
    return {name: tensor.numpy().copy() for name, tensor in found.items()}


def save(
    ranks: Ranks, directory: Path, steps: int, more: int = 0, dtype: Dtype = "float32"
) -> tuple[Values, Values]:
    """Trains, saves, and trains on: what there was when it was saved, and in the end."""
    trainer = trainer_on(ranks, 0, dtype)
    for _ in range(steps):
        trainer.step()
    saved = values_of(ranks, trainer)
    save_checkpoint(
        directory,
        ranks.stored(trainer.model),
        {"trainer": trainer.state_dict(), "stage": "rl", "step": steps},
    )
    for _ in range(more):
        trainer.step()
    return saved, values_of(ranks, trainer)


def go_on(ranks: Ranks, directory: Path, more: int = 0, dtype: Dtype = "float32") -> tuple[Values, Values]:
    """Restores into a model of other weights, and trains on: what was read, and what there is in the end."""
    trainer = trainer_on(ranks, 3, dtype)
    model, state = load_stored(directory, ranks.stored(trainer.model), {"trainer": trainer.state_dict()})
    assert model is not None and state is not None
    trainer.load_state_dict(state["trainer"])
    ranks.load_weights(trainer.model, model.state_dict())
    read = values_of(ranks, trainer)
    for _ in range(more):
        trainer.step()
    return read, values_of(ranks, trainer)


def refuse(ranks: MeshRanks, directory: Path, changes: dict[str, Any]) -> tuple[str, bool]:
    """What restoring raises, and whether the model is as it was."""
    trainer = trainer_on(ranks, 3, model=model_of(3, **changes))
    before = values_of(ranks, trainer)
    try:
        load_stored(directory, ranks.stored(trainer.model), {"trainer": trainer.state_dict()})
        said = "nothing"
    except EtudeError as error:
        said = f"{type(error).__name__}: {error.message}"
    after = values_of(ranks, trainer)
    return said, all(np.array_equal(before[name], after[name]) for name in before)


def save_again(ranks: MeshRanks, directory: Path, num_bytes: int) -> str:
    """What saving a state of so many bytes more raises."""
    trainer = trainer_on(ranks, 1)
    state = {"trainer": trainer.state_dict(), "more": torch.zeros(num_bytes, dtype=torch.uint8)}
    try:
        save_checkpoint(directory, ranks.stored(trainer.model), state)
    except EtudeError as error:
        return type(error).__name__
    return "nothing"


def keep(ranks: MeshRanks, latest: Path) -> list[bool]:
    """Saves three times while weights change; whether what came to be there is what there was at the call,
    and whether the first rank went on meanwhile."""
    trainer = trainer_on(ranks, 0)
    settings = CheckpointConfig(every_s=1e-6, keep_last=2)
    found: list[bool] = []
    expected: Values = {}
    with CheckpointKeeper(latest, settings, MemorySink(), SilentObserver()) as keeper:
        write = keeper.write if ranks.is_main else FollowerWriter(asynchronous=True)
        for step in range(1, 4):
            trainer.step()
            expected = values_of(ranks, trainer)
            state = {"trainer": trainer.state_dict(), "stage": "rl", "step": step}
            write(latest, ranks.stored(trainer.model), state)
            trainer.step()
        if isinstance(write, FollowerWriter):
            write._pool.shutdown()  # the ranks' groups end when this function returns
            return []
        found.append(not keeper.due)
        keeper.flush()
    model, state = load_checkpoint(latest)
    assert state is not None
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    moments = state["trainer"]["optimizer"]["adamw"]
    found.append(all(np.array_equal(weights[name], expected[name]) for name in weights))
    found += [np.array_equal(moments[n]["exp_avg"].float(), expected[f"{n} exp_avg"]) for n in moments]
    return found


def die_while_saving(ranks: MeshRanks, directory: Path, victim: int, num_syncs: int, told: Path) -> None:
    """Saves once, then dies at the n-th sync of a file in the second save; others write down what they
    saw."""
    save_checkpoint(directory, ranks.stored(trainer_on(ranks, 1).model), {"stage": "rl", "step": 1})
    rank = torch.distributed.get_rank()
    left, fsync = [num_syncs], os.fsync

    def dying_fsync(descriptor: int) -> None:
        fsync(descriptor)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    model = trainer_on(ranks, 2).model
    if rank == victim:
        os.fsync = dying_fsync
    threading.Timer(60.0, os._exit, [1]).start()
    try:
        save_checkpoint(directory, ranks.stored(model), {"stage": "rl", "step": 2})
    except EtudeError as error:
        told.write_text(type(error).__name__)
    os._exit(0)
