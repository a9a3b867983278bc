"""Trainer and engine that use one device in turn.

    sessions run            engine: weights, KV cache               trainer: weights
      │ all closed: the engine frees its KV cache
    step                    engine: weights                         trainer: weights, gradients, states
      │ gradients are freed, the optimiser's states move to host memory
    publish, stage          engine: weights twice                   trainer: weights
      │ activate: the former version is freed
    sessions run            the first step allocates the KV cache again

No turn needs waiting: the synchronous loop's sessions have ended when the trainer is called, and the engine
refuses to free memory that a session still uses. Weights, tokens and order are those of a run that is not
colocated, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from etude.controller.training_part import TrainingPart
from etude.inference import EngineService
from etude.protocols import Handle

_MAKES_ROOM = frozenset({"step", "publish"})
"""Calls before which the engine frees its KV cache: published weights are held besides those served."""


class ColocatedTrainer(Handle[TrainingPart]):
    """A TrainingPart that uses the device while it is called; the engine uses it otherwise. It begins with
    states in host memory.

    An error in a step leaves both as between two steps: gradients freed, states in host memory.
    """

    def __init__(self, trainer: Handle[TrainingPart], engine: EngineService) -> None:
        self.node = trainer.node
        self._trainer = trainer
        self._engine = engine

    async def send(self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """See Handle.send. A step's metrics include `handover_s`: the time that the exchange of the device
        took before and after it, without the copies of states back to the device during the step."""
        began = time.perf_counter()
        if method in _MAKES_ROOM:
            await self._engine.release_memory()
        if method != "step":
            return await self._trainer.send(method, arguments, named)
        handover_s = time.perf_counter() - began
        try:
            metrics = await self._trainer.send(method, arguments, named)
        finally:
            began = time.perf_counter()
            await self._trainer.call(TrainingPart.offload_states)
        return {**metrics, "handover_s": handover_s + time.perf_counter() - began}

    async def stop(self) -> None:
        await self._trainer.stop()

    def kill(self) -> None:
        self._trainer.kill()
