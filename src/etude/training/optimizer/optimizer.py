"""The optimiser of a training stage: Muon and AdamW with a schedule and gradient clipping, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from etude.config import OptimizerConfig
from etude.errors import CheckpointError
from etude.training.optimizer.adamw import AdamW
from etude.training.optimizer.muon import Muon
from etude.training.optimizer.offending import OffendingBatches
from etude.training.optimizer.offload import OffloadedStates
from etude.training.optimizer.rounding import Rounding
from etude.training.parallel.ranks import Ranks, SingleRank

Describe = Callable[[], Mapping[str, Any]]
"""Returns a batch as tensors and plain values. Called only if the batch is to be stored."""


class Optimizer:
    """Sums gradients over ranks, clips them and updates this rank's parts of the weights.

    With several ranks every method but `schedule` is collective: all ranks call it together.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        num_steps: int,
        ranks: Ranks | None = None,
        offending: OffendingBatches | None = None,
    ) -> None:
        """`num_steps`: optimiser steps of the whole stage, for the schedule. `ranks`: the processes that
        train `model`, which is sharded over them already. `offending`: stores batches whose gradient is not
        finite."""
        self._model = model
        self._config = config
        self._num_steps = max(1, num_steps)
        self._ranks: Ranks = ranks or SingleRank()
        self._offending = offending
        self._layout = self._ranks.layout(model)
        matrices: list[str] = []
        if config.matrix_optimizer == "muon":
            matrices = [n for n, shape in self._layout.shapes.items() if is_matrix(n, shape)]
        self._muon = Muon(self._layout, matrices, state_dtype=getattr(torch, config.state_dtype))
        rest = [name for name in self._layout.parts if name not in set(matrices)]
        self._adamw = AdamW(self._layout, rest, config)
        moments = [value for state in self._adamw.state.values() for value in state.values()]
        self._states = OffloadedStates([*moments, *self._muon.buffers.values()])
        self.num_taken = 0
        self.num_skipped = 0

    def schedule(self) -> float:
        """The factor on the learning rates for the next step."""
        return schedule_factor(self._config, self.num_taken, self._num_steps)

    def step(self, describe: Describe | None = None, num_threads: int = 1) -> float:
        """Clips and applies the gradients; returns their norm before clipping. `num_threads`: number of
        threads that divide the matrices among them, which changes no bit.

        Offloaded states are moved back first. A step whose gradient is not finite changes nothing and is
        counted in `num_skipped`; its batch, as returned by `describe`, is stored.
        """
        self._states.fetch()
        self._ranks.reduce_gradients(self._model)
        norm = self._layout.clip_norm(self._config.clip_norm)
        if math.isfinite(norm):
            gradients = self._layout.gradients()
            factor, rounding = self.schedule(), Rounding(self.num_taken, self._layout.part_index)
            self._adamw.step(gradients, self._config.learning_rate * factor, rounding)
            rate = self._config.matrix_learning_rate * factor
            self._muon.step(gradients, rate, rounding, num_threads)
        else:
            self.num_skipped += 1
            if self._offending is not None and describe is not None:
                self._offending.save(self.num_taken, norm, describe())
        self._layout.clear_gradients()
        self.num_taken += 1
        return norm

    def offload(self) -> None:
        """Clears the gradients, and moves the states to host memory until the next step."""
        self._layout.clear_gradients()
        self._states.offload()

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs to resume exactly, by parameter.

        Its tensors are the live ones, on the device or in host memory; with several ranks, each returns its
        shards.
        """
        return {
            "adamw": {
                name: {key: self._stored(name, value) for key, value in state.items()}
                for name, state in self._adamw.state.items()
            },
            "muon": {name: self._stored(name, part) for name, part in self._muon.buffers.items()},
            "num_taken": self.num_taken,
            "num_skipped": self.num_skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the `state_dict` of an optimiser of the same model and configuration, written with any number
        of ranks.

        Raises CheckpointError and changes nothing if it is of another algorithm or another model.
        """
        try:
            received = _layout_of(state)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"is not an optimiser's state, or of an older format: {error!r}", field="optimizer"
            ) from error
        difference = _difference(received, self._own_layout())
        if difference:
            raise CheckpointError(
                "does not match the run's optimiser",
                field="optimizer",
                received=difference,
                fix="resume with the configuration and the model that the run started with",
            )
        for name, own in self._adamw.state.items():
            for key, target in own.items():
                self._states.values(target).copy_(self._part(name, state["adamw"][name][key]))
        for name, buffer in self._muon.buffers.items():
            self._states.values(buffer).copy_(self._layout.cut(name, state["muon"][name]))
        self.num_taken = state["num_taken"]
        self.num_skipped = state["num_skipped"]

    def _stored(self, name: str, value: Tensor) -> Tensor:
        value = self._states.values(value)
        return self._layout.stored(name, value) if value.ndim else value

    def _part(self, name: str, value: Tensor) -> Tensor:
        return self._layout.cut(name, value) if value.ndim else value

    def _own_layout(self) -> dict[str, str]:
        dtypes = {name: state["exp_avg"].dtype for name, state in self._adamw.state.items()}
        dtypes |= {name: buffer.dtype for name, buffer in self._muon.buffers.items()}
        rules = dict.fromkeys(self._adamw.state, "adamw") | dict.fromkeys(self._muon.buffers, "muon")
        shapes = self._layout.shapes
        return {name: f"{rules[name]} {tuple(shapes[name])} {dtypes[name]}" for name in rules}


def is_matrix(name: str, shape: torch.Size) -> bool:
    """Whether Muon applies to a parameter: to matrices of the blocks, not to embedding tables."""
    return len(shape) >= 2 and "embedding" not in name


def _layout_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Each parameter's algorithm, shape and type: they must match for a state to be loaded."""
    rows = {name: ("adamw", values["exp_avg"]) for name, values in state["adamw"].items()}
    rows |= {name: ("muon", buffer) for name, buffer in state["muon"].items()}
    return {name: f"{rule} {tuple(tensor.shape)} {tensor.dtype}" for name, (rule, tensor) in rows.items()}


def _difference(received: Mapping[str, str], own: Mapping[str, str]) -> str:
    """The first parameter, in order of names, that does not match; empty if all do."""
    for name in sorted({*received, *own}):
        if received.get(name) != own.get(name):
            return f"{name}: {received.get(name, 'nothing')} instead of {own.get(name, 'nothing')}"
    return ""


def schedule_factor(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """The factor for step `step` (from 0) of `num_steps`: a linear warm-up times the named schedule.

    `constant`  1
    `linear`    from 1, where the warm-up ends, in a line to `final_share` at the end
    `cosine`    the same in half a cosine (Loshchilov and Hutter 2017)
    `wsd`       1, then a line down to 0 over the last `decay_share`, held at `final_share` (Hu et al. 2024)
    """
    warm = min(1.0, (step + 1) / (config.warmup_steps + 1))
    return warm * _after_warmup(config, step, num_steps)


def _after_warmup(config: OptimizerConfig, step: int, num_steps: int) -> float:
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "wsd":
        decay_steps = config.decay_share * num_steps
        remaining = (num_steps - step) / decay_steps if decay_steps else 1.0
        return max(config.final_share, min(1.0, remaining))
    span = max(1, num_steps - config.warmup_steps)
    progress = min(1.0, max(0.0, (step - config.warmup_steps) / span))
    if config.schedule == "cosine":
        progress = (1.0 - math.cos(math.pi * progress)) / 2.0
    return 1.0 - (1.0 - config.final_share) * progress
